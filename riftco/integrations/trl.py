"""TRL: the fused head that its trainers put on a model, computed by riftco's linear_cross_entropy."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..functional import linear_cross_entropy
from .peft import read_head

ORIGINAL = "_riftco_original"
OUTPUTS = ({"log_probs"}, {"log_probs", "entropy", "is_top1"})  # SFTTrainer's; entropy is only reported there


def has_fused_head(model: nn.Module) -> bool:
    """Whether TRL's add_fused_lm_head replaced the forward of `model`, whatever riftco made of it since."""
    code = getattr(_theirs(model), "__code__", None)
    return code is not None and code.co_qualname.startswith("add_fused_lm_head.")


def why_not(model: nn.Module) -> str | None:
    """Why TRL's own head stays; None if riftco can compute what it gives."""
    options = _options(model)
    if set(options["outputs"]) not in OUTPUTS:
        return f"the trainer reads {', '.join(options['outputs'])}"
    if options["temperature"] != 1.0 or options["cast_lm_head_to_fp32"]:
        return "the trainer's logits have a temperature or are float32"
    head = read_head(model.get_output_embeddings())  # type: ignore[operator]
    return head if isinstance(head, str) else None


def swapped(model: nn.Module) -> bool:
    return hasattr(vars(model).get("forward"), ORIGINAL)


def swap_head(model: nn.Module) -> None:
    if not swapped(model):
        made = _forward(vars(model)["forward"], _options(model))
        model.forward = types.MethodType(made, model)


def restore_head(model: nn.Module) -> bool:
    found = swapped(model)
    if found:
        model.forward = getattr(vars(model)["forward"], ORIGINAL)
    return found


def _theirs(model: nn.Module) -> Any:
    """TRL's function, or whatever else the instance's forward is."""
    found = vars(model).get("forward")
    return getattr(getattr(found, ORIGINAL, found), "__func__", found)


def _options(model: nn.Module) -> dict[str, Any]:
    function = _theirs(model)
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__)}


def _forward(theirs: Callable, options: dict[str, Any]) -> Callable:
    from trl.trainer.utils import FusedCausalLMOutput

    @functools.wraps(theirs)
    def forward(
        self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs
    ) -> Any:
        read = read_head(self.get_output_embeddings()) if fused_lm_head else ""
        if isinstance(read, str):
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            kwargs |= {k: v for k, v in given.items() if v is not None}
            return theirs(*args, fused_lm_head=fused_lm_head, **kwargs)
        weight, bias, lora = read
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state.to(weight.device)
        target: Tensor = labels if shift_labels is None else shift_labels
        rows, metrics = linear_cross_entropy(
            hidden, weight, target.to(hidden.device), bias, lora=lora, shift=shift_labels is None, reduction="none",
            softcap=options["final_logit_softcapping"], logit_scale=options["logit_scale"], return_metrics=True,
        )  # fmt: skip
        if shift_labels is None:  # the last row predicts nothing
            rows, target = rows[:, :-1], target[:, 1:]
            metrics = metrics._replace(entropy=metrics.entropy[:, :-1], argmax=metrics.argmax[:, :-1])
        mask = target != -100
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        more = {"entropy": metrics.entropy, "is_top1": metrics.argmax == target} if len(options["outputs"]) > 1 else {}
        return FusedCausalLMOutput(loss=rows.sum() / count, log_probs=-rows, label_mask=mask, **more)

    setattr(forward, ORIGINAL, theirs)
    return forward
