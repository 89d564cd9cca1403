"""The contract of linear layers with LoRA adapters: schemas, shapes, devices, gradient. Imports no kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._arguments import flags
from .._contract import Function, autocast, define, needs_grad, once_differentiable
from .._frozen_product import bias_gradient
from .._frozen_weight import DENSE, FrozenWeight
from .._recompute import unread, unwritten
from . import spec
from .base import dtypes, pack
from .checks import check, check_magnitude
from .dora import rescale, weight_norm

HERE = "riftco.kernels.lora_linear"
LAUNCHERS = {"cpu": f"{HERE}.cpu", "cuda": f"{HERE}.cuda", "mps": "riftco.metal.lora_linear", "xla": f"{HERE}.plain"}
BASES = "str[] kinds, Tensor[] weights, SymInt[] sizes"
DROPOUT = "Tensor? seed, float dropout_p, Tensor? rows"


def _fake_fwd(x, kinds, weights, sizes, biases, lora_a, lora_b, scales, seed, dropout_p, rows):
    M = x.shape[:-1].numel() if rows is None else rows.shape[0]
    D, _ = dtypes(x, lora_a, lora_b)
    ys = [x.new_empty((*x.shape[:-1], b.shape[0])) for b in lora_b]
    return ys, x.new_empty((M, sum(a.shape[0] for a in lora_a)), dtype=D)


def _fake_bwd(
    d_ys, x, kinds, weights, sizes, lora_a, lora_b, xa, scales, seed, dropout_p, rows, need_x, need_w, need_a, need_b
):
    d_y, C = d_ys[0], lora_a[0].shape[1]
    acc = dtypes(d_y, lora_a, lora_b)[1]
    d_x = d_y.new_empty((*d_y.shape[:-1], C) if need_x else 0)
    d_ws = [t.new_empty((t.shape[-1], C) if need else 0) for t, need in zip(d_ys, need_w)]
    count = need_a * sum(a.numel() for a in lora_a) + need_b * sum(b.numel() for b in lora_b)
    return d_x, d_ws, d_y.new_empty(count, dtype=acc)


fwd = define(
    "lora_linear_fwd",
    f"(Tensor x, {BASES}, Tensor?[] biases, Tensor[] lora_a, Tensor[] lora_b, float[] scales, {DROPOUT})"
    " -> (Tensor[] ys, Tensor xa)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={device: f"{module}:forward" for device, module in LAUNCHERS.items()},
    routes=f"{HERE}.route:routes",
)
bwd = define(
    "lora_linear_bwd",
    f"(Tensor[] d_ys, Tensor? x, {BASES}, Tensor[] lora_a, Tensor[] lora_b, Tensor? xa, float[] scales, {DROPOUT},"
    " bool need_x, bool[] need_w, bool need_a, bool need_b) -> (Tensor d_x, Tensor[] d_ws, Tensor d_adapters)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={device: f"{module}:backward" for device, module in LAUNCHERS.items()},
    routes=f"{HERE}.route:routes",
)


class LoRAGroup(Function):
    """x is saved once for all members, beside the small x A^T; the dropout mask is drawn again in the backward."""

    @staticmethod
    def forward(x, kinds, sizes, counts, scales, seed, dropout_p, rows, *tensors):
        weights, biases, lora_a, lora_b = _members(len(kinds), tensors)
        if unread():  # only x A^T is kept: that of layers without outputs
            n, nothing = len(kinds), x.new_empty(0, x.shape[-1])
            bs = [b[:0] for b in lora_b]
            _, xa = fwd(x, [DENSE] * n, [nothing] * n, [], [None] * n, lora_a, bs, scales, seed, dropout_p, rows)
            return *(unwritten(x, len(b)) for b in lora_b), xa
        ys, xa = fwd(x, kinds, weights, sizes, biases, lora_a, lora_b, scales, seed, dropout_p, rows)
        return *ys, xa

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.kinds, ctx.sizes, ctx.counts, ctx.scales, seed, ctx.dropout_p, rows, *tensors = inputs
        ctx.set_materialize_grads(False)  # there would be zeros for x A^T in every backward
        weights, biases, lora_a, lora_b = _members(len(ctx.kinds), tensors)
        need_w, _, need_a, need_b = _members(len(ctx.kinds), ctx.needs_input_grad[8:])
        ctx.mark_non_differentiable(output[-1])
        ctx.bias_dtypes = [None if t is None else t.dtype for t in biases]
        ctx.save_for_backward(
            x if any(need_w) or any(need_a) else None, output[-1] if any(need_b) else None, seed, rows,
            *weights, *lora_a, *lora_b,
        )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx, *d_outputs):
        members = len(ctx.kinds)
        if all(t is None for t in d_outputs[:members]):
            return (None,) * len(ctx.needs_input_grad)
        x, xa, seed, rows, *tensors = ctx.saved_tensors
        weights, lora_a, lora_b = tensors[: -2 * members], tensors[-2 * members : -members], tensors[-members:]
        d_ys, need_x = _whole(d_outputs[:members], lora_b), ctx.needs_input_grad[0]
        need_parts, need_bias, need_a, need_b = _members(members, ctx.needs_input_grad[8:])
        starts = [sum(ctx.counts[:i]) for i in range(members)]
        need_w = [need_parts[i] for i in starts]  # of several tensors none learns
        d_x, d_ws, flat = bwd(
            d_ys, x, ctx.kinds, weights, ctx.sizes, lora_a, lora_b, xa, ctx.scales, seed, ctx.dropout_p, rows,
            need_x, need_w, any(need_a), any(need_b),
        )  # fmt: skip
        grads_w: list = [None] * len(weights)
        for i, d_w, need in zip(starts, d_ws, need_w):
            grads_w[i] = d_w if need else None
        grads_bias = [bias_gradient(d, t) if n else None for d, t, n in zip(d_ys, ctx.bias_dtypes, need_bias)]
        adapters = _pieces(flat, lora_a, lora_b, need_a, need_b)
        return d_x if need_x else None, *[None] * 7, *grads_w, *grads_bias, *adapters


def _members(n: int, tensors) -> tuple[list, list, list, list]:
    """What stands flat, for all members: the weights' tensors, the biases, A, B."""
    tensors = list(tensors)
    return tensors[: -3 * n], tensors[-3 * n : -2 * n], tensors[-2 * n : -n], tensors[-n:]


