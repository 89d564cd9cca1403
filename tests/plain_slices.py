"""The sliced head with the losses' meaning on each slice: what tests hold the slicing itself to, in float64 too."""

import functools

from riftco.kernels.cross_entropy import spec as cross_entropy
from riftco.kernels.linear_cross_entropy import slices
from riftco.kernels.linear_cross_entropy.problem import Problem


def temporaries(p: Problem) -> int:
    """Bytes per logit that the spec holds: what is left of unlabelled rows, wide copies (u, log p, p, the gradient and
    the products on its way), masks, the result."""
    return p.acc.itemsize * (8 + bool(p.softcap)) + 1 + 2 * p.x.dtype.itemsize


LOSS = slices.Loss(
    cross_entropy.forward,
    cross_entropy.forward_backward_,
    cross_entropy.backward,
    temporaries,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
