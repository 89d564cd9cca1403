"""Linear + cross-entropy for XLA: the slices unrolled into one graph, every row computed and masked.

Shapes stay static: how many rows carry a label is not asked. A graph grows with the number of slices, so slice_bytes
should be no smaller than memory asks for.
"""

import functools

import torch
from torch import Tensor

from ..kernels.linear_cross_entropy import slices
from . import cross_entropy


def _forward_backward_(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, d_loss: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    loss, lse = cross_entropy.forward(logits, target, row_weight, ignore_index)
    upstream = torch.ones_like(loss) if d_loss is None else d_loss
    logits.copy_(cross_entropy.backward(upstream, logits, target, row_weight, lse, ignore_index))
    return loss, lse


# a float32 copy where XLA does not fuse it into the reduction, as on a CPU; the gradient beside the logits
LOSS = slices.Loss(cross_entropy.forward, _forward_backward_, temporaries=lambda dtype: 4 + dtype.itemsize)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
