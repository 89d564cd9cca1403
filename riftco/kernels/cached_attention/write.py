"""Writing rows into a cache, in plain torch: the meaning, and what CPUs run."""

import torch
from torch import Tensor

from .spec import BLOCK

SMALLEST = 2.0**-126  # below, 1 / scale may overflow; such a scale is 0 in float16 anyway


def quantize_q8_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., D] -> codes [.., D] int8, scale [.., D / 32] float16, with GGUF's arithmetic in float32.

    scale = max|x| / 127; code = x * (1 / scale) rounded half away from zero, by the scale before it is rounded to
    float16. A block whose scale is 0, inf or NaN has codes 0.
    """
    blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1) / torch.full((), 127.0, device=x.device)  # a Python number may become x * (1 / 127)
    usable = (scale >= SMALLEST) & (scale < torch.inf)
    ratio = blocks * torch.where(usable, 1.0 / scale, 0.0).unsqueeze(-1)
    ratio = ratio.masked_fill(~usable.unsqueeze(-1), 0.0)
    size = ratio.abs()
    whole = size.floor()
    codes = (whole + ((size - whole) * 2).floor()).clamp_(max=127.0) * ratio.sign()  # torch_xla has no copysign
    return codes.to(torch.int8).flatten(-2), scale.to(torch.float16)


def write(
    k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, rows: Tensor, k: Tensor, v: Tensor
) -> None:
    keep = (rows >= 0) & (rows < k_cache.shape[0] * k_cache.shape[1])
    at = rows[keep].long()
    page, row = at // k_cache.shape[1], at % k_cache.shape[1]
    for cache, scale, x in ((k_cache, k_scale, k[keep]), (v_cache, v_scale, v[keep])):
        if scale is None:
            cache[page, row] = x.to(cache.dtype)
        else:
            cache[page, row], scale[page, row] = quantize_q8_0(x)