def _whole(d_ys: Sequence[Tensor | None], lora_b: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of all outputs: zeros of those that nothing was computed from."""
    like = next(t for t in d_ys if t is not None)
    return [like.new_zeros((*like.shape[:-1], b.shape[0])) if t is None else t for t, b in zip(d_ys, lora_b)]


def _pieces(flat: Tensor, lora_a: list[Tensor], lora_b: list[Tensor], need_a: list, need_b: list) -> list:
    """The gradients of A, then of B, out of one buffer: in the parameters' dtypes, cast at once where those agree."""
    there = [*(lora_a if any(need_a) else ()), *(lora_b if any(need_b) else ())]
    if len({t.dtype for t in there}) == 1:
        flat = flat.to(there[0].dtype)
    pieces = [p.view(t.shape) for p, t in zip(flat.split([t.numel() for t in there]), there)]
    pieces = [p if p.dtype == t.dtype else p.to(t.dtype) for p, t in zip(pieces, there)]
    missing = [None] * len(lora_a)
    grads_a = pieces[: len(lora_a)] if any(need_a) else missing
    grads_b = pieces[-len(lora_b) :] if any(need_b) else missing
    return [p if n else None for p, n in zip((*grads_a, *grads_b), (*need_a, *need_b))]


def lora_linear_group(
    x: Tensor,
    weights: Sequence[Tensor | FrozenWeight],
    lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor],
    *,
    scales: Sequence[float],
    biases: Sequence[Tensor | None] | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    rows: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, ...]:
    """Linear layers with LoRA adapters over one x (q, k, v; gate, up) as one call, which keeps x once.

    y_i = x W_i^T + bias_i + scale_i * dropout(x) A_i^T B_i^T; d_x is the sum over the members, rounded once, or on
    cuda, for more than 64 rows, once for each member that is added.

    Args:
        x, rows, dropout_p, training, impl: as in `lora_linear`. The mask of dropout belongs to x: all members share it.
        weights, lora_a, lora_b, scales, biases: one for each member, as in `lora_linear`. Sizes, ranks and formats of
            the weights may differ between members; the adapters compute in the widest dtype among them.

    Returns:
        One [..., N_i] in x's dtype for each member.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        IndexError: with RIFTCO_CHECK=1, rows outside or twice.

    Devices, numerics and source: as `lora_linear`.
    """
    flags("lora_linear", training=training)
    members = len(weights)
    biases = [None] * members if biases is None else biases
    dense = [w if isinstance(w, Tensor) else None for w in weights]
    cast = autocast(x, *dense, *biases, *lora_a, *lora_b)
    x, dense, biases, lora_a, lora_b = cast[0], *(list(cast[1 + i * members : 1 + (i + 1) * members]) for i in range(4))
    held = [w if d is None else d for w, d in zip(weights, dense)]
    check(x, held, biases, lora_a, lora_b, scales, dropout_p, rows, impl)
    kinds, tensors, sizes, counts = pack(held)
    seed = torch.randint(1 << 62, (1,), device=x.device) if training and dropout_p > 0 else None
    scales, options = [float(s) for s in scales], (seed, float(dropout_p), rows)
    if impl != "spec" and needs_grad(x, *tensors, *biases, *lora_a, *lora_b):
        return LoRAGroup.apply(x, kinds, sizes, counts, scales, *options, *tensors, *biases, *lora_a, *lora_b)[:-1]
    run = spec.forward if impl == "spec" else fwd
    return tuple(run(x, kinds, tensors, sizes, biases, lora_a, lora_b, scales, *options)[0])


