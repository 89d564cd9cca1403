"""Launches csrc/metal/norm.h's kernels for rms_norm and layer_norm, by the name of the shader that includes it."""

import torch
from torch import Tensor

from ..kernels._launch import as_rows
from . import launch

SHARES = 64  # parts that the rows are cut into for the gradients of weight and bias
ROWS_EACH = 16  # of a share, at least


def forward(
    shader: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, centre: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, x + residual or nothing, mean or nothing, rstd)."""
    if residual is not None and residual.dtype != x.dtype:  # no kernel reads two dtypes: the sum is made first
        total = (x + residual).contiguous()
        y, _, mean, rstd = forward(shader, total, None, weight, bias, eps, offset, centre)
        return y.to(x.dtype), total, mean, rstd
    C, N = x.shape[-1], x.shape[:-1].numel()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(0 if residual is None else x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    mean = torch.empty(x.shape[:-1] if centre else 0, dtype=torch.float32, device=x.device)
    if N == 0 or C == 0:
        return y, total, mean.fill_(torch.nan), rstd.fill_(torch.nan)  # the mean of nothing
    weight, bias = _weights(x, weight, bias)
    rows, x_strides = _rows(x)
    other, r_strides = _rows(residual)
    launch(
        shader, f"{shader}_fwd", [x.dtype, _weight_dtype(x, weight, bias)], [y, total, mean, rstd],
        [rows, other, weight, bias],
        [*x_strides, *r_strides, *(0 if t is None else t.stride(0) for t in (weight, bias)), N, C,
         *(t is not None for t in (residual, weight, bias))],
        [eps, offset], groups=N, threads=C,
    )  # fmt: skip
    return y, total, mean, rstd


def backward(
    shader: str, d_y: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None,
    mean: Tensor | None, rstd: Tensor, offset: float, need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_x, d_weight, d_bias); what is not needed comes back empty. x is the sum where there was a residual."""
    C, N = x.shape[-1], x.shape[:-1].numel()
    d_y, d_total = d_y.to(x.dtype), None if d_total is None else d_total.to(x.dtype)
    need_weight, need_bias = need_weight and weight is not None, need_bias and bias is not None
    d_x = torch.empty(x.shape if need_x else 0, dtype=x.dtype, device=x.device)
    d_weight, d_bias = (
        torch.empty(C if need else 0, dtype=x.dtype if t is None else t.dtype, device=x.device)
        for t, need in ((weight, need_weight), (bias, need_bias))
    )
    if N == 0 or C == 0:
        return d_x, d_weight.zero_(), d_bias.zero_()
    rows, x_strides = _rows(x)
    upstream, d_strides = _rows(d_y)
    other, t_strides = _rows(d_total)
    rstd, mean = rstd.contiguous(), None if mean is None else mean.contiguous()
    used, _ = _weights(x, weight, None)
    shares = max(1, min(SHARES, N // ROWS_EACH))
    each = -(-N // shares)
    shares = -(-N // each)
    numbers = [
        *d_strides, *t_strides, *x_strides, 0 if used is None else used.stride(0), N, C, d_total is not None,
        used is not None, each, shares,
    ]  # fmt: skip
    if need_x:
        launch(
            shader, f"{shader}_bwd", [x.dtype, _weight_dtype(x, used, None)], [d_x],
            [upstream, other, rows, used, mean, rstd], numbers, [offset], groups=N, threads=C,
        )  # fmt: skip
    if need_weight or need_bias:
        parts = torch.empty(2, shares, C, dtype=torch.float32, device=x.device)
        launch(
            shader, f"{shader}_shares", [x.dtype], list(parts), [upstream, rows, mean, rstd], numbers, [offset],
            groups=-(-C // 128) * shares, threads=min(C, 128),
        )  # fmt: skip
        for out, part, need in ((d_weight, parts[0], need_weight), (d_bias, parts[1], need_bias)):
            if need:
                launch(shader, f"{shader}_add_shares", [out.dtype], [out], [part], [shares, C],
                       groups=-(-C // 128), threads=min(C, 128))  # fmt: skip
    return d_x, d_weight, d_bias


def _rows(t: Tensor | None) -> tuple[Tensor | None, list[int]]:
    """(tensor, inner, outer and inner stride, stride of a column)."""
    if t is None:
        return None, [1, 0, 0, 0]
    rows, *strides = as_rows(t)
    return rows, [*strides, rows.stride(-1)]


def _weights(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> list[Tensor | None]:
    """Both in x's dtype or both in float32, of C values at most a copy."""
    given = {t.dtype for t in (weight, bias) if t is not None}
    if given <= {x.dtype} or given == {torch.float32}:
        return [weight, bias]
    return [None if t is None else t.float() for t in (weight, bias)]


def _weight_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    given = weight if weight is not None else bias
    return x.dtype if given is None else given.dtype
