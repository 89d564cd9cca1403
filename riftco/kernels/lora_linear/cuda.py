"""Launches of the adapters' kernels around base products that others make: cuBLAS, or the format's own launchers.

A group's members are tuples of pointers and sizes: one launch makes x A^T of all of them, one adds (x A^T) B^T to all
outputs, one sums all gradients of A and B. kernels.py has the kernels, tiles.py the choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._launch import as_rows, cdiv, on
from ..attention.philox import threshold
from . import alone, kernels, tiles
from .base import count, dtypes, launcher, unpack
from .dropout import inverse_keep
from .route import route


def forward(
    x: Tensor, kinds: list[str], weights: list[Tensor], sizes: list[int], biases: list[Tensor | None],
    lora_a: list[Tensor], lora_b: list[Tensor], scales: list[float], seed: Tensor | None, dropout_p: float,
    rows: Tensor | None,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    D, _ = dtypes(x, lora_a, lora_b)
    bases = unpack(kinds, weights, sizes)
    rows = None if rows is None else rows.contiguous()
    xa = _down(x, seed, dropout_p, rows, _in(D, lora_a))
    if route(x.shape[:-1].numel(), rows is not None).name == "adapters first":
        ys = _up_each_alone(x, biases, xa, _in(D, lora_b), scales)
        for base, y in zip(bases, ys):
            base.forward(x, None, launcher, onto=y)
    else:
        ys = [base.forward(x, bias, launcher) for base, bias in zip(bases, biases)]
        _up_each(ys, rows, xa, _in(D, lora_b), scales)
    return ys, xa


def backward(
    d_ys: list[Tensor], x: Tensor | None, kinds: list[str], weights: list[Tensor], sizes: list[int],
    lora_a: list[Tensor], lora_b: list[Tensor], xa: Tensor | None, scales: list[float], seed: Tensor | None,
    dropout_p: float, rows: Tensor | None, need_x: bool, need_w: list[bool], need_a: bool, need_b: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
    D, _ = dtypes(d_ys[0], lora_a, lora_b)
    rows = None if rows is None else rows.contiguous()
    bases = unpack(kinds, weights, sizes)
    d_x, g = d_ys[0].new_empty(0), None
    if need_x or need_a:
        g = _down_each(d_ys, rows, _in(D, lora_b), scales)
    first = route(d_ys[0].shape[:-1].numel(), rows is not None).name
    if need_x and first == "adapters first":
        d_x = _up_alone(d_ys[0], seed, dropout_p, g, _in(D, lora_a))
        for base, t in zip(bases, d_ys):
            base.backward(t, launcher, onto=d_x)
    elif need_x:
        parts = [base.backward(t, launcher).contiguous() for base, t in zip(bases, d_ys)]
        d_x = parts[0]
        _up(parts, seed, dropout_p, rows, g, _in(D, lora_a))
    d_ws = [
        t.reshape(-1, t.shape[-1]).t() @ x.reshape(-1, x.shape[-1]) if need and x is not None else t.new_empty(0)
        for t, need in zip(d_ys, need_w)
    ]
    return d_x, d_ws, _grads(d_ys, x, xa, g, lora_a, lora_b, scales, seed, dropout_p, rows, need_a, need_b)


def _in(dtype: torch.dtype, ts: list[Tensor]) -> list[Tensor]:
    return [t if t.dtype == dtype else t.to(dtype) for t in ts]


def _lines(t: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """t [..., C] with the four numbers that say where its rows lie."""
    lines, inner, stride_o, stride_i = as_rows(t)
    return lines, (inner, stride_o, stride_i, lines.stride(-1))


def _split(wheres: tuple[tuple[int, int, int, int], ...], lines: tuple[Tensor, ...]) -> bool:
    """Whether rows of any of the tensors need two strides."""
    return any(where[0] < t.shape[:-1].numel() for where, t in zip(wheres, lines))


def _ranks(ws: list[Tensor], dim: int) -> tuple[tuple[int, ...], int]:
    ranks = tuple(w.shape[dim] for w in ws)
    return ranks, sum(ranks)


def _down(x: Tensor, seed: Tensor | None, dropout_p: float, rows: Tensor | None, ws: list[Tensor]) -> Tensor:
    """dropout(x) A^T of all members side by side, [rows, sum of R], from one reading of x."""
    M, C = count(x, rows), x.shape[-1]
    ranks, R = _ranks(ws, 0)
    tile = tiles.down(M, (C,), max(ranks), x.dtype.itemsize >= 4, len(ws))
    out = torch.empty(tile.splits, M, R, dtype=torch.float32 if tile.splits > 1 else ws[0].dtype, device=x.device)
    if M == 0:
        return out[0]
    lines, where = _lines(x)
    with on(x):
        kernels.down[(cdiv(M, tile.BM) * cdiv(max(ranks), tile.BR) * tile.splits,)](
            lines, seed, rows, tuple(ws), tuple(w.stride() for w in ws), ranks, out, where, threshold(dropout_p),
            inverse_keep(seed, dropout_p), M, C, R, cdiv(max(ranks), tile.BR), x.shape[:-1].numel(), tile.splits,
            tile.width,
            SPLIT=_split((where,), (lines,)), HAS_KEEP=seed is not None, HAS_ROWS=rows is not None,
            BM=tile.BM, BC=tile.BC, BR=tile.BR, num_stages=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return out[0] if tile.splits == 1 else out.sum(0).to(ws[0].dtype)


def _down_each(ts: list[Tensor], rows: Tensor | None, ws: list[Tensor], scales: list[float]) -> Tensor:
    """scale * d_y B of all members side by side, [rows, sum of R]."""
    M, widths = count(ts[0], rows), tuple(t.shape[-1] for t in ts)
    ranks, R = _ranks(ws, 1)
    tile = tiles.down(M, widths, max(ranks), ts[0].dtype.itemsize >= 4)
    out = torch.empty(tile.splits, M, R, dtype=torch.float32 if tile.splits > 1 else ws[0].dtype, device=ts[0].device)
    if M == 0:
        return out[0]
    lines, wheres = zip(*map(_lines, ts))
    with on(ts[0]):
        kernels.down_each[(cdiv(M, tile.BM) * cdiv(max(ranks), tile.BR) * tile.splits * len(ts),)](
            lines, rows, tuple(ws), tuple(w.stride()[::-1] for w in ws), ranks, out, wheres, tuple(scales),
            M, widths, R, cdiv(max(ranks), tile.BR), ts[0].shape[:-1].numel(), tile.splits,
            tile.width, SPLIT=_split(wheres, lines), HAS_ROWS=rows is not None,
            BM=tile.BM, BC=tile.BC, BR=tile.BR, num_stages=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return out[0] if tile.splits == 1 else out.sum(0).to(ws[0].dtype)


def _up_each(ys: list[Tensor], rows: Tensor | None, xa: Tensor, ws: list[Tensor], scales: list[float]) -> None:
    """Add scale * (x A^T) B^T to each member's y, in place."""
    M, widths = count(ys[0], rows), tuple(y.shape[-1] for y in ys)
    ranks, R = _ranks(ws, 1)
    tile = tiles.up(M, max(ranks))
    blocks = sum(cdiv(N, tile.BN * tile.tiles) for N in widths)
    if M == 0 or blocks == 0:
        return
    with on(xa):
        kernels.up_each[(cdiv(M, tile.BM) * blocks,)](
            tuple(ys), rows, xa, tuple(ws), tuple(w.stride()[::-1] for w in ws), ranks, tuple(scales), M, widths, R,
            ys[0].shape[:-1].numel(), HAS_ROWS=rows is not None, BM=tile.BM, BN=tile.BN, BR=tile.BR,
            TILES=tile.tiles, num_stages=1, num_warps=tile.warps,
        )  # fmt: skip


