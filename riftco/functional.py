"""Every op's public function."""

from .kernels.cross_entropy.op import cross_entropy
from .kernels.rms_norm.op import rms_norm

__all__ = ["cross_entropy", "rms_norm"]
