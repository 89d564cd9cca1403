"""The gradient of attention's sinks, for the rooms of attention with a cache and without. Torch-only."""

import torch
from torch import Tensor


def to_sink(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[.., H, T]: delta times the share exp(sink - lse) of a row that its sink takes; 0 where a row saw nothing at all,
    whatever delta holds there."""
    return torch.where(lse == -torch.inf, 0.0, (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp() * delta)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """sinks [H]; lse, delta [.., H, T] -> d_sinks [H]: a sink takes its share of a row and gives it nothing."""
    return -to_sink(sinks, lse, delta).sum(-1).reshape(-1, len(sinks)).sum(0).to(sinks.dtype)
