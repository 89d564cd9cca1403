"""Attention backward in Triton: delta, then dK and dV, then dQ, then the bias, each its own kernel and without atomics.

Scores are recomputed in every one of them; all are bit-equal between runs.
"""

import math

import torch
from torch import Tensor

from ..._launch import cdiv, on
from . import portable_dbias, portable_delta, portable_dkdv, portable_dq
from .portable_launch import Call


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """d_sinks comes back empty: it follows from lse and delta."""
    call = Call(q, k, v, cu_q, cu_k, k_lens, bias, seed, scale, left, right, softcap, dropout_p, d_out)
    d_q = torch.empty(q.shape if need_q else 0, dtype=q.dtype, device=q.device)
    d_k, d_v = (
        torch.empty(t[..., kv_grad_start:, :, :].shape if need else 0, dtype=t.dtype, device=t.device)
        for t, need in ((k, need_k), (v, need_v))
    )
    d_bias = q.new_empty(0)
    lse = lse.contiguous()
    with on(q):
        delta, row_scale, exponent = portable_delta.prepare(call, d_out, d_lse, out, lse, cu_q)
        if (need_k or need_v) and kv_grad_start < call.S:
            tiles, launch = call.cut("dkdv", call.S - kv_grad_start // 4 * 4)
            portable_dkdv.attention_dkdv[(tiles * call.B * call.K,)](
                q, k, v, d_out, d_k, d_v, lse, delta, row_scale, exponent, call.scale, kv_grad_start, K=call.K,
                group=call.group, NEED_K=need_k, NEED_V=need_v, **call.arguments, **launch,
            )  # fmt: skip
        if need_q:
            tiles, launch = call.cut("dq", call.T)
            portable_dq.attention_dq[(tiles * call.B * call.H,)](
                q, k, v, d_out, d_q, lse, delta, row_scale, call.scale, G=call.G, group=call.group * call.G,
                **call.arguments, **launch,
            )  # fmt: skip
        if bias is not None and need_bias:
            d_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
            _, launch = call.cut("dq", call.T)
            every = [size == 1 for size in bias.shape[:3]]
            owned = call.B, call.H, cdiv(call.T, launch["M"])
            programs = math.prod(1 if walked else n for walked, n in zip(every, owned))
            programs *= cdiv(call.S, launch["N"])
            portable_dbias.attention_dbias[(programs,)](
                q, k, v, d_out, d_bias, lse, delta, G=call.G,
                **dict(zip(("ALL_B", "ALL_H", "ALL_T"), every)), **call.arguments, **launch,
            )  # fmt: skip
    exponent = q.new_empty(0, dtype=torch.int32) if exponent is None else exponent
    return d_q, d_k, d_v, d_bias, q.new_empty(0), delta, exponent
