"""riftco.patch: a model of transformers on riftco's kernels, module by module, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from .. import bitsandbytes as bnb
from .. import peft, trl
from ..swap import own_class, restore, swap
from . import layers
from . import loss as losses
from .attention import NAME, register
from .families import FAMILIES, Family, known
from .report import Entry, PatchReport

BEFORE = "_riftco_attn_before"
REPLACED = "the forward of the instance was replaced by others"


class _Found(NamedTuple):
    module: Any
    kind: str
    family: Family


def patch(
    model: nn.Module,
    *,
    norm: bool = True,
    mlp: bool = True,
    rope: bool = True,
    attention: bool = True,
    loss: bool = True,
    lora: bool = False,
    nf4: bool = False,
    eval_logits: bool = False,
) -> PatchReport:
    """Let a model of transformers run on riftco's kernels: norms, MLPs, rotation, attention and loss.

        print(riftco.patch(model))

    Only this model changes: its modules become instances of subclasses that differ in `forward`; parameters, names,
    hooks and files stay as they are. A second call changes nothing more; `unpatch` takes everything back.

    Args:
        model: of the families llama, mistral, qwen2, qwen3, smollm3, gemma2, gemma3 (text), phi3; alone, with another
            head on it, inside of a larger model, or under PEFT's wrappers. Where PEFT or a trainer of TRL wraps the
            model later, call it on what they made of it (`trainer.model`), so that what they brought is swapped, too.
        norm: RMS norms.
        mlp: gated units; what the last projection reads is made again in the backward.
        rope: rotary embeddings, in float32 (transformers rounds the tables of cosines to the model's dtype).
        attention: sets the model's attn_implementation to "riftco" (see `register`).
        loss: with labels, the loss is taken from the hidden states and `logits` is None, in training and in eval;
            model(..., output_logits=True) asks for them. Without labels nothing changes.
        lora: PEFT's LoRA layers as one operator each, while they are plain LoRA without dropout over a frozen linear.
        nf4: bitsandbytes' 4-bit layers (nf4) as riftco.nn.NF4Linear; nothing is requantised.
        eval_logits: in eval mode, give logits with labels, too: for Trainer's compute_metrics.

    Returns:
        A report of what was swapped, what was not, and why.

    Raises:
        ValueError: no part of the model is of a family that is known.
    """
    wanted = {"norm": norm, "mlp": mlp, "rope": rope, "loss": loss}
    if not _find(model):
        names = ", ".join(f.name for f in FAMILIES)
        raise ValueError(f"riftco.patch: nothing in a {type(model).__name__} is of the families {names}")
    register()
    if nf4:
        bnb.replace(model)
    everything = _find(model)
    whys = [_why_not(found, everything) for found in everything]
    for found, why in zip(everything, whys):
        part = "rope" if found.kind in ("rotary", "attention") else found.kind
        if wanted[part] and why is None:
            _swap(found, eval_logits)
        if attention and found.kind == "attention" and found.module.config._attn_implementation != NAME:
            vars(found.module)[BEFORE] = found.module.config._attn_implementation
    for found in everything if attention else ():
        if found.kind == "attention":
            found.module.config._attn_implementation = NAME
    for layer in peft.lora_layers(model) if lora else ():
        if "forward" not in vars(layer):
            swap(layer, peft.lora_forward)
    return report(model)


def unpatch(model: nn.Module) -> int:
    """Take back all that `patch` did to a model; how many modules came back. PEFT's and TRL's wrappers stay."""
    count = bnb.put_back(model)
    module: Any
    for module in model.modules():
        count += restore(module) + trl.restore_head(module)
        vars(module).pop(losses.EVAL_LOGITS, None)
        before = vars(module).pop(BEFORE, None)
        if before is not None:
            module.config._attn_implementation = before
    return count


def report(model: nn.Module) -> PatchReport:
    """What runs on riftco in `model` now, and what does not and why."""
    states: dict[tuple[str, str, str | None], int] = {}
    names: list[str] = []

    def count(part: str, module: nn.Module, why: str | None) -> None:
        key = part, own_class(module).__name__, why
        states[key] = states.get(key, 0) + 1

    everything = _find(model)
    for found in everything:
        module = found.module
        names += [found.family.name] if found.family.name not in names else []
        done = own_class(module) is not type(module)
        if found.kind == "loss":
            done = trl.swapped(module) if trl.has_fused_head(module) else done
        why = _why_not(found, everything)
        if found.kind != "rotary":
            part = "rope" if found.kind == "attention" else found.kind
            count(part, module, why if why is not None else None if done else "not asked for")
        if found.kind == "attention":
            implementation = module.config._attn_implementation
            count("attention", module, None if implementation == NAME else f"attn_implementation={implementation!r}")
    for layer in peft.lora_layers(model):
        done = own_class(layer) is not type(layer)
        count("lora", layer, peft.lora_why_not(layer) if done else "not asked for")
    for module in model.modules():
        if bnb.ORIGINAL in vars(module):
            count("nf4", vars(module)[bnb.ORIGINAL], None)
        elif bnb.is_nf4(module):
            count("nf4", module, "not asked for")
    if "loss" not in {part for part, _, _ in states}:
        states["loss", type(model).__name__, "no causal language model's head"] = 1
    order = ("norm", "mlp", "rope", "attention", "loss", "lora", "nf4")
    entries = [Entry(part, cls, n, why) for (part, cls, why), n in states.items()]
    return PatchReport(", ".join(names), tuple(sorted(entries, key=lambda e: order.index(e.part))))


def _find(model: nn.Module) -> list[_Found]:
    classes, found = known(), []
    for module in model.modules():
        if own_class(module) in classes:
            family, kind = classes[own_class(module)]
            found.append(_Found(module, kind, family))
    return found


def _why_not(found: _Found, everything: list[_Found]) -> str | None:
    """Why a module cannot run on riftco; None if it can, or does. `everything` is what `_find` found beside it."""
    module, kind, family = found
    if kind == "loss" and trl.has_fused_head(module):
        return trl.why_not(module)
    if "forward" in vars(module):
        return REPLACED
    if kind == "loss":
        return losses.why_not(module)
    if kind == "mlp" and layers.activation_of(module) is None:
        return f"riftco has no gated unit with {type(layers.activation(module)).__name__}"
    if kind in ("rotary", "attention"):  # all of them or none: they agree on what the tables are
        pair = [f for f in everything if f.family == family and f.kind in ("rotary", "attention")]
        if any("forward" in vars(f.module) for f in pair):
            return REPLACED
        if not all(layers.rotates(own_class(f.module)) for f in pair if f.kind == "attention"):
            return "its attention turns q and k in a way of its own"
    return None


def _swap(found: _Found, eval_logits: bool) -> None:
    module, kind, family = found
    if kind == "norm":
        swap(module, layers.norm_forward, family.norm_offset)
    elif kind == "mlp":
        swap(module, layers.mlp_forward, layers.activation_of(module))
    elif kind == "rotary":
        swap(module, layers.rotary_forward)
    elif kind == "attention":
        swap(module, layers.attention_forward)
    elif trl.has_fused_head(module):
        trl.swap_head(module)
        swap(module, losses.causal_lm_forward)
    else:
        swap(module, losses.causal_lm_forward)
    if kind == "loss":
        vars(module)[losses.EVAL_LOGITS] = eval_logits
