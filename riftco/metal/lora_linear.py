"""Launches csrc/metal/lora_linear.metal; the contract is riftco/kernels/lora_linear/op.py.

A quantised base is its own shader's product, a dense one PyTorch's. Dropout's mask is drawn by PyTorch's operations,
into a copy of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels._launch import as_rows
from ..kernels.lora_linear.base import count, dtypes, launcher, unpack
from ..kernels.lora_linear.dropout import inverse_keep, masked
from ..kernels.lora_linear.spec import pick
from . import launch
from ._matmul import TILE_THREADS, tiles


def forward(
    x: Tensor, kinds: list[str], weights: list[Tensor], sizes: list[int], biases: list[Tensor | None],
    lora_a: list[Tensor], lora_b: list[Tensor], scales: list[float], seed: Tensor | None, dropout_p: float,
    rows: Tensor | None,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    D, _ = dtypes(x, lora_a, lora_b)
    ys = [base.forward(x, bias, launcher).contiguous() for base, bias in zip(unpack(kinds, weights, sizes), biases)]
    a = torch.cat([t.to(D) for t in lora_a])
    h, chosen = _seen(x, seed, rows, dropout_p)
    xa = x.new_empty((count(x, rows), a.shape[0]), dtype=D)
    _product(xa, h, a.t(), chosen, inverse_keep(seed, dropout_p))
    for y, part, b, scale in zip(ys, xa.split([t.shape[0] for t in lora_a], 1), lora_b, scales):
        _add(y, part, b.to(D).t(), rows, scale)
    return ys, xa


def backward(
    d_ys: list[Tensor], x: Tensor | None, kinds: list[str], weights: list[Tensor], sizes: list[int],
    lora_a: list[Tensor], lora_b: list[Tensor], xa: Tensor | None, scales: list[float], seed: Tensor | None,
    dropout_p: float, rows: Tensor | None, need_x: bool, need_w: list[bool], need_a: bool, need_b: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
    D, _ = dtypes(d_ys[0], lora_a, lora_b)
    inverse, M, C = inverse_keep(seed, dropout_p), count(d_ys[0], rows), lora_a[0].shape[1]
    a, ranks = torch.cat([t.to(D) for t in lora_a]), [t.shape[0] for t in lora_a]
    g = a.new_empty((M, a.shape[0]))
    for d_y, part, b, scale in zip(d_ys, g.split(ranks, 1), lora_b, scales):
        _product(part, d_y, b.to(D), rows, scale)
    d_x = d_ys[0].new_empty(0)
    if need_x:
        first, *others = (base.backward(t, launcher) for base, t in zip(unpack(kinds, weights, sizes), d_ys))
        d_x = first.contiguous()
        if others:
            d_x = sum((t.float() for t in others), first.float()).to(first.dtype).contiguous()
        if seed is None:
            _add(d_x, g, a, rows, 1.0)
        else:
            delta = g.new_empty((M, C), dtype=torch.float32)
            _product(delta, g, a, None, inverse)
            flat, delta = d_x.view(-1, C), masked(delta, seed, rows, dropout_p)
            here = slice(None) if rows is None else rows
            flat[here] = (flat[here].float() + delta).to(d_x.dtype)
    d_ws = [torch.mm(pick(t, None).t(), pick(x, None)) if need else t.new_empty(0) for t, need in zip(d_ys, need_w)]
    total = need_a * a.numel() + need_b * sum(b.numel() for b in lora_b)
    flat = g.new_empty(total, dtype=torch.float32)
    if need_a:
        assert x is not None
        h, chosen = _seen(x, seed, rows, dropout_p)
        _product(flat[: a.numel()].view(a.shape).t(), h, g, chosen, inverse, reduced=True)
    if need_b:
        assert xa is not None
        pieces = flat[need_a * a.numel() :].split([b.numel() for b in lora_b])
        for piece, d_y, part, b, scale in zip(pieces, d_ys, xa.split(ranks, 1), lora_b, scales):
            _product(piece.view(b.shape), d_y, part, rows, scale, reduced=True)
    return d_x, d_ws, flat


def _seen(x: Tensor, seed: Tensor | None, rows: Tensor | None, dropout_p: float) -> tuple[Tensor, Tensor | None]:
    """(x as the adapters see it, the rows that are still to be picked from it)."""
    return (x, rows) if seed is None else (masked(pick(x, rows), seed, rows, dropout_p), None)


def _product(
    out: Tensor, left: Tensor, right: Tensor, rows: Tensor | None, scale: float, reduced: bool = False
) -> None:
    """out [I, J] = scale * rows of left @ right, or scale * (rows of left)^T @ right where `reduced`."""
    if out.numel() == 0:
        return
    D = right.dtype
    if D not in (left.dtype, torch.float32):  # no kernel for a float32 or another 16-bit x beside 16-bit adapters
        left = left.to(D)
    if right.shape[0] == 0:
        out.zero_()
        return
    lines, *strides = as_rows(left)
    launch(
        "lora_linear", "lora_linear_product", [lines.dtype, D, out.dtype], [out], [lines, right, rows],
        [*strides, lines.stride(-1), *right.stride(), *out.stride(), *out.shape, right.shape[0], rows is not None,
         reduced],
        [scale], groups=tiles(*out.shape), threads=TILE_THREADS, exact=True,
    )  # fmt: skip


def _add(out: Tensor, left: Tensor, right: Tensor, rows: Tensor | None, scale: float) -> None:
    """out's rows += scale * left [I, K] @ right [K, J]; out is contiguous."""
    (I, K), J = left.shape, right.shape[1]
    if I * J * K == 0:
        return
    if left.dtype not in (out.dtype, torch.float32):
        left, right = left.float(), right.float()
    launch(
        "lora_linear", "lora_linear_add", [out.dtype, left.dtype], [out], [left, right, rows],
        [1, 0, left.stride(0), left.stride(1), *right.stride(), J, 1, I, J, K, rows is not None, False],
        [scale], groups=tiles(I, J), threads=TILE_THREADS, exact=True,
    )  # fmt: skip
