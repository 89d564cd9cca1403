"""What cross-entropy means, in plain torch. V vocabulary; rows are all leading dimensions of logits [..., V].

u = logits, or softcap * tanh(logit_scale * logits / softcap) where softcap is not 0; the loss sees z = s * u with
s = logit_scale, or 1 with a softcap. top = max u and log_total = log sum exp(s * (u - top)) stay apart: u - top is
exact, while lse = s * top + log_total in float32 would absorb the digits of a confident row.
"""

from typing import Any

import torch
from torch import Tensor


def forward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """logits [..., V], target [...] -> loss, top, log_total, log_prob, entropy, argmax, each [...].

    loss = row_weight * ((1 - label_smoothing) w[target] (lse - z[target])
                         + label_smoothing / V * sum_v w[v] (lse - z[v]) + z_loss * lse^2), w = class_weight or 1.
    Rows that carry no label, and rows of weight 0, give 0 (argmax -1) and are not read. A target >= V gives NaN.
    Without `metrics` the last three are empty.
    """
    live, index, valid = labels(target, row_weight, ignore_index, logits.shape[-1])
    acc = torch.promote_types(logits.dtype, torch.float32)
    if logits.shape[-1] == 0:
        return (*(logits.new_empty(target.shape, dtype=acc) for _ in range(3)), *no_metrics(logits))
    x = torch.where(live.unsqueeze(-1), logits, 0.0)
    u, s = scores(x, softcap, logit_scale)
    bound = torch.finfo(acc).max
    top = u.detach().amax(-1, keepdim=True).clamp(-bound, bound)  # inf - inf would be NaN
    d = s * (u - top)
    log_total = d.exp().sum(-1).log()
    top = top.squeeze(-1)
    log_p = torch.where(valid, d.gather(-1, index.unsqueeze(-1)).squeeze(-1) - log_total, torch.nan)
    loss = -(1 - label_smoothing) * log_p
    if class_weight is not None:
        loss = loss * class_weight.to(acc)[index]
    if label_smoothing:
        each = log_total.unsqueeze(-1) - d
        each = each if class_weight is None else each * class_weight.to(acc)
        loss = loss + label_smoothing / logits.shape[-1] * each.sum(-1)
    if z_loss:
        loss = loss + z_loss * (s * top + log_total).square()
    if row_weight is not None:
        loss = loss * row_weight.to(acc)
    loss, top, log_total = (torch.where(live, t, 0.0) for t in (loss, top, log_total))
    if not metrics:
        return loss, top, log_total, *no_metrics(logits)
    p = (d.detach() - log_total.detach().unsqueeze(-1)).exp()
    entropy = log_total.detach() - torch.where(p != 0, p * d.detach(), 0.0).sum(-1)
    log_p, entropy = (torch.where(live, t, 0.0) for t in (log_p.detach(), entropy))
    return loss, top, log_total, log_p, entropy, torch.where(live, x.detach().argmax(-1), -1)


def backward(
    d_loss: Tensor | None, d_lse: Tensor | None, logits: Tensor, target: Tensor, row_weight: Tensor | None,
    class_weight: Tensor | None, top: Tensor, log_total: Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
) -> Tensor:  # fmt: skip
    """d_logits of sum(d_loss * loss + d_lse * lse); None means zeros; 0 on skipped rows.

    d loss / d z[v] = row_weight * (k p[v] - a [v == target] - label_smoothing / V w[v]) with
    a = (1 - label_smoothing) w[target] and k = a + label_smoothing / V sum(w) + 2 z_loss lse; d lse / d z = p.
    """
    V = logits.shape[-1]
    live, index, valid = labels(target, row_weight, ignore_index, V)
    u, s = scores(torch.where(live.unsqueeze(-1), logits, 0.0), softcap, logit_scale)
    log_p = s * (u - top.unsqueeze(-1)) - log_total.unsqueeze(-1)
    p = log_p.exp()
    d = torch.zeros_like(p) if d_lse is None else p * d_lse.to(p.dtype).unsqueeze(-1)
    if d_loss is not None:
        up = d_loss.to(p.dtype) if row_weight is None else d_loss.to(p.dtype) * row_weight.to(p.dtype)
        w = p.new_ones(V) if class_weight is None else class_weight.to(p.dtype)
        a = (1 - label_smoothing) * w[index] if V else p.new_empty(target.shape)
        rest = label_smoothing / max(V, 1) * w.sum() + torch.zeros_like(top)  # k - a
        if z_loss:
            rest = rest + 2 * z_loss * (s * top + log_total)
        hot = torch.arange(V, device=logits.device) == index.unsqueeze(-1)
        part = a.unsqueeze(-1) * torch.where(hot, log_p.expm1(), p)  # p - 1 keeps its digits where p is close to 1
        part = part + rest.unsqueeze(-1) * p - label_smoothing / max(V, 1) * w
        d = d + part * torch.where(valid, up, torch.nan).unsqueeze(-1)
    d = d * logit_scale
    if softcap:
        d = d * (1 - (u / softcap).square())
    return torch.where(live.unsqueeze(-1), d, 0.0).to(logits.dtype)


