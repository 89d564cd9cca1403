"""Linear + cross-entropy on Apple GPUs: a slice of logits at a time, by PyTorch's matrix product (a frozen head's by
its own shader), becomes its losses and its gradient in cross_entropy.metal, in one buffer.
"""

import functools

from ..kernels.linear_cross_entropy import slices
from . import cross_entropy

LOSS = slices.Loss(
    cross_entropy.forward,
    cross_entropy.forward_backward_,
    cross_entropy.backward,
    temporaries=lambda p: 0,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
