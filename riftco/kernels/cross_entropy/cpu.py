"""Cross-entropy on the CPU: the spec over blocks of rows, so that no float32 copy of all logits is made."""

import torch
from torch import Tensor

from . import spec

BLOCK_BYTES = 16 << 20  # float32 logits held at once; larger blocks leave the last-level cache


def _block_rows(V: int) -> int:
    return max(1, BLOCK_BYTES // (4 * max(V, 1)))


def _rows(t: Tensor | None, lo: int, hi: int) -> Tensor | None:
    return None if t is None else t[lo:hi]


def forward(logits: Tensor, target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    V = logits.shape[-1]
    x, y, w = _flat(logits, V), target.reshape(-1), None if row_weight is None else row_weight.reshape(-1)
    loss, lse = x.new_empty(x.shape[0], dtype=torch.float32), x.new_empty(x.shape[0], dtype=torch.float32)
    step = _block_rows(V)
    for lo in range(0, x.shape[0], step):
        rows = slice(lo, lo + step)
        loss[rows], lse[rows] = spec.forward(x[rows], y[rows], _rows(w, lo, lo + step), ignore_index)
    return loss.view(target.shape), lse.view(target.shape)


def backward(
    d_loss: Tensor, logits: Tensor, target: Tensor, row_weight: Tensor | None, lse: Tensor, ignore_index: int
) -> Tensor:
    V = logits.shape[-1]
    x, y, w = _flat(logits, V), target.reshape(-1), None if row_weight is None else row_weight.reshape(-1)
    g, s = d_loss.reshape(-1), lse.reshape(-1)
    d_x = torch.empty(x.shape, dtype=x.dtype)
    step = _block_rows(V)
    for lo in range(0, x.shape[0], step):
        rows = slice(lo, lo + step)
        d_x[rows] = spec.backward(g[rows], x[rows], y[rows], _rows(w, lo, lo + step), s[rows], ignore_index)
    return d_x.view(logits.shape)


def forward_(logits: Tensor, target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """`forward` of contiguous logits [n, V] that may be overwritten: no temporary but a float32 copy of 16-bit ones."""
    return _log_softmax_(_wide(logits), target, row_weight, ignore_index)[:2]


def forward_backward_(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, d_loss: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """`forward`, and contiguous logits [n, V] become d_logits of sum(d_loss * loss); d_loss None means ones."""
    x = _wide(logits)
    loss, lse, picked, live, index, valid = _log_softmax_(x, target, row_weight, ignore_index)
    x.exp_().scatter_(-1, index.unsqueeze(-1), picked.expm1().unsqueeze(-1))  # p - 1 without cancellation
    scale = loss.new_ones(()) if d_loss is None else d_loss.to(x.dtype)
    if row_weight is not None:
        scale = scale * row_weight.to(x.dtype)
    if scale.dim() or not bool(valid.all()):
        x.mul_(torch.where(valid, scale, torch.nan).unsqueeze(-1))
    if not bool(live.all()):
        x.masked_fill_(~live.unsqueeze(-1), 0.0)
    if x is not logits:
        logits.copy_(x)
    return loss, lse


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_softmax_(x: Tensor, target: Tensor, row_weight: Tensor | None, ignore_index: int):
    """x [n, V] becomes log softmax(x) -> loss, lse, log-probability of the target, and the rows' labels."""
    live, index, valid = spec.labels(target, row_weight, ignore_index, x.shape[-1])
    picked = x.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    torch.log_softmax(x, -1, out=x)
    log_p = x.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    loss = torch.where(valid, -log_p, torch.nan)
    if row_weight is not None:
        loss = loss * row_weight.to(loss.dtype)
    return torch.where(live, loss, 0.0), torch.where(live, picked - log_p, 0.0), log_p, live, index, valid


def _flat(logits: Tensor, V: int) -> Tensor:
    return logits.reshape(-1, V) if V else logits.new_empty((logits.shape[:-1].numel(), 0))