def _up(
    parts: list[Tensor], seed: Tensor | None, dropout_p: float, rows: Tensor | None, g: Tensor | None, ws: list[Tensor]
) -> None:
    """parts[0] = sum of the parts + dropout'(g A), rounded once; with rows, g A is added to those that are listed."""
    assert g is not None
    first = parts[0]
    if rows is not None and len(parts) > 1:  # the other rows need their sum as well
        first.copy_(sum((p.float() for p in parts[1:]), first.float()))
        parts = parts[:1]
    M, C = count(first, rows), first.shape[-1]
    ranks, R = _ranks(ws, 0)
    tile = tiles.up(M, R)
    if M == 0 or C == 0:
        return
    with on(first):
        kernels.up[(cdiv(M, tile.BM) * cdiv(C, tile.BN * tile.tiles),)](
            tuple(parts), seed, rows, g, tuple(ws), tuple(w.stride() for w in ws), ranks, threshold(dropout_p),
            inverse_keep(seed, dropout_p), M, C, R, first.shape[:-1].numel(),
            HAS_KEEP=seed is not None, HAS_ROWS=rows is not None, BM=tile.BM, BN=tile.BN, BR=tile.BR,
            TILES=tile.tiles, num_stages=1, num_warps=tile.warps,
        )  # fmt: skip


