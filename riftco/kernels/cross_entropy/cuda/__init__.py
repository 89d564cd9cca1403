"""Cross-entropy in Triton: pieces.py, rows.py (kernels), route.py (which tiles), launch.py (launchers)."""

from .launch import backward, forward, forward_backward, forward_backward_, labelled, scale_

__all__ = ["backward", "forward", "forward_backward", "forward_backward_", "labelled", "scale_"]
