"""Linear + cross-entropy for XLA: the slices unrolled into one graph, every row computed and masked.

Shapes stay static: how many rows carry a label is not asked. A graph grows with the number of slices, so slice_bytes
should be no smaller than memory asks for.
"""

import functools

from ..kernels.linear_cross_entropy import slices
from . import cross_entropy

# a float32 copy where XLA does not fuse it into the reduction, as on a CPU; the gradient beside the logits
LOSS = slices.Loss(
    slices.losses_by(cross_entropy.forward),
    slices.gradients_by(cross_entropy.forward_backward_),
    temporaries=lambda dtype: 4 + dtype.itemsize,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
