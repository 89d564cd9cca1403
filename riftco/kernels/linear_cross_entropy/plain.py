"""Linear + cross-entropy for devices without a cross-entropy kernel of their own here: the spec on each slice."""

import functools

import torch
from torch import Tensor

from ..cross_entropy import spec
from . import slices


def _forward_backward_(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, d_loss: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    loss, lse = spec.forward(logits, target, row_weight, ignore_index)
    upstream = torch.ones_like(loss) if d_loss is None else d_loss
    logits.copy_(spec.backward(upstream, logits, target, row_weight, lse, ignore_index))
    return loss, lse


# float32 copies: of the logits, their exponentials, the one-hot, two products; the one-hot mask; the result
LOSS = slices.Loss(spec.forward, _forward_backward_, temporaries=lambda dtype: 4 * 5 + 1 + dtype.itemsize)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
