"""What rotary position embedding means, in plain torch. T tokens, H heads, D head dim, R rotary dim (R <= D)."""

import torch
from torch import Tensor


def forward(
    x: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, transpose: bool
) -> list[Tensor]:
    """Each x [..., T, H, D] with its pairs (a, b) turned to (a cos - b sin, b cos + a sin); elements from R on pass.

    cos, sin [max_position, R / 2]; positions [..., T], None for 0, 1, ..., T - 1. A pair is (i, i + R / 2), or
    (2 i, 2 i + 1) if interleaved. `transpose` applies the transposed rotation, which is the gradient's. A position
    outside the tables gives NaN.
    """
    c, s = angles(x[0].shape[-3], cos, sin, positions, transpose)
    return [_turn(t, c, s, interleaved) for t in x]


def angles(T: int, cos: Tensor, sin: Tensor, positions: Tensor | None, transpose: bool) -> tuple[Tensor, Tensor]:
    """cos and sin of each token [..., T, 1, R / 2], as `forward` turns by them."""
    if positions is None:
        c, s = cos[:T], sin[:T]
    else:
        inside = (positions >= 0) & (positions < cos.shape[0])
        index = positions.where(inside, 0).long()
        c, s = (torch.where(inside.unsqueeze(-1), table[index], torch.nan) for table in (cos, sin))
    return c.unsqueeze(-2), -s.unsqueeze(-2) if transpose else s.unsqueeze(-2)


def inplace(x: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    """As `forward`, written over x."""
    for t, turned in zip(x, forward(x, cos, sin, positions, interleaved, False)):
        t.copy_(turned)


def _turn(x: Tensor, c: Tensor, s: Tensor, interleaved: bool) -> Tensor:
    acc = torch.promote_types(x.dtype, torch.float32)
    half = c.shape[-1]
    c, s, head = c.to(acc), s.to(acc), x[..., : 2 * half].to(acc)
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else (head[..., :half], head[..., half:])
    pair = a * c - b * s, b * c + a * s
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1).contiguous()
