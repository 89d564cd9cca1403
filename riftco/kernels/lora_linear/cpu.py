"""LoRA on the CPU: products in the tensors' own dtype; blocks of rows where the adapters' dtype is another one."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import DENSE, dtypes, launcher, unpack
from .dropout import inverse_keep, masked

BLOCK_ROWS = 1024  # rows converted, or masked, at once
ALL = slice(None)


def forward(
    x: Tensor, kinds: list[str], weights: list[Tensor], sizes: list[int], biases: list[Tensor | None],
    lora_a: list[Tensor], lora_b: list[Tensor], scales: list[float], seed: Tensor | None, dropout_p: float,
    rows: Tensor | None,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    D, _ = dtypes(x, lora_a, lora_b)
    ys = [base.forward(x, bias, launcher) for base, bias in zip(unpack(kinds, weights, sizes), biases)]
    M, C = x.shape[:-1].numel(), x.shape[-1]
    lines = x.reshape(M, C)
    outs = [y.view(M, y.shape[-1]) for y in ys]
    a, bs, ranks = _joined(lora_a, D), [b.to(D).t() for b in lora_b], [t.shape[0] for t in lora_a]
    count = M if rows is None else rows.numel()
    xa = torch.empty(count, a.shape[0], dtype=D)
    for lo, hi in _blocks(count, x.dtype != D or seed is not None):
        chosen = slice(lo, hi) if rows is None else rows[lo:hi]
        part = torch.mm(_masked(lines[chosen], seed, rows, lo, hi, dropout_p).to(D), a.t(), out=xa[lo:hi])
        if seed is not None:
            part.mul_(inverse_keep(seed, dropout_p))
        for out, own, b, scale in zip(outs, part.split(ranks, 1), bs, scales):
            _add(out, chosen, own, b, scale)
    return ys, xa


def backward(
    d_ys: list[Tensor], x: Tensor | None, kinds: list[str], weights: list[Tensor], sizes: list[int],
    lora_a: list[Tensor], lora_b: list[Tensor], xa: Tensor | None, scales: list[float], seed: Tensor | None,
    dropout_p: float, rows: Tensor | None, need_x: bool, need_w: list[bool], need_a: bool, need_b: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
    D, _ = dtypes(d_ys[0], lora_a, lora_b)
    M, C = d_ys[0].shape[:-1].numel(), lora_a[0].shape[1]
    ranks, widths = [t.shape[0] for t in lora_a], [t.shape[0] for t in lora_b]
    ups = [t.reshape(M, N) for t, N in zip(d_ys, widths)]
    lines = None if x is None else x.reshape(M, C)
    a, bs = _joined(lora_a, D), [b.to(D) for b in lora_b]
    inverse = inverse_keep(seed, dropout_p)
    bases = unpack(kinds, weights, sizes)
    d_x = _base_gradient(bases, ups) if need_x else d_ys[0].new_empty(0)
    d_ws = [torch.mm(up.t(), _given(lines)) if need else up.new_empty(0) for up, need in zip(ups, need_w)]
    d_adapters = torch.zeros(a.numel() * need_a + sum(b.numel() for b in bs) * need_b)
    d_a = d_adapters[: a.numel() * need_a].view(a.shape[0] * need_a, C)
    d_bs = d_adapters[d_a.numel() :].split([b.numel() for b in bs]) if need_b else ()
    count = M if rows is None else rows.numel()
    for lo, hi in _blocks(count, d_ys[0].dtype != D or seed is not None):
        chosen = slice(lo, hi) if rows is None else rows[lo:hi]
        parts = [up[chosen].to(D) for up in ups]
        if need_b:
            for d, part, own, scale in zip(d_bs, parts, _given(xa)[lo:hi].split(ranks, 1), scales):
                _add(d.view(part.shape[1], own.shape[1]), ALL, part.t(), own, scale)
        if not (need_x or need_a):
            continue
        own = _joined([(part @ b).mul_(scale) for part, b, scale in zip(parts, bs, scales)], D, 1)
        if need_a:
            h = _masked(_given(lines)[chosen], seed, rows, lo, hi, dropout_p).to(D)
            _add(d_a, ALL, own.t(), h, inverse)
        if need_x and seed is None:
            _add(d_x, chosen, own, a, 1.0)
        elif need_x:
            delta = _masked((own @ a).to(torch.float32).mul_(inverse), seed, rows, lo, hi, dropout_p)
            d_x[chosen] = (d_x[chosen] + delta).to(d_x.dtype)
    return d_x.view(*d_ys[0].shape[:-1], C) if need_x else d_x, d_ws, d_adapters


def _base_gradient(bases, ups: list[Tensor]) -> Tensor:
    """Sum of d_y W: dense products are added where they are made, others' results to the first."""
    first, *others = zip(bases, ups)
    d_x = first[0].backward(first[1], launcher)
    for base, up in others:
        if base.kind == DENSE:
            d_x.addmm_(up, base.tensors[0])
        else:
            d_x.add_(base.backward(up, launcher))
    return d_x


def _given(t: Tensor | None) -> Tensor:
    assert t is not None  # saved, as a gradient needs it
    return t


def _joined(parts: list[Tensor], dtype: torch.dtype, dim: int = 0) -> Tensor:
    return parts[0].to(dtype) if len(parts) == 1 else torch.cat([t.to(dtype) for t in parts], dim)


def _blocks(count: int, small: bool) -> list[tuple[int, int]]:
    step = BLOCK_ROWS if small else max(count, 1)
    return [(lo, min(lo + step, count)) for lo in range(0, count, step)]


def _masked(t: Tensor, seed: Tensor | None, rows: Tensor | None, lo: int, hi: int, dropout_p: float) -> Tensor:
    """t holds the rows lo to hi of those selected."""
    if seed is None:
        return t
    return masked(t, seed, torch.arange(lo, hi) if rows is None else rows[lo:hi], dropout_p)


def _add(out: Tensor, chosen: slice | Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """out[chosen] += scale * left right, in place where the dtypes are the same; rounded once otherwise."""
    if out.dtype != left.dtype:
        out[chosen] = torch.add(out[chosen].float(), (left @ right).float(), alpha=scale).to(out.dtype)
    elif isinstance(chosen, slice):
        out[chosen].addmm_(left, right, alpha=scale)  # a view: storing it again would copy all of it
    else:
        out[chosen] = out[chosen].addmm_(left, right, alpha=scale)