def lora_linear(
    x: Tensor,
    weight: Tensor | FrozenWeight,
    lora_a: Tensor,
    lora_b: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    magnitude: Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    rows: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """A linear layer and its LoRA adapter.

    y = x W^T + bias + scale * dropout(x) A^T B^T. With g = d_y B: d_x = d_y W + scale * dropout'(g A),
    d_A = scale * g^T dropout(x), d_B = scale * d_y^T (dropout(x) A^T).

    Args:
        x: [..., C], float16/bfloat16/float32/float64, any strides. Differentiable; saved once, where A or W learns.
        weight: [N, C] in x's dtype, differentiable; or a frozen one of shape (N, C) in a format of its own, as
            NF4Weight.
        lora_a: [R, C] floating, R = 1..256. Differentiable.
        lora_b: [N, R] floating. Differentiable.
        scale: alpha / R, or alpha / sqrt(R) for rsLoRA; the caller's choice.
        bias: [N], cast to x's dtype. Differentiable.
        magnitude: [N] floating: DoRA. Each output feature is multiplied by magnitude / ||W + scale * B A|| of its row
            before the bias; the norm is a constant to the gradient, as in PEFT. Differentiable. Unlike in PEFT,
            dropout hides x from the adapter alone, never from W.
        dropout_p: probability that an element of x is hidden from the adapter, in training. The mask is a function of
            (seed, row, feature), the same on every device; the seed is drawn from torch's generator of the device.
        training: False switches the dropout off.
        rows: int64 [L], distinct indices into the flattened leading dimensions: the adapter's part is added to these
            rows only, and every other row keeps the base's bytes (with RIFTCO_CHECK=1: verified).
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        [..., N] in x's dtype. Under autocast x, W, bias, A and B are cast first.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        IndexError: with RIFTCO_CHECK=1, rows outside or twice.

    Devices: cpu, cuda (Triton; a dense base product is cuBLAS), mps (Metal; a dense base product is
        PyTorch's), xla (plain torch).
    Numerics: the adapter's products run in the wider dtype of A and B (float32 adapters on bfloat16 rows: float32, as
        in PEFT), with float32 accumulation; base and adapter are added in float32 and rounded to x's dtype, after one
        of them was rounded to it (on cuda the adapter's part, for more than 64 rows, else the base's); gradients of A
        and B are accumulated in float32 and rounded once to the parameter's dtype. DoRA's norm is float32, from
        rows of W decoded a few at a time. Deterministic.
    Source: Hu et al. 2021, "LoRA", equation 3; Kalajdzievski 2023, "rsLoRA"; Liu et al. 2024, "DoRA", equation 5.
    """
    options: dict = dict(dropout_p=dropout_p, training=training, impl=impl)
    if magnitude is None:
        members: tuple = ([weight], [lora_a], [lora_b])
        return lora_linear_group(x, *members, scales=[scale], biases=[bias], rows=rows, **options)[0]
    check_magnitude(magnitude, lora_a, lora_b)
    if rows is not None:  # a layer over the rows that are listed, in a copy of what the others have of the base
        still = lora_a.detach(), lora_b.detach()
        base = lora_linear(x, weight, *still, scale=scale, bias=bias, rows=rows[:0], impl=impl)
        lines = x.reshape(x.shape[:-1].numel(), x.shape[-1])[rows]
        part = lora_linear(lines, weight, lora_a, lora_b, scale=scale, bias=bias, magnitude=magnitude, **options)
        return base.view(-1, base.shape[-1]).index_copy(0, rows, part).view(base.shape)
    z = lora_linear(x, weight, lora_a, lora_b, scale=scale, **options)
    return rescale(z, magnitude / weight_norm(weight, lora_a, lora_b, scale), bias, impl=impl)