def _up_each_alone(
    x: Tensor, biases: list[Tensor | None], xa: Tensor, ws: list[Tensor], scales: list[float]
) -> list[Tensor]:
    """Each member's bias + scale * (x A^T) B^T."""
    M, widths = x.shape[:-1].numel(), tuple(w.shape[0] for w in ws)
    ys = [torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device) for N in widths]
    ranks, R = _ranks(ws, 1)
    tile = tiles.alone(M, widths, max(ranks), x.dtype.itemsize >= 4)
    strips = sum(cdiv(N, tile.BN) for N in widths)
    if M and strips:
        with on(x):
            alone.up_each_alone[(cdiv(M, tile.BM * tile.tiles) * strips,)](
                tuple(ys), tuple(None if b is None else b.contiguous() for b in biases), xa, tuple(ws),
                tuple(w.stride()[::-1] for w in ws), ranks, tuple(scales), M, widths, R, strips,
                tile.tiles, HELD=tile.held, BM=tile.BM, BN=tile.BN, BR=tile.BR,
                num_stages=1, num_warps=tile.warps,
            )  # fmt: skip
    return ys


def _up_alone(d_y: Tensor, seed: Tensor | None, dropout_p: float, g: Tensor | None, ws: list[Tensor]) -> Tensor:
    """dropout'(g A)."""
    assert g is not None
    M, C = d_y.shape[:-1].numel(), ws[0].shape[1]
    d_x = torch.empty(*d_y.shape[:-1], C, dtype=d_y.dtype, device=d_y.device)
    ranks, R = _ranks(ws, 0)
    tile = tiles.alone(M, (C,), max(ranks), d_y.dtype.itemsize >= 4, len(ws))
    if d_x.numel():
        with on(d_y):
            alone.up_alone[(cdiv(M, tile.BM * tile.tiles) * cdiv(C, tile.BN),)](
                d_x, seed, g, tuple(ws), tuple(w.stride() for w in ws), ranks, threshold(dropout_p),
                inverse_keep(seed, dropout_p), M, C, R, tile.tiles, HAS_KEEP=seed is not None,
                HELD=tile.held, BM=tile.BM, BN=tile.BN, BR=tile.BR, num_stages=1, num_warps=tile.warps,
            )  # fmt: skip
    return d_x


def _grads(
    d_ys: list[Tensor], x: Tensor | None, xa: Tensor | None, g: Tensor | None, lora_a: list[Tensor],
    lora_b: list[Tensor], scales: list[float], seed: Tensor | None, dropout_p: float, rows: Tensor | None,
    need_a: bool, need_b: bool,
) -> Tensor:  # fmt: skip
    """All d_A and all d_B in one buffer that one launch fills."""
    ranks, R = _ranks(lora_a, 0)
    C = lora_a[0].shape[1]
    # of each product: rows' tensor, its small partner and the first column there, ranks, factor, place and strides
    products: list[tuple[Tensor, Tensor, int, int, float, int, tuple[int, int]]] = []
    total = 0
    if need_a:
        assert x is not None and g is not None
        products.append((x, g, 0, R, inverse_keep(seed, dropout_p), 0, (C, 1)))
        total = R * C
    if need_b:
        assert xa is not None
        for i, (d_y, b, scale) in enumerate(zip(d_ys, lora_b, scales)):
            products.append((d_y, xa, sum(ranks[:i]), ranks[i], scale, total, (1, ranks[i])))
            total += b.numel()
    if not products:
        return torch.empty(0, dtype=torch.float32, device=d_ys[0].device)
    M = count(d_ys[0], rows)
    tile = tiles.grads(M, tuple((p[0].shape[-1], p[3]) for p in products), d_ys[0].dtype.itemsize >= 4, need_a)
    out = torch.empty(tile.splits, total, dtype=torch.float32, device=d_ys[0].device)
    if M == 0 or total == 0:
        out.zero_()
    else:
        ts, partners, columns, widths_r, factors, places, strides = zip(*products)
        lines, wheres = zip(*map(_lines, ts))
        with on(out):
            kernels.grads[(tile.programs * tile.splits,)](
                lines, seed, rows, partners, columns, out, wheres, places, strides, threshold(dropout_p), factors, M,
                tuple(t.shape[-1] for t in ts), widths_r, R, total, cdiv(M, tile.splits), tile.splits,
                d_ys[0].shape[:-1].numel(), SPLIT=_split(wheres, lines),
                HAS_KEEP=seed is not None and need_a, HAS_ROWS=rows is not None,
                BM=tile.BM, BC=tile.BC, BR=tile.BR, BR_B=tile.BR_B,
                num_stages=tile.stages, num_warps=tile.warps,
            )  # fmt: skip
    return out[0] if tile.splits == 1 else out.sum(0)
