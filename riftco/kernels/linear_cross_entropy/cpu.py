"""Linear + cross-entropy on the CPU: slices small enough that the passes over the logits stay near the cache."""

import functools

from ..cross_entropy import cpu as cross_entropy
from . import slices
from .problem import Problem


def _temporaries(p: Problem) -> int:
    """A float32 copy of 16-bit logits; with a softcap its slope and its square; two more copies for entropies."""
    return 4 * ((p.x.dtype.itemsize == 2) + 2 * bool(p.softcap) + 2 * p.metrics)


# Measured at C 576, V 49152, float32, one core: the matmuls reach their rate at 128 rows (24 MiB)
LOSS = slices.Loss(
    functools.partial(cross_entropy.forward, may_overwrite=True),
    cross_entropy.forward_backward_,
    cross_entropy.backward,
    _temporaries,
    most_bytes=32 << 20,
    host_counts=True,
    onednn=True,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
