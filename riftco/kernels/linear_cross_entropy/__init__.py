from .module import describe_head, sliced_head_loss
from .op import linear_cross_entropy
from .twins import cce_linear_cross_entropy, liger_fused_linear_cross_entropy, torch_linear_cross_entropy

__all__ = [
    "cce_linear_cross_entropy",
    "describe_head",
    "liger_fused_linear_cross_entropy",
    "linear_cross_entropy",
    "sliced_head_loss",
    "torch_linear_cross_entropy",
]
