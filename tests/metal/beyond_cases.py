"""What the rooms' cases do not reach in their shaders, by room: functions of a dtype that return what a launcher gave
and what the spec says, in pairs by name. They run inside `DEVICE.use()`, under every schedule and sanitizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import support
import torch
from torch import Tensor

from riftco import functional as F
from riftco.kernels import _contract
from riftco.kernels.adam.op import adam_step
from riftco.kernels.gguf_linear.cases import random_blocks
from riftco.kernels.gguf_linear.formats import FORMATS
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


def gguf_linear(dtype: torch.dtype) -> Pairs:
    """The values of every format."""
    pairs: Pairs = {}
    for name, f in FORMATS.items():
        packed = random_blocks(name, 3 if f.block > 32 else 2, torch.Generator().manual_seed(1)).view(-1, f.bytes)
        w = F.GGUFWeight(packed, name, (len(packed), f.block))
        pairs[name] = (F.dequantize_gguf(w, dtype), lambda w=w: F.dequantize_gguf(w, dtype))
    return pairs


def lora_linear(dtype: torch.dtype) -> Pairs:
    """Strided rows; adapters of another dtype than x's, and of two. Small integers, whose products are exact."""

    def draw(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape).float()

    x, weight = draw(2, 33, 5).to(dtype).transpose(1, 2)[:, ::2], draw(13, 33).to(dtype)
    pairs: Pairs = {}
    for i, (a_dtype, b_dtype) in enumerate(((torch.float16, torch.float16), (dtype, torch.bfloat16))):
        results = []
        leaves = [x, draw(4, 33).to(a_dtype), draw(13, 4).to(b_dtype)]
        for context in (contextlib.nullcontext(), _contract.implementation("spec")):
            given = [t.detach().requires_grad_() for t in leaves]
            with context:
                y = F.lora_linear(given[0], weight, *given[1:], scale=0.25)
                results.append((y, *torch.autograd.grad(y, given, torch.ones_like(y))))
        for what, got, want in zip(("y", "d_x", "d_a", "d_b"), *results):
            pairs[f"{i}, {what}"] = (got.detach(), lambda want=want: want.detach())
    return pairs


def _norm(function, dtype: torch.dtype, *more: Tensor) -> Pairs:
    """Strided rows and gradients, weights and a residual in float32, by hand and as the spec."""
    x = torch.randn(2, 40, 6).to(dtype).transpose(1, 2)[:, ::2]
    weight, residual = torch.randn(80)[::2], torch.randn(2, 3, 40)
    upstream = torch.randn(2, 40, 3).to(dtype).transpose(1, 2)
    pairs: Pairs = {}
    for name, w, other in (("float32 weight", weight, None), ("float32 residual", weight, residual)):
        given = [t for t in (x, w, other, *more) if t is not None]
        results = []
        for impl in (None, "spec"):
            leaves = [t.detach().clone().requires_grad_() if t is not x else x.detach().requires_grad_() for t in given]
            r = leaves[2] if other is not None else None
            out = function(leaves[0], *leaves[1:2], *leaves[3 - (r is None) :], residual=r, impl=impl)
            y = out if r is None else out[0]
            results.append([y, *torch.autograd.grad(y, leaves, upstream)])
        for i, (got, want) in enumerate(zip(*results)):
            pairs[f"{name}, {i}"] = (got.detach(), lambda want=want: want.detach())
    return pairs


def rms_norm(dtype: torch.dtype) -> Pairs:
    return _norm(F.rms_norm, dtype)


def layer_norm(dtype: torch.dtype) -> Pairs:
    return _norm(F.layer_norm, dtype, torch.randn(40))


