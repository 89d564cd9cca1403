"""The Hopper backward for head dims above 128: dK and dV in one kernel, dQ in another (see their files)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...._launch import on
from . import descriptors, preprocess, schedule
from .backward_wide_kv import dkdv_kernel
from .backward_wide_q import dq_kernel

KEYS = 64  # rows of K and V that a program of the dK/dV kernel owns
ROWS = 128  # query rows that a program of the dQ kernel owns
BOX = 64  # rows of every TMA box
KV_GROUP = 8  # heads whose programs run side by side
Q_GROUP = 16
LOG2E = 1.4426950408889634


def why_not(k: Tensor, v: Tensor, k_lens: Tensor | None) -> str:
    """Why this backward cannot serve the call ("" when it can), beyond descriptors.why_not() of each tensor."""
    if k_lens is not None:
        for name, t in (("k", k), ("v", v)):
            if t.shape[0] > 1 and t.stride(0) % _row_stride(t):
                return f"with k_lens the batch stride of {name} must be a multiple of its row stride"
    return ""


def _row_stride(t: Tensor) -> int:
    """Elements between the rows of dense t as its descriptor has them."""
    return t.stride(1) if t.shape[1] > 1 else 8


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, sinks: Tensor | None, scale: float | None,
    left: int | None, right: int | None, softcap: float, kv_grad_start: int, deterministic: bool,
    need_q: bool, need_k: bool, need_v: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_q, d_k, d_v, delta, exponent), all bit-equal between runs whatever `deterministic` says.

    The gradient of sinks follows from delta and lse. d_k and d_v come from one kernel: asking for one of them costs as
    much as both.
    """
    reason = why_not(k, v, k_lens)
    if reason:
        raise ValueError(reason)
    T, H, D = q.shape[-3:]
    S, K = k.shape[-3:-1]
    packed = cu_q is not None
    lead = q.shape[:-3]
    if cu_q is not None:
        cu_q = cu_q.contiguous()
        cu_k = cu_q if cu_k is None else cu_k.contiguous()
    docs = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    d_q = q.new_empty((*lead, T, H, D) if need_q else 0)
    some = need_k or need_v
    d_k, d_v = (k.new_empty((*lead, S - kv_grad_start, K, D) if some else 0) for _ in range(2))
    if q.numel() == 0 or k.numel() == 0:
        delta = torch.zeros((*lead, H, T), dtype=torch.float32, device=q.device)
        exponent = torch.zeros((docs, H) if q.dtype == torch.float16 else 0, dtype=torch.int32, device=q.device)
        return d_q.zero_(), d_k.zero_() if need_k else d_k.new_empty(0), d_v.zero_() if need_v else d_v.new_empty(0), delta, exponent
    if d_out.stride(-1) != 1 or descriptors.why_not(d_out):
        d_out = d_out.contiguous()  # a broadcast gradient, as sum() sends back: TMA needs rows
    with on(q):
        rows = preprocess.prepare(d_out, d_lse, out, lse, cu_q, BOX, False)
        _launch(
            q, k, v, d_out, d_q if need_q else None, d_k, d_v, lse.contiguous(), rows, cu_q, cu_k, k_lens, docs,
            D**-0.5 if scale is None else scale, left, right, softcap, kv_grad_start,
        )  # fmt: skip
    return d_q, d_k if need_k else d_k.new_empty(0), d_v if need_v else d_v.new_empty(0), rows.delta, rows.exponent


def _launch(
    q, k, v, d_out, d_q, d_k, d_v, lse, rows, cu_q, cu_k, k_lens, docs, scale, left, right, softcap, kv_grad_start
) -> None:
    T, H = q.shape[-3:-1]
    S, K = k.shape[-3:-1]
    packed = cu_q is not None
    B = 1 if packed else q.shape[0]
    keys = (k, v) if k_lens is None else (k[0], v[0])  # one sequence's rows, found through their batch's first row
    steps = [0, 0] if k_lens is None else [t.stride(0) // _row_stride(t) for t in (k, v)]
    describe = descriptors.describe
    inputs = [describe(t, BOX) for t in (q, d_out, *keys)]
    flags = {
        "LEFT": left is not None, "RIGHT": right is not None, "SOFTCAP": softcap > 0, "PACKED": packed,
        "SCALED": q.dtype == torch.float16, "LENS": k_lens is not None, "num_warps": 4,
    }  # fmt: skip
    window = (left or 0, right or 0, scale, scale if softcap > 0 else scale * LOG2E, softcap)
    if d_k.numel():
        table = schedule.table(cu_k, cu_q, S, T, KEYS, False) if packed else None
        tiles = table.shape[0] if packed else triton.cdiv(S - kv_grad_start, KEYS)
        dkdv_kernel[(tiles * B * K,)](
            *inputs, describe(d_k, BOX), describe(d_v, BOX), lse, rows.delta, rows.exponent, k_lens, table,
            tiles, docs, B, T, S, H, K, *steps, kv_grad_start, *window, KV_GROUP, **flags,
        )  # fmt: skip
    if d_q is not None:
        table = schedule.table(cu_q, cu_k, T, S, ROWS, right is not None) if packed else None
        tiles = table.shape[0] if packed else triton.cdiv(T, ROWS)
        dq_kernel[(tiles * B * H,)](
            *inputs, describe(d_q, BOX), lse, rows.delta, rows.exponent, k_lens, table,
            tiles, docs, B, T, S, H, K, *steps, *window, Q_GROUP, **flags,
        )  # fmt: skip
