"""Rotary embedding on a CPU: in blocks of tokens that stay in the cache, in float32, written where it belongs.

Halves: one product with the cosines over the whole head, then a product and sum in place for each half. Interleaved
pairs are complex numbers, and their turn is one product.
"""

import torch
from torch import Tensor

from .._blocks import step_of
from . import spec


def forward(
    x: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, transpose: bool
) -> list[Tensor]:
    c, s = spec.angles(x[0].shape[-3], cos, sin, positions, transpose)
    R, out = 2 * c.shape[-1], [torch.empty(t.shape, dtype=t.dtype) for t in x]
    for t, o in zip(x, out):
        _turn(t[..., :R], o[..., :R], c, s, interleaved)
        o[..., R:].copy_(t[..., R:])
    return out


def inplace(x: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    c, s = spec.angles(x[0].shape[-3], cos, sin, positions, False)
    for t in x:
        turning = t[..., : 2 * c.shape[-1]]
        _turn(turning, turning, c, s, interleaved)


def _turn(x: Tensor, out: Tensor, c: Tensor, s: Tensor, interleaved: bool) -> None:
    """x [..., T, H, R] by c, s [..., T, 1, R / 2], into `out`, which may be x."""
    (*lead, T, H, R), half = x.shape, c.shape[-1]
    step = step_of(T, x.numel() // max(T, 1))
    tables = (torch.complex(c, s),) if interleaved else (torch.cat((c, c), -1), s)
    direct = x.dtype == torch.float32 and out is not x and not interleaved
    wide, turned = (None, None) if direct else (torch.empty(*lead, step, H, R) for _ in range(2))
    for source, into, *table in zip(*(t.split(step, -3) for t in (x, out, *tables))):
        a, b = (into if t is None else t.narrow(-3, 0, source.shape[-3]) for t in (wide, turned))
        if interleaved:
            torch.view_as_complex(a.copy_(source).unflatten(-1, (half, 2))).mul_(table[0])
            into.copy_(a)
            continue
        a = source if direct else a.copy_(source)
        torch.mul(a, table[0], out=b)
        b[..., :half].addcmul_(a[..., half:], table[1], value=-1)
        b[..., half:].addcmul_(a[..., :half], table[1])
        if not direct:
            into.copy_(b)
