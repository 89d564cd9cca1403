"""Every op's public function."""

from .kernels.cross_entropy.op import cross_entropy

__all__ = ["cross_entropy"]