def forward_backward(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float,
    metrics: bool, inplace: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`forward` and d_logits of sum(d_loss * loss), d_loss None meaning ones; over the logits where `inplace`."""
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    out = forward(logits, target, row_weight, class_weight, *options, metrics)
    up = torch.ones_like(out[0]) if d_loss is None else d_loss
    d_logits = backward(up, None, logits, target, row_weight, class_weight, out[1], out[2], *options)
    return *out, logits.copy_(d_logits) if inplace else d_logits


def scores(logits: Tensor, softcap: float, logit_scale: float) -> tuple[Tensor, float]:
    """(u, s) as above, in float32 or wider."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (softcap * torch.tanh(x * (logit_scale / softcap)), 1.0) if softcap else (x, logit_scale)


def lse_of(top: Tensor, log_total: Tensor, softcap: float, logit_scale: float) -> Tensor:
    return top + log_total if softcap or logit_scale == 1 else logit_scale * top + log_total


def no_metrics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_prob, entropy and argmax where they are not asked for."""
    acc = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(0, dtype=acc), logits.new_empty(0, dtype=acc), logits.new_empty(0, dtype=torch.int64)


def labels(target: Tensor, row_weight: Tensor | None, ignore_index: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows that carry loss, a target that is safe to index with, rows whose target is inside the vocabulary)."""
    live = (target != ignore_index) & (target >= 0)
    if row_weight is not None:
        live = live & (row_weight != 0)
    valid = target < V
    return live, target.where(live & valid, 0).long(), valid


def labelled(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """What a mean divides by, the number of rows with a label and at least 1, and its reciprocal; float32 []."""
    over = ((target != ignore_index) & (target >= 0)).sum().clamp(min=1).float()
    return over, over.reciprocal()


def mean_forward_backward_(
    logits: Tensor, g: Tensor, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What `forward` returns, the losses' mean over `labelled` rows, and one over their number; the mean's gradient in
    g, which may be the logits."""
    options = (ignore_index, label_smoothing, z_loss, softcap, logit_scale, metrics)
    over, reciprocal = labelled(target, ignore_index)
    d_loss = reciprocal.expand(target.shape)
    *out, made = forward_backward(logits, target, row_weight, class_weight, d_loss, *options)
    g.copy_(made)
    return *out, out[0].sum() / over, reciprocal


def places(target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The reciprocal of `labelled`, and int64 [3]: how many rows carry loss (a label, and a weight that is not 0), the
    first of them (the number of all where there is none) and the last (-1), all counted as if in one dimension."""
    live = (target != ignore_index) & (target >= 0)
    reciprocal = live.sum().clamp(min=1).float().reciprocal()
    return reciprocal, places_of(live if row_weight is None else live & (row_weight != 0))


def places_of(live: Tensor) -> Tensor:
    """The second result of `places`, for rows of which that is known."""
    live, N = live.reshape(-1), live.numel()
    if N == 0:
        return torch.tensor([0, 0, -1], device=live.device)
    place = torch.arange(N, device=live.device)
    return torch.stack([live.sum(), place.where(live, N).amin(), place.where(live, -1).amax()])


def forward_backward_(*args: Any) -> tuple[Tensor, ...]:
    """`forward_backward` over the logits, without returning them."""
    both: Any = forward_backward
    return both(*args, True)[:-1]


def scale_(g: Tensor, scale: Tensor) -> None:
    """g *= scale, the product in float32 or wider; untouched where the scale is 1."""
    if bool(scale != 1):
        g.mul_(scale)  # a tensor of no dimensions multiplies in the wider type
