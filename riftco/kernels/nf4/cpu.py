"""NF4 on the CPU: a stretch of the weight at a time is decoded into a small scratch and multiplied there.

Decoding is one table look-up a byte: the table holds both float32 values of each of the 256 bytes as one int64, which
index_select copies several times faster than rows of two floats. It does so in one thread; gather, a third slower in
one, takes rows of indices in several.
"""

import torch
from torch import Tensor

from .. import _frozen
from .spec import TABLE

STEP = 1 << 19  # bytes decoded at once, a multiple of every block: few calls, and 4 MiB that a shared cache holds
SHARED_FROM = 1 << 17  # bytes from which PyTorch divides a gather among threads
LANES = 64  # rows of indices that threads divide among themselves
BYTES = torch.arange(256)
PAIRS = torch.stack((TABLE[BYTES >> 4], TABLE[BYTES & 15]), 1).view(torch.int64).view(-1)
LINES = PAIRS.expand(LANES, 256)


def forward(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, N: int, K: int, block_size: int) -> Tensor:
    def rows(lo: int, hi: int, scratch: Tensor) -> Tensor:
        return _decode_rows(codes, absmax, lo, hi, K, block_size, scratch)

    return _frozen.forward(x, bias, N, K, _frozen.cpu_scratch(x), rows, 2 * block_size)


def backward(d_y: Tensor, codes: Tensor, absmax: Tensor, N: int, K: int, block_size: int) -> Tensor:
    """Columns of W at a time where blocks do not span rows, as a sum over row blocks would round more than once."""
    if K % block_size == 0:

        def columns(lo: int, hi: int, scratch: Tensor) -> Tensor:
            packed = codes.view(N, K // 2)[:, lo // 2 : hi // 2].reshape(-1)
            scale = absmax.view(N, K // block_size)[:, lo // block_size : hi // block_size].reshape(-1)
            return _decode(packed, scale, block_size, scratch[: N * (hi - lo)]).view(N, hi - lo)

        return _frozen.backward(d_y, N, K, _frozen.cpu_scratch(d_y), columns, block_size)
    rows, dtype = d_y.reshape(d_y.shape[:-1].numel(), N), d_y.dtype
    pieces = _frozen.stretches(N, 4 * K, _frozen.cpu_scratch(d_y))
    scratch = torch.empty(max((hi - lo for lo, hi in pieces), default=0) * K + 2 * block_size, dtype=dtype)
    if len(pieces) == 1:
        d_x = rows @ _decode_rows(codes, absmax, 0, N, K, block_size, scratch)
    else:
        total = torch.zeros(rows.shape[0], K, dtype=torch.float32)
        for lo, hi in pieces:
            w = _decode_rows(codes, absmax, lo, hi, K, block_size, scratch)
            total.addmm_(rows[:, lo:hi].float(), w.float())
        d_x = total.to(dtype)
    return d_x.view(*d_y.shape[:-1], K)


def dequantize(codes: Tensor, absmax: Tensor, numel: int, block_size: int, dtype: torch.dtype) -> Tensor:
    out = _decode(codes.reshape(-1), absmax, block_size, torch.empty(2 * codes.numel(), dtype=dtype))
    return out if numel == out.numel() else out[:numel].clone()


def _decode_rows(codes: Tensor, absmax: Tensor, lo: int, hi: int, K: int, block_size: int, out: Tensor) -> Tensor:
    """W[lo:hi], decoded into `out` from the blocks that hold it: rows need not start where a block does."""
    first, last = lo * K // block_size, -(-hi * K // block_size)
    packed = codes.reshape(-1)[first * block_size // 2 : last * block_size // 2]
    values = _decode(packed, absmax[first:last], block_size, out[: 2 * packed.numel()])
    start = lo * K - first * block_size
    return values[start : start + (hi - lo) * K].view(hi - lo, K)


def _decode(packed: Tensor, absmax: Tensor, block_size: int, out: Tensor) -> Tensor:
    """uint8 [n] from the start of a block, absmax [blocks] -> [2 n] values, in `out`."""
    most = min(STEP, packed.numel())
    shared = most >= SHARED_FROM and torch.get_num_threads() > 1
    indices = torch.empty(most, dtype=torch.int64 if shared else torch.int32)
    exact = None if out.dtype == torch.float32 else torch.empty(2 * most, dtype=torch.float32)
    for lo in range(0, packed.numel(), STEP):
        source = packed[lo : lo + STEP]
        index = indices[: source.numel()].copy_(source)
        part = out[2 * lo : 2 * (lo + STEP)]
        values = part if exact is None else exact[: part.numel()]
        pairs = values.view(torch.int64)
        if shared and index.numel() % LANES == 0:
            torch.gather(LINES, 1, index.view(LANES, -1), out=pairs.view(LANES, -1))
        else:
            torch.index_select(PAIRS, 0, index, out=pairs)
        scale = absmax[2 * lo // block_size : -(-2 * (lo + STEP) // block_size)]
        full = values.numel() // block_size
        values[: full * block_size].view(full, block_size).mul_(scale[:full].unsqueeze(1))
        if full < scale.numel():
            values[full * block_size :].mul_(scale[full])
        if values is not part:
            part.copy_(values)
    return out
