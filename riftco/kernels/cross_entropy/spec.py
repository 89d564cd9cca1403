"""What cross-entropy means, in plain torch. V vocabulary; rows are all leading dimensions of logits [..., V]."""

import torch
from torch import Tensor


def forward(logits: Tensor, target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """logits [..., V], target [...] -> loss [...] in nats, lse [...].

    loss = row_weight * (lse - logits[target]). Rows that carry no label, and rows of weight 0, give loss 0 and lse 0.
    A target >= V gives NaN.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    live, index, valid = labels(target, row_weight, ignore_index, logits.shape[-1])
    lse = torch.where(live, x.logsumexp(-1), 0.0)
    picked = x.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    loss = torch.where(valid, lse - picked, torch.nan)
    if row_weight is not None:
        loss = loss * row_weight.to(loss.dtype)
    return torch.where(live, loss, 0.0), lse


def backward(
    d_loss: Tensor, logits: Tensor, target: Tensor, row_weight: Tensor | None, lse: Tensor, ignore_index: int
) -> Tensor:
    """d_logits[n, v] = d_loss[n] * row_weight[n] * (softmax(logits[n])[v] - [v == target[n]]); 0 on skipped rows."""
    live, index, valid = labels(target, row_weight, ignore_index, logits.shape[-1])
    scale = d_loss.to(lse.dtype) if row_weight is None else d_loss.to(lse.dtype) * row_weight.to(lse.dtype)
    p = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp()
    hot = torch.arange(logits.shape[-1], device=logits.device) == index.unsqueeze(-1)
    d = (p - hot.to(p.dtype)) * torch.where(valid, scale, torch.nan).unsqueeze(-1)
    return torch.where(live.unsqueeze(-1), d, 0.0).to(logits.dtype)


def labels(target: Tensor, row_weight: Tensor | None, ignore_index: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows that carry loss, a target that is safe to index with, rows whose target is inside the vocabulary)."""
    live = (target != ignore_index) & (target >= 0)
    if row_weight is not None:
        live = live & (row_weight != 0)
    valid = target < V
    return live, target.where(live & valid, 0).long(), valid
