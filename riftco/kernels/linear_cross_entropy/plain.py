"""Linear + cross-entropy for devices without a cross-entropy kernel of their own here: the spec on each slice."""

import functools

from ..cross_entropy import spec
from . import slices

# float32 copies of the spec's backward, the one-hot mask, the masked logits and the result
LOSS = slices.Loss(
    slices.losses_by(spec.forward),
    slices.gradients_by(spec.forward_backward_),
    temporaries=lambda dtype: 4 * 8 + 1 + 2 * dtype.itemsize,
)
forward = functools.partial(slices.forward, LOSS)
backward = functools.partial(slices.backward, LOSS)
