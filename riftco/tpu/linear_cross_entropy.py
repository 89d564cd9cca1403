"""Linear + cross-entropy for XLA: the slices unrolled into one graph, every row computed and masked.

Shapes stay static: how many rows carry a label is not asked. A graph grows with the number of slices, so slice_bytes
should be no smaller than memory asks for.
"""

import functools

import torch
from torch import Tensor

from ..kernels.linear_cross_entropy import slices
from . import cross_entropy


def _power_above(x: Tensor) -> Tensor:
    """Counted, as torch_xla has no frexp."""
    powers = torch.tensor([2.0**n for n in range(-100, 101)]).to(x.device)
    return powers.index_select(0, (powers <= x).sum().clamp(max=len(powers) - 1).view(1)).view(())


LOSS = slices.Loss(
    cross_entropy.forward,
    cross_entropy.forward_backward_,
    cross_entropy.backward,
    # a float32 copy where XLA does not fuse it into the reduction, as on a CPU; the gradient beside the logits
    temporaries=lambda p: 4 + p.x.dtype.itemsize,
    power_above=_power_above,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
