"""What linear layers with LoRA adapters over one x mean, in plain torch.

M rows, N output features, C input features, R adapter rank; a group's weights as base.py packs them. The ranks of
its adapters stand side by side: xa [rows, sum of R] = dropout(x) A^T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .base import dtypes, meaning, unpack
from .dropout import inverse_keep, masked


def forward(
    x: Tensor, kinds: list[str], weights: list[Tensor], sizes: list[int], biases: list[Tensor | None],
    lora_a: list[Tensor], lora_b: list[Tensor], scales: list[float], seed: Tensor | None, dropout_p: float,
    rows: Tensor | None, *, find: Callable = meaning,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """x [..., C] -> each y [..., N] = x W^T + bias + scale * dropout(x) A^T B^T, and xa.

    With `rows` (int64, distinct, into the flattened leading dimensions) only those rows get the adapter's part.
    """
    D, acc = dtypes(x, lora_a, lora_b)
    h = masked(pick(x, rows), seed, rows, dropout_p)
    a = torch.cat([t.to(D) for t in lora_a])
    xa = (inverse_keep(seed, dropout_p) * (h.to(D).to(acc) @ a.to(acc).t())).to(D)
    ys = []
    parts = xa.split([t.shape[0] for t in lora_a], 1)
    for base, bias, part, b, scale in zip(unpack(kinds, weights, sizes), biases, parts, lora_b, scales):
        y = base.forward(x, bias, find)
        ys.append(_added(y, scale * (part.to(acc) @ b.to(acc).t()), rows))
    return ys, xa


def backward(
    d_ys: list[Tensor], x: Tensor | None, kinds: list[str], weights: list[Tensor], sizes: list[int],
    lora_a: list[Tensor], lora_b: list[Tensor], xa: Tensor | None, scales: list[float], seed: Tensor | None,
    dropout_p: float, rows: Tensor | None, need_x: bool, need_w: list[bool], need_a: bool, need_b: bool,
    *, find: Callable = meaning,
) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
    """d_ys [..., N] -> d_x, each d_W; all d_A, then all d_B, flat in one float32 buffer (float64 in float64).

    With g = scale * d_y B, side by side as xa:  d_x = sum of d_y W + dropout'(g A),  d_A = g^T dropout(x),
    d_B = scale * d_y^T xa. An empty tensor for what is not needed.
    """
    D, acc = dtypes(d_ys[0], lora_a, lora_b)
    inverse = inverse_keep(seed, dropout_p)
    bases = unpack(kinds, weights, sizes)
    d_rows = [pick(t, rows).to(D).to(acc) for t in d_ys]
    g = torch.cat([s * (d @ b.to(acc)) for s, d, b in zip(scales, d_rows, lora_b)], 1).to(D).to(acc)
    d_x, d_adapters = d_ys[0].new_empty(0), [d_ys[0].new_empty(0, dtype=acc)]
    if need_x:
        first, *others = (base.backward(t, find) for base, t in zip(bases, d_ys))
        d_x = first
        if others:
            d_x = sum((t.to(acc) for t in others), first.to(acc))
        a = torch.cat([t.to(acc) for t in lora_a])
        d_x = _added(d_x, inverse * masked(g @ a, seed, rows, dropout_p), rows).to(first.dtype)
    d_ws = [
        (pick(t, None).to(acc).t() @ pick(x, None).to(acc)).to(base.tensors[0].dtype) if need else t.new_empty(0)
        for t, base, need in zip(d_ys, bases, need_w)
    ]
    if need_a:
        h = masked(pick(x, rows), seed, rows, dropout_p)
        d_adapters.append((inverse * (g.t() @ h.to(D).to(acc))).reshape(-1))
    if need_b:
        assert xa is not None
        parts = xa.to(acc).split([t.shape[0] for t in lora_a], 1)
        d_adapters += [(s * (d.t() @ p)).reshape(-1) for s, d, p in zip(scales, d_rows, parts)]
    return d_x, d_ws, torch.cat(d_adapters)


def pick(t: Tensor | None, rows: Tensor | None) -> Tensor:
    """[..., F] -> the flattened rows, or those listed."""
    assert t is not None
    flat = t.reshape(t.shape[:-1].numel(), t.shape[-1])
    return flat if rows is None else flat[rows]


def _added(y: Tensor, delta: Tensor, rows: Tensor | None) -> Tensor:
    """y + delta in delta's dtype, rounded to y's; only in the rows that are listed: the others are copied."""
    flat = y.reshape(y.shape[:-1].numel(), y.shape[-1])
    if rows is None:
        flat = (flat.to(delta.dtype) + delta).to(y.dtype)
    else:
        flat = flat.index_copy(0, rows, (flat[rows].to(delta.dtype) + delta).to(y.dtype))
    return flat.view(y.shape)
