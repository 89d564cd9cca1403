"""Launchers of attention over a cache on CUDA, and the kernel that writes rows into one."""

import triton
import triton.language as tl
from torch import Tensor

from .._launch import next_power_of_2, on
from . import backward as backward_kernels
from . import forward as forward_kernels
from .arguments import Inputs
from .tiles import quantize
from .write import SMALLEST


def forward(*inputs) -> tuple[Tensor, Tensor]:
    """The op's arguments in the order of its schema -> out, lse."""
    return forward_kernels.forward(Inputs(*inputs))


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return backward_kernels.backward(d_out, d_lse, out, lse, Inputs(q, k, v, *rest[:-4]), *rest[-4:])


@triton.jit
def _write_row(
    x_ptr, to_ptr, scale_ptr, ok, stride_xh, stride_xd, stride_h, stride_sh, K, D: tl.constexpr, PAD: tl.constexpr,
    HEADS: tl.constexpr, QUANTIZED: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """All heads of one row."""
    block = tl.arange(0, PAD // 32)[None, :, None]
    inner = tl.arange(0, 32)[None, None, :]
    col = block * 32 + inner
    for first in range(0, K, HEADS):
        h = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None, None]
        mask = ok & (h < K) & (col < D)
        x = tl.load(x_ptr + h * stride_xh + col * stride_xd, mask=mask, other=0.0)
        at = to_ptr + h * stride_h + col
        if QUANTIZED:
            code, scale = quantize(x.to(tl.float32), SMALLEST)
            tl.store(at, code, mask=mask)
            blocks = tl.arange(0, PAD // 32)[None, :]
            heads = (first + tl.arange(0, HEADS)).to(tl.int64)[:, None]
            tl.store(
                scale_ptr + heads * stride_sh + blocks, scale,
                mask=ok & (heads < K) & (blocks * 32 < D),
            )  # fmt: skip
        else:
            tl.store(at, x.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _cached_write(
    rows_ptr, k_ptr, v_ptr, kc_ptr, vc_ptr, ks_ptr, vs_ptr, page_size, n_rows, K, stride_kt, stride_kh, stride_kd,
    stride_vt, stride_vh, stride_vd, stride_kcp, stride_kcr, stride_kch, stride_vcp, stride_vcr, stride_vch,
    stride_ksp, stride_ksr, stride_ksh, stride_vsp, stride_vsr, stride_vsh, D: tl.constexpr, PAD: tl.constexpr,
    HEADS: tl.constexpr, QUANTIZED: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """One row of k and v."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.load(rows_ptr + i).to(tl.int64)
    ok = (at >= 0) & (at < n_rows)
    at = tl.where(ok, at, 0)
    page = at // page_size
    row = at % page_size
    if QUANTIZED:
        ks_ptr += page * stride_ksp + row * stride_ksr
        vs_ptr += page * stride_vsp + row * stride_vsr
    _write_row(
        k_ptr + i * stride_kt, kc_ptr + page * stride_kcp + row * stride_kcr, ks_ptr, ok, stride_kh, stride_kd,
        stride_kch, stride_ksh, K, D, PAD, HEADS, QUANTIZED, SMALLEST,
    )  # fmt: skip
    _write_row(
        v_ptr + i * stride_vt, vc_ptr + page * stride_vcp + row * stride_vcr, vs_ptr, ok, stride_vh, stride_vd,
        stride_vch, stride_vsh, K, D, PAD, HEADS, QUANTIZED, SMALLEST,
    )  # fmt: skip


def write(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, rows: Tensor, k: Tensor, v: Tensor
) -> None:
    total, K, D = k.shape
    if total == 0:
        return
    PAD = max(32, next_power_of_2(D))
    scales = [(0, 0, 0) if s is None else s.stride()[:3] for s in (k_scale, v_scale)]
    with on(k):
        _cached_write[(total,)](
            rows.contiguous(), k, v, k_cache, v_cache, k_scale, v_scale, k_cache.shape[1],
            k_cache.shape[0] * k_cache.shape[1], K, *k.stride(), *v.stride(), *k_cache.stride()[:3],
            *v_cache.stride()[:3], *scales[0], *scales[1], D=D, PAD=PAD,
            HEADS=max(1, min(next_power_of_2(K), 4096 // PAD)), QUANTIZED=k_scale is not None,
            SMALLEST=SMALLEST, enable_fp_fusion=False,
        )  # fmt: skip
