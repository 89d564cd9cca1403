"""The second stage of a product whose reduction was cut: partial sums in float32, added in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import cdiv, on

BLOCK = 512


@triton.jit
def _join(
    parts_ptr, bias_ptr, y_ptr, count, N, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y[e] = sum over s of parts[s, e] (+ bias[e % N])."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = e < count
    total = tl.load(parts_ptr + e, mask=live, other=0.0)
    for s in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + s * count + e, mask=live, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + e % N, mask=live, other=0.0).to(tl.float32)
    tl.store(y_ptr + e, total, mask=live)


def parts_for(y: Tensor, splits: int) -> Tensor:
    """Where the first stage writes: float32 [splits, *y.shape], or y itself where nothing is cut."""
    return y if splits == 1 else torch.empty(splits, *y.shape, dtype=torch.float32, device=y.device)


def join(parts: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """Adds the parts, and `bias` [N] to every row, into y [..., N], contiguous."""
    with on(y):
        _join[(cdiv(y.numel(), BLOCK),)](
            parts, bias, y, y.numel(), y.shape[-1], SPLITS=parts.shape[0], HAS_BIAS=bias is not None, BLOCK=BLOCK,
        )  # fmt: skip
