"""Cross-entropy in Triton: pieces.py, rows.py (kernels), route.py (which tiles); launch.py, slices.py (launchers)."""

from .launch import backward, forward, forward_backward, forward_backward_, labelled, places, scale_
from .slices import Slices

__all__ = [
    "Slices",
    "backward",
    "forward",
    "forward_backward",
    "forward_backward_",
    "labelled",
    "places",
    "scale_",
]
