"""Every drop-in module."""

from ..kernels.attention.module import Attention
from ..kernels.cross_entropy.module import CrossEntropyLoss
from ..kernels.linear_cross_entropy.module import LinearCrossEntropyLoss
from ..kernels.rms_norm.module import RMSNorm
from ..kernels.rope.module import RotaryEmbedding
from ..kernels.swiglu.module import SwiGLU

__all__ = [
    "Attention",
    "CrossEntropyLoss",
    "LinearCrossEntropyLoss",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
]
