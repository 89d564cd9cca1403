"""Every drop-in module."""

from ..kernels.attention.module import Attention
from ..kernels.cross_entropy.module import CrossEntropyLoss
from ..kernels.rms_norm.module import RMSNorm

__all__ = ["Attention", "CrossEntropyLoss", "RMSNorm"]
