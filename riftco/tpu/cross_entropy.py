"""Cross-entropy for XLA: the spec's arithmetic in a form that compiles into reductions and one fused gradient.

Departs from spec.py where XLA would pay for it or differ. A TPU has no 64-bit numbers: labels are compared in 32 bit,
and no float is compared with a Python number, which torch_xla does in float64. The target's logit is picked out of the
stored dtype, so that no float32 copy of the logits is needed.
"""

import torch
from torch import Tensor

from ..kernels.cross_entropy.spec import lse_of, no_metrics, scores


def forward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    acc, V = torch.promote_types(logits.dtype, torch.float32), logits.shape[-1]
    if logits.numel() == 0:
        count = 5 if metrics else 3
        out = [logits.new_empty(target.shape, dtype=acc) for _ in range(count)]
        return *out, *([logits.new_empty(target.shape, dtype=torch.int64)] if metrics else no_metrics(logits))
    live, label, valid = _labels(target, row_weight, ignore_index, V)
    largest = torch.finfo(acc).max
    top, s = scores(logits.amax(-1), softcap, logit_scale)  # u grows with the logit
    top = top.clamp(-largest, largest)  # inf - inf would be NaN
    d = s * (scores(logits, softcap, logit_scale)[0] - top.unsqueeze(-1))
    log_total = d.exp().sum(-1).log()
    picked = logits.gather(-1, label.unsqueeze(-1).long()).squeeze(-1)
    log_p = torch.where(valid, s * (scores(picked, softcap, logit_scale)[0] - top) - log_total, torch.nan)
    loss = -(1 - label_smoothing) * log_p
    if class_weight is not None:
        loss = loss * class_weight[label.long()]
    if label_smoothing:
        each = log_total.unsqueeze(-1) - d
        loss = loss + label_smoothing / V * (each if class_weight is None else each * class_weight).sum(-1)
    if z_loss:
        loss = loss + z_loss * lse_of(top, log_total, softcap, logit_scale).square()
    if row_weight is not None:
        loss = loss * row_weight.to(acc)
    loss, top, log_total = (torch.where(live, t, 0.0) for t in (loss, top, log_total))
    if not metrics:
        return loss, top, log_total, *no_metrics(logits)
    p = (d - log_total.unsqueeze(-1)).exp()
    entropy = log_total - torch.where(p.bool(), p * d, 0.0).sum(-1)
    log_p, entropy = torch.where(live, log_p, 0.0), torch.where(live, entropy, 0.0)
    return loss, top, log_total, log_p, entropy, torch.where(live, logits.argmax(-1), -1)


def backward(
    d_loss: Tensor | None, d_lse: Tensor | None, logits: Tensor, target: Tensor, row_weight: Tensor | None,
    class_weight: Tensor | None, top: Tensor, log_total: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
) -> Tensor:  # fmt: skip
    acc, V = top.dtype, logits.shape[-1]
    if logits.numel() == 0:
        return torch.empty_like(logits)
    live, label, valid = _labels(target, row_weight, ignore_index, V)
    u, s = scores(logits, softcap, logit_scale)
    log_p = s * (u - top.unsqueeze(-1)) - log_total.unsqueeze(-1)
    p = log_p.exp()
    d = torch.zeros_like(p) if d_lse is None else p * d_lse.to(acc).unsqueeze(-1)
    if d_loss is not None:
        up = d_loss.to(acc) if row_weight is None else d_loss.to(acc) * row_weight.to(acc)
        up = torch.where(valid, up, torch.nan)
        w = top.new_ones(()) if class_weight is None else class_weight
        a = (1 - label_smoothing) * (w if class_weight is None else w[label.long()]) * up
        hot = torch.arange(V, dtype=torch.int32, device=logits.device) == label.unsqueeze(-1)
        d = d + torch.where(hot, log_p.expm1(), p) * a.unsqueeze(-1)
        if label_smoothing or z_loss:
            total = V if class_weight is None else w.sum()
            rest = label_smoothing / V * total + 2 * z_loss * lse_of(top, log_total, softcap, logit_scale)
            d = d + (rest * up).unsqueeze(-1) * p - label_smoothing / V * up.unsqueeze(-1) * w
    d = d * logit_scale
    if softcap:
        d = d * (1 - (u / softcap).square())
    return torch.where(live.unsqueeze(-1), d, 0.0).to(logits.dtype)


def forward_backward_(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`forward`, and the logits become d_logits of sum(d_loss * loss); d_loss None means ones."""
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    out = forward(logits, target, row_weight, class_weight, *options, metrics)
    up = torch.ones_like(out[0]) if d_loss is None else d_loss
    logits.copy_(backward(up, None, logits, target, row_weight, class_weight, out[1], out[2], *options))
    return out


def _labels(target: Tensor, row_weight: Tensor | None, ignore_index: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows that carry loss, an int32 label that is safe to index with, rows whose target is inside the vocabulary)."""
    live = (target != ignore_index) & (target >= 0)
    if row_weight is not None:
        live = live & row_weight.bool()
    valid = target < V
    return live, torch.where(live & valid, target, 0).int(), valid
