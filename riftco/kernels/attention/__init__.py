from .op import attention
from .twins import scaled_dot_product_attention

__all__ = ["attention", "scaled_dot_product_attention"]
