from .forms import cross_entropy_time_range, per_token_logprobs
from .op import Metrics, cross_entropy
from .topk import topk_cross_entropy
from .twins import torch_cross_entropy

__all__ = [
    "Metrics",
    "cross_entropy",
    "cross_entropy_time_range",
    "per_token_logprobs",
    "topk_cross_entropy",
    "torch_cross_entropy",
]
