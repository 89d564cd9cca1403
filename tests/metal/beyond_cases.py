"""What the rooms' cases do not reach in their shaders, by room: functions of a dtype that return what a launcher gave
and what the spec says, in pairs by name. They run inside `DEVICE.use()`, under every schedule and sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from riftco import functional as F

Pairs = dict[str, tuple[Tensor, Callable[[], Tensor]]]  # what came, and how the spec makes it


def nf4(dtype: torch.dtype) -> Pairs:
    q = F.quantize_nf4(torch.randn(7, 37), block_size=64)
    tail = F.quantize_nf4(torch.randn(3, 15), block_size=32)
    x = torch.randn(40, 2, 37).to(dtype).transpose(0, 1)[:, ::2]  # rows that two strides describe
    strided = torch.randn(37, 3).to(dtype).t()  # neighbours of a row lie apart
    pairs: Pairs = {"values": (F.dequantize_nf4(q, dtype), lambda: F.dequantize_nf4(q, dtype))}
    pairs["values, odd"] = (F.dequantize_nf4(tail, dtype), lambda: F.dequantize_nf4(tail, dtype))
    for name, t in (("rows", x), ("columns", strided)):
        pairs[name] = (F.nf4_linear(t, q), lambda t=t: F.nf4_linear(t, q, impl="spec"))
    return pairs


BEYOND = {"nf4": nf4}
