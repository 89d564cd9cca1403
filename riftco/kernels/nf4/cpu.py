"""NF4 on the CPU: a block of the weight at a time is decoded into a small scratch and multiplied there.

Decoding is one table look-up a byte: the table holds both float32 values of each of the 256 bytes as one int64, which
index_select copies several times faster than rows of two floats.
"""

import torch
from torch import Tensor

from .spec import TABLE

SCRATCH_BYTES = 16 << 20  # of decoded weight held at once
STEP = 1 << 17  # bytes decoded at once, so that the float32 values stay in the cache; a multiple of every block
BYTES = torch.arange(256)
PAIRS = torch.stack((TABLE[BYTES >> 4], TABLE[BYTES & 15]), 1).view(torch.int64).view(-1)


def forward(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, N: int, K: int, block_size: int) -> Tensor:
    rows = x.reshape(x.shape[:-1].numel(), K)
    y = torch.empty(rows.shape[0], N, dtype=x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    step = _step(K, x.dtype)
    for lo in range(0, N, step):
        w = _decode_rows(codes, absmax, lo, min(lo + step, N), K, block_size, x.dtype).t()
        part = y[:, lo : lo + step]
        if bias is None:
            torch.mm(rows, w, out=part)
        else:
            torch.addmm(bias[lo : lo + step], rows, w, out=part)
    return y.view(*x.shape[:-1], N)


def backward(d_y: Tensor, codes: Tensor, absmax: Tensor, N: int, K: int, block_size: int) -> Tensor:
    """Columns of W at a time where blocks do not span rows, as a sum over row blocks would round more than once."""
    rows, dtype = d_y.reshape(d_y.shape[:-1].numel(), N), d_y.dtype
    if _step(K, dtype) >= N:
        d_x = rows @ _decode_rows(codes, absmax, 0, N, K, block_size, dtype)
    elif K % block_size == 0:
        d_x = torch.empty(rows.shape[0], K, dtype=dtype)
        step = max(1, _step(N, dtype) // block_size) * block_size
        for lo in range(0, K, step):
            hi = min(lo + step, K)
            packed = codes.view(N, K // 2)[:, lo // 2 : hi // 2].reshape(-1)
            scale = absmax.view(N, K // block_size)[:, lo // block_size : hi // block_size].reshape(-1)
            torch.mm(rows, _decode(packed, scale, block_size, dtype).view(N, hi - lo), out=d_x[:, lo:hi])
    else:
        total = torch.zeros(rows.shape[0], K, dtype=torch.float32)
        step = _step(K, torch.float32)
        for lo in range(0, N, step):
            w = _decode_rows(codes, absmax, lo, min(lo + step, N), K, block_size, dtype)
            total.addmm_(rows[:, lo : lo + step].float(), w.float())
        d_x = total.to(dtype)
    return d_x.view(*d_y.shape[:-1], K)


def dequantize(codes: Tensor, absmax: Tensor, numel: int, block_size: int, dtype: torch.dtype) -> Tensor:
    out = _decode(codes.reshape(-1), absmax, block_size, dtype)
    return out if numel == out.numel() else out[:numel].clone()


def _step(width: int, dtype: torch.dtype) -> int:
    """Lines of `width` values that fit the scratch."""
    return max(1, SCRATCH_BYTES // (max(width, 1) * dtype.itemsize))


def _decode_rows(
    codes: Tensor, absmax: Tensor, lo: int, hi: int, K: int, block_size: int, dtype: torch.dtype
) -> Tensor:
    """W[lo:hi], decoded from the blocks that hold it: rows need not start where a block does."""
    first, last = lo * K // block_size, -(-hi * K // block_size)
    packed = codes.reshape(-1)[first * block_size // 2 : last * block_size // 2]
    values = _decode(packed, absmax[first:last], block_size, dtype)
    start = lo * K - first * block_size
    return values[start : start + (hi - lo) * K].view(hi - lo, K)


def _decode(packed: Tensor, absmax: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    """uint8 [n] from the start of a block, absmax [blocks] -> [2 n] values."""
    out = torch.empty(2 * packed.numel(), dtype=dtype)
    for lo in range(0, packed.numel(), STEP):
        index = packed[lo : lo + STEP].int()
        part = out[2 * lo : 2 * (lo + STEP)]
        values = part if dtype == torch.float32 else torch.empty(part.numel(), dtype=torch.float32)
        torch.index_select(PAIRS, 0, index, out=values.view(torch.int64))
        scale = absmax[2 * lo // block_size : -(-2 * (lo + STEP) // block_size)]
        full = values.numel() // block_size
        values[: full * block_size].view(full, block_size).mul_(scale[:full].unsqueeze(1))
        if full < scale.numel():
            values[full * block_size :].mul_(scale[full])
        if values is not part:
            part.copy_(values)
    return out
