"""Cross-entropy for XLA: the spec's arithmetic in a form that compiles into reductions and one fused gradient.

Departs from spec.py where XLA would pay for it or differ. A TPU has no 64-bit numbers: labels are compared in 32 bit,
and no float is compared with a Python number, which torch_xla does in float64. The target's logit is picked out of the
stored dtype, so that no float32 copy of the logits is needed. logsumexp is spelled out, as torch_xla's own gives NaN
for a row that holds +inf.
"""

import torch
from torch import Tensor


def forward(logits: Tensor, target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    acc = torch.promote_types(logits.dtype, torch.float32)
    if logits.numel() == 0:
        return logits.new_empty(target.shape, dtype=acc), logits.new_empty(target.shape, dtype=acc)
    live, label, valid = _labels(target, row_weight, ignore_index, logits.shape[-1])
    top = logits.amax(-1, keepdim=True).to(acc)
    top = top.clamp(-torch.finfo(acc).max, torch.finfo(acc).max)  # inf - inf would be NaN
    total = (logits.to(acc) - top).exp().sum(-1)
    lse = torch.where(live, total.log() + top.squeeze(-1), 0.0)
    picked = logits.gather(-1, label.unsqueeze(-1).long()).squeeze(-1).to(acc)
    loss = torch.where(valid, lse - picked, torch.nan)
    if row_weight is not None:
        loss = loss * row_weight.to(acc)
    return torch.where(live, loss, 0.0), lse


def backward(
    d_loss: Tensor, logits: Tensor, target: Tensor, row_weight: Tensor | None, lse: Tensor, ignore_index: int
) -> Tensor:
    V = logits.shape[-1]
    if logits.numel() == 0:
        return torch.empty_like(logits)
    live, label, valid = _labels(target, row_weight, ignore_index, V)
    scale = d_loss.to(lse.dtype) if row_weight is None else d_loss.to(lse.dtype) * row_weight.to(lse.dtype)
    scale = torch.where(valid, scale, torch.nan)
    p = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp()
    hot = torch.arange(V, dtype=torch.int32, device=logits.device) == label.unsqueeze(-1)
    d = torch.where(hot, p - 1, p) * scale.unsqueeze(-1)
    return torch.where(live.unsqueeze(-1), d, 0.0).to(logits.dtype)


def _labels(target: Tensor, row_weight: Tensor | None, ignore_index: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows that carry loss, an int32 label that is safe to index with, rows whose target is inside the vocabulary)."""
    live = (target != ignore_index) & (target >= 0)
    if row_weight is not None:
        live = live & row_weight.bool()
    valid = target < V
    return live, torch.where(live & valid, target, 0).int(), valid
