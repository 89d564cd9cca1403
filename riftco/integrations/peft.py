"""PEFT: what a head on top of a language model is made of under its wrappers, and its LoRA layers as one operator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..functional import describe_head, lora_linear
from ..nn import NF4Linear, hooked, plain_call
from .swap import own_class

Head = Any  # (weight, bias, lora), as describe_head names them


def read_head(head: nn.Module) -> Head | str:
    """What linear_cross_entropy needs of `head`, or why the head must be called as a module."""
    if "forward" in vars(head):
        return f"the forward of the head ({type(head).__name__}) was replaced"
    found = _of_peft(head) if "peft" in sys.modules else None
    if found is None:
        try:
            found = describe_head(head)
        except ValueError as refused:
            return str(refused)
    if isinstance(found, str):
        return found
    tensors: list[Tensor] = [t for t in (found.weight, found.bias, *(found.lora or ())) if isinstance(t, Tensor)]
    if odd := next((t for t in tensors if type(t) not in (Tensor, nn.Parameter) or t.numel() == 0), None):
        return f"the head holds a {type(odd).__name__} of {list(odd.shape)}: it is sharded"
    return found


def _of_peft(head: Any) -> Head | str | None:
    """None: not a wrapper of PEFT's."""
    from peft.tuners.lora import Linear
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(head, ModulesToSaveWrapper):
        own = head.disable_adapters or not head.active_adapters
        found: Any = head.original_module if own else head.modules_to_save[head.active_adapters[0]]
        return read_head(found)
    if own_class(head) is not Linear:
        return None
    if hooked(head):
        return "the head has hooks"
    base = read_head(head.base_layer)
    if isinstance(base, str) or head.disable_adapters or head.merged:
        return "the head's adapter is to be unmerged" if head.disable_adapters and head.merged else base
    adapter = plain_adapter(head)
    return adapter if isinstance(adapter, str) else base._replace(lora=adapter)


def plain_adapter(layer: Any) -> tuple[Tensor, Tensor, float] | str:
    """(A, B, scale) of a lora.Linear of PEFT whose one adapter is plain LoRA; else what it is."""
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1:
        return f"{len(active)} adapters are active"
    (name,) = active
    if name in layer.lora_variant:
        return f"the adapter is a {type(layer.lora_variant[name]).__name__}"
    a, b, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if layer.training and not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 1.0) > 0:
        return "the adapter has dropout"
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None or b.bias is not None:
        return "the adapter is no pair of matrices"
    if hooked(a) or hooked(b) or hooked(dropout):
        return "the adapter has hooks"
    return a.weight, b.weight, float(layer.scaling[name])


def lora_layers(root: nn.Module) -> list[nn.Module]:
    """The linear layers below `root` that PEFT wrapped with LoRA."""
    kinds: list[type] = []
    if "peft" in sys.modules:
        from peft.tuners.lora import Linear

        kinds.append(Linear)
    if "peft.tuners.lora.bnb" in sys.modules:
        kinds += [c for c in (getattr(sys.modules["peft.tuners.lora.bnb"], "Linear4bit", None),) if c is not None]
    return [m for m in root.modules() if own_class(m) in kinds]


def lora_why_not(layer: Any) -> str | None:
    """Why a LoRA layer of PEFT's runs as PEFT wrote it; None if riftco's operator serves it now."""
    base = layer.base_layer
    if layer.disable_adapters or layer.merged:
        return "the adapter is off or merged"
    if type(base) not in (nn.Linear, NF4Linear) or not plain_call(base, type(base)):
        return f"the base is a {type(base).__name__}"
    if any(p.requires_grad for p in base.parameters()):
        return "the base is trained"
    adapter = plain_adapter(layer)
    return adapter if isinstance(adapter, str) else None


def lora_forward(base: type[nn.Module]) -> Callable:
    original = base.forward

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        if args or kwargs or lora_why_not(self) is not None:
            return original(self, x, *args, **kwargs)
        adapter: Any = plain_adapter(self)
        a, b, scale = adapter
        return lora_linear(x, self.base_layer.weight, a, b, scale=scale, bias=self.base_layer.bias)

    return forward
