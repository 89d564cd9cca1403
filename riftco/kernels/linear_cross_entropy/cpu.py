"""Linear + cross-entropy on the CPU: slices small enough that the passes over the logits stay near the cache."""

import functools

from ..cross_entropy import cpu as cross_entropy
from . import slices

# Measured at C 576, V 49152, float32, one core: the matmuls reach their rate at 128 rows (24 MiB)
LOSS = slices.Loss(
    slices.losses_by(functools.partial(cross_entropy.forward, may_overwrite=True)),
    slices.gradients_by(cross_entropy.forward_backward_),
    temporaries=lambda dtype: 4 if dtype.itemsize == 2 else 0,
    most_bytes=32 << 20,
    host_counts=True,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
