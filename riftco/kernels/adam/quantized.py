"""Moments as 8-bit codes: blocks of 256 elements, each with a float32 scale, through dynamic maps of 256 values."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 256
SMALLEST = 4096  # tensors of fewer elements keep float32 moments, as bitsandbytes does


def page_bytes(page_size: int) -> int:
    """One page: codes of m, codes of v, scales of m, scales of v."""
    return 2 * page_size + 8 * (page_size // BLOCK)


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """256 ascending values: 0, 1 and in decade 10^(i - 6), i = 0..6, 2^i magnitudes of each sign or 2^(i + 1)."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32)
        magnitudes = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += magnitudes.tolist() + ((-magnitudes).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


@functools.lru_cache(maxsize=64)
def tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the 256 values, the 255 points halfway between them) on a device."""
    values = dynamic_map(signed)
    bounds = (values[:-1] + values[1:]) / 2
    return values.to(device), bounds.to(device)


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """uint8 [blocks, 256] and float32 [blocks] -> float32 [blocks, 256]."""
    return tables(signed, codes.device)[0][codes.int()] * scales.unsqueeze(1)


def encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """float32 [blocks, 256] -> (codes of the nearest values of x / scale, scales: the largest magnitudes)."""
    scales = x.abs().amax(1)
    ratio = x / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
    return torch.bucketize(ratio, tables(signed, x.device)[1], out_int32=True).to(torch.uint8), scales


def encoded(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """`encode` of a flat tensor of any length."""
    codes, scales = encode(torch.nn.functional.pad(x.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK), signed)
    return codes.view(-1)[: x.numel()], scales


def decoded(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The inverse of `encoded`."""
    blocks = torch.nn.functional.pad(codes, (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    return decode(blocks, scales.to(codes.device), signed).view(-1)[: codes.numel()]


def parts(rows: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views into pages [rows, bytes]: (codes of m, codes of v, scales of m, scales of v), a row each."""
    blocks = page_size // BLOCK
    scales = rows[:, 2 * page_size :].view(torch.float32)
    return rows[:, :page_size], rows[:, page_size : 2 * page_size], scales[:, :blocks], scales[:, blocks:]


def update(
    p: Tensor, grad: Tensor, rows: Tensor, page_size: int, committed: Tensor, dense: Callable[..., None]
) -> None:
    """Decode the moments of consecutive elements from their pages, update by `dense`, encode them unless refused.

    The last page may be filled in part: what lies behind the last element stays zero.
    """
    codes_m, codes_v, scales_m, scales_v = parts(rows, page_size)
    m = decode(codes_m.reshape(-1, BLOCK), scales_m.reshape(-1), signed=True)
    v = decode(codes_v.reshape(-1, BLOCK), scales_v.reshape(-1), signed=False)
    dense(p, grad, m.view(-1)[: p.numel()], v.view(-1)[: p.numel()])
    for x, codes, scales, signed in ((m, codes_m, scales_m, True), (v, codes_v, scales_v, False)):
        code, scale = encode(x, signed)
        codes.copy_(torch.where(committed, code.view(codes.shape), codes))
        scales.copy_(torch.where(committed, scale.view(scales.shape), scales))
