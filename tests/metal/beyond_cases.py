"""What the rooms' cases do not reach in their shaders, by room: functions of a dtype that return what a launcher gave
and what the spec says, in pairs by name. They run inside `DEVICE.use()`, under every schedule and sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from riftco import functional as F
from riftco.kernels.adam.op import adam_step
from riftco.kernels.rope.tables import rope_tables

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


def rope(dtype: torch.dtype) -> Pairs:
    """In place, positions in 32 bits and outside the tables, q and k of two dtypes, strided heads."""
    cos, sin = rope_tables(6, 9)
    positions = torch.tensor([3, -1, 9, 0, 8], dtype=torch.int32)
    q, k = torch.randn(2, 5, 8, 3).to(dtype).transpose(2, 3), torch.randn(2, 5, 1, 6)

    def want() -> tuple[Tensor, Tensor]:
        return F.rope(q, k, cos, sin, positions=positions, impl="spec")

    turned = F.rope(q, k, cos, sin, positions=positions)
    over = q.clone(), k.to(dtype, copy=True)
    F.rope(*over, cos, sin, positions=positions, inplace=True)
    pairs: Pairs = {"q": (turned[0], lambda: want()[0]), "k": (turned[1], lambda: want()[1])}
    pairs["in place"] = (over[0], lambda: want()[0])
    none = torch.empty(2, 5, 0, 8, dtype=dtype)
    pairs["no keys"] = (F.rope(q, none, cos, sin)[0], lambda: F.rope(q, none, cos, sin, impl="spec")[0])
    return pairs


def swiglu(dtype: torch.dtype) -> Pairs:
    """Two dtypes, halves of one tensor, NaN and numbers far out."""
    fused = torch.randn(4, 3, 34).to(dtype)
    gate, up = fused.chunk(2, -1)
    odd = torch.tensor([torch.nan, 3.0, 1e4, -1e4, -0.0, 0.5] * 3)[:17].to(dtype).expand(4, 3, 17)
    pairs: Pairs = {}
    for name, g, u in (("halves", gate, up), ("two dtypes", gate.float(), up), ("far out", odd, up)):
        for act in (F.swiglu, F.geglu):
            pairs[f"{name}, {act.__name__}"] = (act(g, u), lambda act=act, g=g, u=u: act(g, u, impl="spec"))
    return pairs


def adam(dtype: torch.dtype) -> Pairs:
    """A float32 gradient of a narrower parameter, a transposed one, and a chunk for each of several threadgroups."""
    pairs: Pairs = {}
    for name, shape, grad_dtype in (
        ("mixed", (5, 7), torch.float32),
        ("small", (3,), dtype),
        ("long", (33000,), dtype),
    ):
        p, g = torch.randn(shape).to(dtype).t(), 0.3 * torch.randn(shape).to(grad_dtype).t()
        state = [0.1 * torch.rand_like(p, dtype=torch.float32), 0.1 * torch.rand_like(p, dtype=torch.float32)]
        results = []
        for impl in (None, "spec"):
            made = [p.clone(), *(t.clone() for t in state)]
            total, _ = adam_step(
                made[:1], [g], made[1:2], made[2:], [torch.ones(())], lr=0.05, gradient_clip=0.5, impl=impl
            )
            results.append([total, *made])
        for what, got, want in zip(("norm", "p", "m", "v"), *results):
            pairs[f"{name}, {what}"] = (got, lambda want=want: want)
    return pairs


BEYOND = {"adam": adam, "nf4": nf4, "rope": rope, "swiglu": swiglu}
