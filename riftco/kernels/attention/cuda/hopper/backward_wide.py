"""The Hopper backward for head dims above 128: dK and dV in one kernel, dQ in another (see their files)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...._launch import cdiv, on
from ...spec import softmax_scale
from . import descriptors, preprocess, schedule
from .backward_wide_kv import dkdv_kernel
from .backward_wide_q import dq_kernel

KEYS = 64  # rows of K and V that a program of the dK/dV kernel owns
ROWS = 128  # query rows that a program of the dQ kernel owns
BOX = 64  # rows of every TMA box
KV_GROUP = 4  # key heads whose programs run side by side
Q_GROUP = 16  # query heads
LOG2E = 1.4426950408889634


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_q, d_k, d_v, d_bias, d_sinks, delta, exponent), bit-equal between runs whatever `deterministic` says.

    Bias and dropout are not served here; the gradient of sinks follows from delta and lse. d_k and d_v come from one
    kernel: asking for one of them costs as much as both.
    """
    if bias is not None or seed is not None:
        raise ValueError("the Hopper backward serves neither bias nor dropout")
    T, H, D = q.shape[-3:]
    S, K = k.shape[-3:-1]
    lead = q.shape[:-3]
    if cu_q is not None:
        cu_q = cu_q.contiguous()
        cu_k = cu_q if cu_k is None else cu_k.contiguous()
    docs = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    scale = softmax_scale(q, scale)
    none = q.new_empty(0)
    d_q = q.new_empty((*lead, T, H, D)) if need_q else none
    d_k, d_v = (k.new_empty((*lead, S - kv_grad_start, K, D)) if need_k or need_v else none for _ in range(2))
    if q.numel() == 0 or k.numel() == 0 or docs == 0:
        delta = torch.zeros((*lead, H, T), dtype=torch.float32, device=q.device)
        exponent = torch.zeros((docs, H) if q.dtype == torch.float16 else 0, dtype=torch.int32, device=q.device)
        for t in (d_q, d_k, d_v):
            t.zero_()
    else:
        if d_out.stride(-1) != 1 or descriptors.why_not(d_out):
            d_out = d_out.contiguous()  # TMA needs rows of it
        lse = lse.contiguous()
        with on(q):
            rows = preprocess.prepare(d_out, d_lse, out, lse, cu_q, BOX, False)
            left, right = (None if x is None else min(x, T + S) for x in (left, right))  # int32 from here on
            window = (scale, left, right, softcap)
            if d_k.numel():
                keys_gradient(q, k, v, d_out, d_k, d_v, lse, rows, cu_q, cu_k, k_lens, *window, kv_grad_start)
            if need_q:
                rows_gradient(q, k, v, d_out, d_q, lse, rows, cu_q, cu_k, k_lens, *window)
        delta, exponent = rows.delta, rows.exponent
    return d_q, d_k if need_k else none, d_v if need_v else none, none, none, delta, exponent


def keys_gradient(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_k: Tensor, d_v: Tensor, lse: Tensor, rows: preprocess.Rows,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, scale: float, left: int | None,
    right: int | None, softcap: float, kv_grad_start: int,
) -> None:  # fmt: skip
    """dK and dV of the keys from kv_grad_start on, at head dims above 128."""
    S, K = k.shape[-3:-1]
    table = None if cu_q is None or cu_k is None else schedule.table(cu_k, cu_q, S, q.shape[-3], KEYS, False)
    tiles = cdiv(S - kv_grad_start, KEYS) if table is None else table.shape[0]
    inputs, sizes, flags = _arguments(q, k, v, d_out, lse, rows, table, tiles, k_lens, left, right, softcap)
    outputs = [descriptors.describe(t, BOX) for t in (d_k, d_v)]
    batch = 1 if cu_q is not None else q.shape[0]
    dkdv_kernel[(tiles * batch * K,)](
        *inputs[:4], *outputs, *inputs[4:], *sizes, kv_grad_start, left or 0, right or 0, scale,
        scale if softcap > 0 else scale * LOG2E, softcap, KV_GROUP, **flags,
    )  # fmt: skip


def rows_gradient(
    q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, d_q: Tensor, lse: Tensor, rows: preprocess.Rows,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, scale: float, left: int | None,
    right: int | None, softcap: float,
) -> None:  # fmt: skip
    """dQ alone, bit-equal between runs, at any head dim."""
    T, H = q.shape[-3:-1]
    table = (
        None if cu_q is None or cu_k is None else schedule.table(cu_q, cu_k, T, k.shape[-3], ROWS, right is not None)
    )
    tiles = cdiv(T, ROWS) if table is None else table.shape[0]
    inputs, sizes, flags = _arguments(q, k, v, d_out, lse, rows, table, tiles, k_lens, left, right, softcap)
    batch = 1 if cu_q is not None else q.shape[0]
    dq_kernel[(tiles * batch * H,)](
        *inputs[:4], descriptors.describe(d_q, BOX), *inputs[4:], *sizes, left or 0, right or 0, scale,
        scale if softcap > 0 else scale * LOG2E, softcap, Q_GROUP, **flags,
    )  # fmt: skip


def _arguments(q, k, v, d_out, lse, rows, table, tiles, k_lens, left, right, softcap):
    """What both kernels take: (descriptors and pointers, sizes, flags)."""
    T, H = q.shape[-3:-1]
    S, K = k.shape[-3:-1]
    packed = table is not None
    k_step = v_step = 0
    if k_lens is not None:
        (k, k_step), (v, v_step) = descriptors.as_packed(k), descriptors.as_packed(v)
    inputs = [descriptors.describe(t, BOX) for t in (q, d_out, k, v)]
    inputs += [lse, rows.delta, rows.exponent, k_lens, table]
    flags = {
        "LEFT": left is not None, "RIGHT": right is not None, "SOFTCAP": softcap > 0, "PACKED": packed,
        "SCALED": q.dtype == torch.float16, "LENS": k_lens is not None, "num_warps": 4,
    }  # fmt: skip
    return inputs, (tiles, rows.docs, 1 if packed else q.shape[0], T, S, H, K, k_step, v_step), flags
