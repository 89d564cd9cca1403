"""Linear + cross-entropy for devices without a cross-entropy kernel of their own here: its meaning on each slice."""

import functools

from ..cross_entropy import spec as cross_entropy
from ..nf4 import spec as nf4
from . import slices
from .head import Quantised
from .problem import Problem


def temporaries(p: Problem) -> int:
    """Bytes per logit that the spec holds: what is left of unlabelled rows, wide copies (u, log p, p, the gradient and
    the products on its way), masks, the result."""
    return p.acc.itemsize * (8 + bool(p.softcap)) + 1 + 2 * p.x.dtype.itemsize


LOSS = slices.Loss(
    cross_entropy.forward,
    cross_entropy.forward_backward_,
    cross_entropy.backward,
    Quantised(nf4.forward, nf4.backward),
    temporaries,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
