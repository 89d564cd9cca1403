"""NF4 in Triton: for few rows the weight is decoded inside the product, for many into a small scratch; see route.py."""

import torch
from torch import Tensor

from ... import _frozen
from .. import route as routes
from . import few, general, scratch

COLUMNS = 64  # stretches of columns are whole groups of codes


def forward(
    x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, N: int, K: int, block_size: int,
    onto: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r = routes.route(x.shape[:-1].numel(), N, K, block_size, x.dtype)
    codes, absmax = codes.contiguous(), absmax.contiguous()
    if r.name == "scratch":

        def rows(lo: int, hi: int, room: Tensor) -> Tensor:
            out = room.as_strided((hi - lo, K), (K, 1))
            return scratch.decode(codes, absmax, lo, 0, K, block_size, out)

        return _frozen.forward(x, bias, N, K, routes.SCRATCH_BYTES, rows, onto=onto)
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    if y.numel():
        kernel = {"row": few.row, "few": few.forward, "general": general.forward}[r.name]
        kernel(x, codes, absmax, None if bias is None else bias.contiguous(), y, block_size, r)
    return y if onto is None else onto.add_(y)


def backward(
    d_y: Tensor, codes: Tensor, absmax: Tensor, N: int, K: int, block_size: int, onto: Tensor | None = None
) -> Tensor:
    r = routes.route(d_y.shape[:-1].numel(), N, K, block_size, d_y.dtype, backward=True)
    codes, absmax = codes.contiguous(), absmax.contiguous()
    if r.name == "scratch":

        def columns(lo: int, hi: int, room: Tensor) -> Tensor:
            out = room.as_strided((N, hi - lo), (hi - lo, 1))
            return scratch.decode(codes, absmax, 0, lo, K, block_size, out)

        return _frozen.backward(d_y, N, K, routes.SCRATCH_BYTES, columns, COLUMNS, onto)
    d_x = torch.empty(*d_y.shape[:-1], K, dtype=d_y.dtype, device=d_y.device)
    if d_x.numel():
        kernel = few.backward if r.name == "few" else general.backward
        kernel(d_y, codes, absmax, d_x, block_size, r)
    return d_x if onto is None else onto.add_(d_x)


def dequantize(codes: Tensor, absmax: Tensor, numel: int, block_size: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(1, numel, dtype=dtype, device=codes.device)
    return scratch.decode(codes.contiguous(), absmax.contiguous(), 0, 0, numel, block_size, out)[0]
