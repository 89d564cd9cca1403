"""Every op's public function."""

from .kernels.attention.op import attention, scaled_dot_product_attention
from .kernels.cross_entropy.op import cross_entropy
from .kernels.linear_cross_entropy.op import linear_cross_entropy
from .kernels.rms_norm.op import rms_norm
from .kernels.rope.op import rope
from .kernels.rope.tables import rope_tables
from .kernels.swiglu.op import geglu, swiglu

__all__ = [
    "attention",
    "cross_entropy",
    "geglu",
    "linear_cross_entropy",
    "rms_norm",
    "rope",
    "rope_tables",
    "scaled_dot_product_attention",
    "swiglu",
]
