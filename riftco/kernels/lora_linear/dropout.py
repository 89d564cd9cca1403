"""Which elements of x the adapters do not see: a function of (seed, row, feature), the same on every device.

Nothing of x's size is kept for the backward: it draws the mask again. The mask belongs to x, so that it is one for a
group of adapters, and a row's mask does not depend on which rows are selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import philox


def keep(seed: Tensor, row: Tensor, C: int, dropout_p: float) -> Tensor:
    """bool [len(row), C]; row int64, places among the flattened rows of x."""
    return philox.keep_range(seed, torch.zeros_like(row), row, 0, C, dropout_p)


def inverse_keep(seed: Tensor | None, dropout_p: float) -> float:
    """1 / (1 - p) where there is dropout; everything is dropped at p = 1."""
    if seed is None:
        return 1.0
    return 0.0 if dropout_p == 1.0 else 1.0 / (1.0 - dropout_p)


def masked(t: Tensor, seed: Tensor | None, row: Tensor | None, dropout_p: float) -> Tensor:
    """Rows t [L, C], which lie at `row` in x (None: the first L), with 0 where x is dropped."""
    if seed is None:
        return t
    row = torch.arange(t.shape[0], device=t.device) if row is None else row
    hidden = torch.zeros((), dtype=t.dtype, device=t.device)
    return torch.where(keep(seed, row, t.shape[1], dropout_p), t, hidden)
