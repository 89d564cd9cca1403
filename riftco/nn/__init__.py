"""Every drop-in module."""

from ..kernels.cross_entropy.module import CrossEntropyLoss

__all__ = ["CrossEntropyLoss"]
