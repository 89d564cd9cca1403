"""The loss of a causal language model from its last hidden states: the logits never exist as a whole."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ...functional import linear_cross_entropy
from ..peft import read_head

EVAL_LOGITS = "_riftco_eval_logits"


def why_not(model: Any) -> str | None:
    """Why `model`'s loss goes through logits as ever; None if it does not."""
    if model.loss_function is not ForCausalLMLoss:
        return "the model has a loss function of its own"
    head = read_head(model.lm_head)
    return head if isinstance(head, str) else None


def causal_lm_forward(base: type[nn.Module]) -> Callable:
    original = base.forward
    names = list(inspect.signature(original).parameters)[1:]

    @can_return_tuple
    def fused(self, labels: Tensor, **kwargs) -> CausalLMOutputWithPast:
        outputs = self.base_model(**kwargs)
        loss = hidden_state_loss(self, outputs.last_hidden_state, labels, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, cache=outputs.cache, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        """With labels: the loss, without logits; output_logits=True asks for them (riftco.patch has the default of
        models in eval mode)."""
        kwargs.update(zip(names, args))
        asked = kwargs.pop("output_logits", None)
        if asked is None:
            asked = not self.training and getattr(self, EVAL_LOGITS, False)
        kept = kwargs.get("logits_to_keep", 0)
        some = isinstance(kept, Tensor) or kept != 0  # losses over part of the rows are transformers' affair
        if asked or some or kwargs.get("labels") is None or why_not(self) is not None:
            return original(self, **kwargs)
        kwargs.pop("logits_to_keep", None)
        return fused(self, kwargs.pop("labels"), **kwargs)

    return forward


def hidden_state_loss(
    model: Any,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_,
) -> Tensor:
    """transformers' ForCausalLMLoss; the mean over no label at all is 0 instead of NaN."""
    head: Any = read_head(model.lm_head)
    weight, bias, lora = head
    hidden = hidden.to(weight.device)
    loss: Any = linear_cross_entropy(
        hidden,
        weight,
        (labels if shift_labels is None else shift_labels).to(hidden.device).reshape(hidden.shape[:-1]),
        bias,
        lora=lora,
        ignore_index=ignore_index,
        softcap=getattr(model.config, "final_logit_softcapping", None),
        denominator=num_items_in_batch,
        shift=shift_labels is None,
    )
    return loss
