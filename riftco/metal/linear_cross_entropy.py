"""Linear + cross-entropy on Apple GPUs: a slice of logits at a time, by PyTorch's matrix product (an NF4 head: by
nf4.metal), becomes its losses and its gradient in cross_entropy.metal, in one buffer.
"""

import functools

from ..kernels.linear_cross_entropy import slices
from ..kernels.linear_cross_entropy.head import Quantised
from . import cross_entropy, nf4

LOSS = slices.Loss(
    cross_entropy.forward,
    cross_entropy.forward_backward_,
    cross_entropy.backward,
    Quantised(nf4.forward, nf4.backward),
    temporaries=lambda p: 0,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