def cross_entropy(dtype: torch.dtype) -> Pairs:
    """A label that is no class; logits whose classes lie apart; 32-bit labels with a gradient of the mean."""
    x = (3 * torch.randn(9, 2, 4)).to(dtype).permute(2, 1, 0)
    pairs: Pairs = {}
    outside = torch.tensor([[3, 9], [-1, 8], [0, 50000], [4, 4]])
    for name, labels in (("outside", outside), ("rows", torch.tensor(7)), ("mean", torch.tensor(2))):
        y, results = labels.expand(4, 2).int(), []
        for impl in (None, "spec"):
            leaf = x.detach().requires_grad_()
            loss = F.cross_entropy(leaf, y, reduction="mean" if name == "mean" else "none", impl=impl)
            grads = () if name == "outside" else torch.autograd.grad(loss.sum() * 2, leaf)
            results.append((loss, *grads))
        for what, got, want in zip(("loss", "gradient"), *results):
            pairs[f"{name}, {what}"] = (got.detach(), lambda want=want: want.detach())
    return pairs


def embedding(dtype: torch.dtype) -> Pairs:
    """Ids outside give NaN and touch nothing; a table whose columns lie apart; 32-bit ids."""
    table = torch.randn(5, 4).to(dtype).t()
    ids = torch.tensor([[3, 0], [4, -1]], dtype=torch.int32)

    def want() -> Tensor:
        inside = (ids >= 0) & (ids < 4)
        return torch.where(inside.unsqueeze(-1), table[ids.clamp(0, 3).long()], torch.nan)

    return {"gathered": (F.gather_rows(table, ids), want)}


def attention(dtype: torch.dtype) -> Pairs:
    """The softmax of the materialised route: strided, expanded and single columns; -inf, +inf, NaN; rows in several
    stretches; a gradient of lse.
    """
    ops = torch.ops.riftco
    rows = (4 * torch.randn(5, 3, 70)).to(dtype)
    rows[0, 1], rows[1, :, ::2], rows[2, 0, 3], rows[3, 1, 69] = -torch.inf, -torch.inf, torch.inf, torch.nan
    upstream = torch.randn(3, 70, 5).to(dtype).permute(2, 0, 1)
    pairs: Pairs = {}
    for name, s, d in (
        ("rows", rows, upstream), ("columns", rows.permute(2, 1, 0), upstream.permute(2, 1, 0)),
        ("expanded", rows[:1].expand(4, 3, 70), upstream[:1].expand(4, 3, 70)),
        ("one key", rows[..., 4:5], upstream[..., :1]),
        ("long", (9 * torch.randn(2, 1, 900)).to(dtype), torch.randn(1, 900).to(dtype).expand(2, 1, 900)),
    ):  # fmt: skip
        p, lse = ops.attention_softmax_fwd(s, True)
        alone = ops.attention_softmax_fwd(s, False)[0]
        for what, got, i in (("p", p, 0), ("lse", lse, 1), ("p alone", alone, 0)):
            pairs[f"{name}, {what}"] = (got, lambda s=s, i=i: ops.attention_softmax_fwd(s, True)[i])
        share = p.nan_to_num(0.5, 0.5, 0.5)
        for what, more in (("d_s", None), ("d_s with lse", torch.randn(lse.shape))):
            got = ops.attention_softmax_bwd(d, more, share)
            pairs[f"{name}, {what}"] = (got, lambda d=d, m=more, p=share: ops.attention_softmax_bwd(d, m, p))
    return pairs


BEYOND = {
    f.__name__: f
    for f in (
        adam,
        attention,
        cross_entropy,
        embedding,
        gguf_linear,
        layer_norm,
        lora_linear,
        nf4,
        rms_norm,
        rope,
        swiglu,
    )
}


def check_beyond(room: str, dtype: torch.dtype, device: support.Device) -> None:
    """Raises AssertionError where a result is not the spec's."""
    with device.use(), support.poisoned():
        pairs = BEYOND[room](dtype)
    for name, (got, want) in pairs.items():
        with _contract.implementation("spec"):
            expected = want()
        torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m, n=name: f"{room}, {n}: {m}")
