"""Launches csrc/metal/attention_*.metal. The contract: riftco/kernels/attention/op.py; routes: attention_route.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention import composed, spec
from . import bound, launch
from .attention_route import LONGEST_ROW, Route, route, used

SHADERS = ("attention_forward", "attention_backward", "attention_rows", "attention_softmax")
THREADS = 128  # of every threadgroup: four simdgroups


class Mask(NamedTuple):
    """What decides which keys a row sees, as the shaders take it."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    k_lens: Tensor | None
    left: int
    right: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.cu_q, self.cu_k, self.k_lens


NO_MASK = Mask(None, None, None, -1, -1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    found = route(q.dtype, q.shape[-1], v.shape[-1], options=used(bias, dropout_p))
    if found.name == "composed":
        return composed.forward(
            q, k, v, cu_q, cu_k, k_lens, bias, sinks, seed, scale, left, right, softcap, dropout_p
        )  # fmt: skip
    *lead, T, H, _ = q.shape
    out = torch.empty((*lead, T, H, v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty((*lead, H, T), dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return out, lse
    mask = _mask(cu_q, cu_k, k_lens, left, right)
    sink = None if sinks is None else sinks.float().contiguous()
    launch(
        "attention_rows" if found.name == "rows" else "attention_forward", _name("fwd", found), [q.dtype], [out, lse],
        [q, *bound(k, v), *mask.tensors, sink], _numbers(q, k, v, None, mask, has_sinks=sink is not None),
        [spec.softmax_scale(q, scale), softcap], groups=lse.numel() if found.name == "rows" else _tiles(q, 32),
        threads=THREADS, exact=True,
    )  # fmt: skip
    return out, lse


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    found = route(q.dtype, q.shape[-1], v.shape[-1], options=used(bias, dropout_p))
    if found.name == "composed":
        return composed.backward(
            d_out, d_lse, q, k, v, out, lse, cu_q, cu_k, k_lens, bias, sinks, seed, scale, left, right, softcap,
            dropout_p, kv_grad_start, deterministic, need_q, need_k, need_v, need_bias, need_sinks,
        )  # fmt: skip
    mask, lse = _mask(cu_q, cu_k, k_lens, left, right), lse.contiguous()
    delta, largest = row_sums(d_out, out, lse, d_lse)
    d_q = q.new_empty(q.shape if need_q else 0)
    d_k, d_v = (
        t.new_empty((*t.shape[:-3], t.shape[-3] - kv_grad_start, *t.shape[-2:]) if need else 0)
        for t, need in ((k, need_k), (v, need_v))
    )
    shader = "attention_rows" if found.name == "rows" else "attention_backward"
    inputs = [d_out, q, *bound(k, v), lse, delta, *mask.tensors]
    reals = [spec.softmax_scale(q, scale), softcap]
    long = found.width * q.element_size() >= LONGEST_ROW  # of which only small tiles fit
    if d_q.numel():
        launch(
            shader, _name("dq", found), [q.dtype], [d_q], inputs, _numbers(q, k, v, d_out, mask), reals,
            groups=lse.numel() if found.name == "rows" else _tiles(q, 16 if long else 32), threads=THREADS, exact=True,
        )  # fmt: skip
    if d_k.numel() or d_v.numel():
        keys = (d_k if d_k.numel() else d_v)[..., 0]
        numbers = _numbers(
            q, k, v, d_out, mask, start=kv_grad_start, need_k=d_k.numel() > 0, need_v=d_v.numel() > 0
        )  # fmt: skip
        outputs = [t if t.numel() else t.new_empty(1) for t in (d_k, d_v)]
        launch(
            shader, _name("dkdv", found), [q.dtype], outputs, [t if t is None or t.numel() else None for t in inputs],
            numbers, reals,
            groups=keys.numel() if found.name == "rows" else _tiles(keys.unsqueeze(-1), 16 if long else 32),
            threads=THREADS, exact=True,
        )  # fmt: skip
    return (
        d_q, d_k, d_v, q.new_empty(0),
        spec.sink_gradient(sinks, lse, delta) if need_sinks and sinks is not None else q.new_empty(0),
        delta, _exponent(largest, cu_q) if q.dtype == torch.float16 else q.new_empty(0, dtype=torch.int32),
    )  # fmt: skip


def row_sums(d_out: Tensor, out: Tensor, lse: Tensor, d_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """sum(dO O) - d_lse, and the largest |dO| of each row."""
    delta, largest = torch.empty_like(lse), torch.empty_like(lse)
    if lse.numel():
        d_lse = None if d_lse is None else d_lse.contiguous()
        launch(
            "attention_rows", "attention_delta", [out.dtype], [delta, largest], [d_out, out.contiguous(), lse, d_lse],
            _numbers(out, out, out, d_out, NO_MASK, has_d_lse=d_lse is not None), [0.0, 0.0],
            groups=-(-lse.numel() // 4), threads=THREADS, exact=True,
        )  # fmt: skip
    return delta, largest


def _name(kernel: str, found: Route) -> str:
    return f"attention_rows_{kernel}" if found.name == "rows" else f"attention_{kernel}_{found.width}"


def _tiles(t: Tensor, rows: int) -> int:
    """Tiles of so many rows of [B, rows, heads, dim] or [rows, heads, dim]."""
    return t.shape[:-3].numel() * t.shape[-2] * -(-t.shape[-3] // rows)


def _mask(cu_q, cu_k, k_lens, left: int | None, right: int | None) -> Mask:
    """Numbers of rows in int32, as the shaders read them; a limit of -1 is none."""
    cu_q, cu_k, k_lens = (
        None if t is None else t.to(torch.int32).contiguous() for t in (cu_q, cu_q if cu_k is None else cu_k, k_lens)
    )
    return Mask(cu_q, cu_k, k_lens, -1 if left is None else left, -1 if right is None else right)


def _numbers(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor | None, mask: Mask, *, has_sinks: bool = False,
    has_d_lse: bool = False, start: int = 0, need_k: bool = False, need_v: bool = False,
) -> list[int]:  # fmt: skip
    """AttentionParams of csrc/metal/attention.h, up to its floats."""
    B, documents = q.shape[0] if q.dim() == 4 else 1, 0 if mask.cu_q is None else len(mask.cu_q) - 1
    (T, H, D), (S, K, Dv) = q.shape[-3:], v.shape[-3:]
    if max(T, S) >= 1 << 31:
        raise ValueError(f"attention: Metal's row numbers are 32-bit; got {T} query rows and {S} keys")
    numbers = [B, T, S, H, K, D, Dv, documents, mask.k_lens is not None, has_sinks, has_d_lse, mask.left, mask.right]
    numbers += [start, need_k, need_v]
    for t in (q, k, v, q if d_out is None else d_out):
        numbers += [t.stride(0) if t.dim() == 4 else 0, *t.stride()[-3:]]
    return numbers


def _exponent(largest: Tensor, cu_q: Tensor | None) -> Tensor:
    """float16's powers of two, from the largest |dO| of each row. They are recorded only: P and dS stay float32 in
    these kernels, so that a power of two would change no bit."""
    return spec.dout_exponent(largest.transpose(-1, -2).unsqueeze(-1), cu_q)
