"""LoRA on the CPU: products in the tensors' own dtype; blocks of rows where the adapter's dtype is another one."""

import torch
from torch import Tensor

from ..nf4 import cpu as nf4
from .spec import inverse_keep

BLOCK_ROWS = 1024  # rows converted at once


def forward(
    x: Tensor, weight: Tensor, absmax: Tensor | None, block_size: int, bias: Tensor | None, lora_a: Tensor,
    lora_b: Tensor, scale: float, keep: Tensor | None, dropout_p: float, rows: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    N, C = lora_b.shape[0], lora_a.shape[1]
    D = torch.promote_types(lora_a.dtype, lora_b.dtype)
    if absmax is None:
        y = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    else:
        y = nf4.forward(x, weight, absmax, bias, N, C, block_size)
    M = x.shape[:-1].numel()
    x, out = x.reshape(M, C), y.view(M, N)
    keep = None if keep is None else keep.reshape(M, C)
    a, b = lora_a.to(D).t(), lora_b.to(D).t()
    count = M if rows is None else rows.numel()
    xa = torch.empty(count, lora_a.shape[0], dtype=D)
    for lo, hi in _blocks(count, x.dtype != D):
        pick = slice(lo, hi) if rows is None else rows[lo:hi]
        part = torch.mm(_masked(x, keep, pick).to(D), a, out=xa[lo:hi])
        if keep is not None:
            part.mul_(inverse_keep(keep, dropout_p))
        out[pick] = _add(out[pick], part, b, scale)
    return y, xa


def backward(
    d_y: Tensor, x: Tensor | None, weight: Tensor, absmax: Tensor | None, block_size: int, lora_a: Tensor,
    lora_b: Tensor, xa: Tensor | None, scale: float, keep: Tensor | None, dropout_p: float, rows: Tensor | None,
    need_x: bool, need_w: bool, need_a: bool, need_b: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    N, C, R = lora_b.shape[0], lora_a.shape[1], lora_a.shape[0]
    D = torch.promote_types(lora_a.dtype, lora_b.dtype)
    M = d_y.shape[:-1].numel()
    up = d_y.reshape(M, N)
    x = None if x is None else x.reshape(M, C)
    keep = None if keep is None else keep.reshape(M, C)
    a, b = lora_a.to(D), lora_b.to(D)
    inverse = inverse_keep(keep, dropout_p)
    d_x = d_w = d_y.new_empty(0)
    if need_x:
        d_x = (up @ weight) if absmax is None else nf4.backward(up, weight, absmax, N, C, block_size)
    if need_w:
        assert x is not None
        d_w = torch.mm(up.t(), x)
    d_a = torch.zeros(R, C) if need_a else d_y.new_empty(0)
    d_b = torch.zeros(N, R) if need_b else d_y.new_empty(0)
    count = M if rows is None else rows.numel()
    for lo, hi in _blocks(count, d_y.dtype != D):
        pick = slice(lo, hi) if rows is None else rows[lo:hi]
        part = up[pick].to(D)
        if need_b:
            assert xa is not None
            d_b.add_(part.t() @ xa[lo:hi], alpha=scale)
        if not (need_x or need_a):
            continue
        g = part @ b
        if need_a:
            assert x is not None
            d_a.add_(g.t() @ _masked(x, keep, pick).to(D), alpha=scale * inverse)
        if need_x and keep is None:
            d_x[pick] = _add(d_x[pick], g, a, scale)
        elif need_x:
            assert keep is not None
            delta = (g @ a).to(torch.float32).mul_(scale * inverse).masked_fill_(~keep[pick], 0.0)
            d_x[pick] = (d_x[pick] + delta).to(d_x.dtype)
    if need_x:
        d_x = d_x.view(*d_y.shape[:-1], C)
    return d_x, d_w, d_a.to(lora_a.dtype) if need_a else d_a, d_b.to(lora_b.dtype) if need_b else d_b


def _blocks(count: int, converts: bool) -> list[tuple[int, int]]:
    step = BLOCK_ROWS if converts else max(count, 1)
    return [(lo, min(lo + step, count)) for lo in range(0, count, step)]


def _masked(x: Tensor, keep: Tensor | None, pick) -> Tensor:
    return x[pick] if keep is None else x[pick].masked_fill(~keep[pick], 0.0)


def _add(out: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """out + scale * left right, in place where the dtypes are the same; rounded once otherwise."""
    if out.dtype == left.dtype:
        return out.addmm_(left, right, alpha=scale)
    return torch.add(out.float(), (left @ right).float(), alpha=scale).to(out.dtype)
