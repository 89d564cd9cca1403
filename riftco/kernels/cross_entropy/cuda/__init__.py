"""Cross-entropy in Triton: pieces, rows, held, hopper (kernels), route (which tiles); launch, slices (launchers)."""

from .launch import (
    backward,
    forward,
    forward_backward,
    forward_backward_,
    labelled,
    mean_forward_backward_,
    places,
    scale_,
)
from .slices import Slices

__all__ = [
    "Slices",
    "backward",
    "forward",
    "forward_backward",
    "forward_backward_",
    "labelled",
    "mean_forward_backward_",
    "places",
    "scale_",
]
