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


def _flat(logits: Tensor, V: int) -> Tensor:
    return logits.reshape(-1, V) if V else logits.new_empty((logits.shape[:-1].numel(), 0))
