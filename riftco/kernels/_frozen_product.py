"""The op of a linear layer over a frozen weight, one definition for every format: schemas, shapes, gradient, checks.

_frozen_weight.py states the rule that the schemas follow. Torch-only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ._arguments import check_impl, floating, given
from ._contract import Function, autocast, define, needs_grad, once_differentiable, same_device
from ._frozen_weight import FrozenWeight
from ._recompute import unread, unwritten


class Product(NamedTuple):
    fwd: torch._ops.OpOverload  # (x, *tensors, bias, *texts, *integers) -> y
    bwd: torch._ops.OpOverload  # (d_y, *tensors, *texts, *integers) -> d_x
    apply: Callable[..., Tensor]  # fwd with its gradient
    meaning: Callable[..., Tensor]  # fwd in plain torch


def define_product(
    name: str, here: str, meaning: Callable, launchers: Mapping[str, str], tensors: str, rest: str
) -> Product:
    """Define ``riftco::<name>_fwd`` and ``riftco::<name>_bwd``.

    Args:
        here: the room, whose spec.py and route.py are asked.
        meaning: its spec.forward.
        launchers: device type -> module.
        tensors: what the format holds, as a schema has it.
        rest: texts and integers behind, SymInt N and SymInt K among them.
    """
    count, names = tensors.count("Tensor"), [part.split()[-1] for part in rest.split(", ")]
    n, k = names.index("N"), names.index("K")

    def made(suffix: str, function: str, schema: str, fake: Callable) -> torch._ops.OpOverload:
        return define(
            f"{name}_{suffix}",
            schema,
            fake=fake,
            spec=f"{here}.spec:{function}",
            launchers={device: f"{module}:{function}" for device, module in launchers.items()},
            routes=f"{here}.route:{function}_routes",
        )

    fwd = made(
        "fwd",
        "forward",
        f"(Tensor x, {tensors}, Tensor? bias, {rest}) -> Tensor",
        lambda x, *args: x.new_empty((*x.shape[:-1], args[count + 1 + n])),
    )
    bwd = made(
        "bwd",
        "backward",
        f"(Tensor d_y, {tensors}, {rest}) -> Tensor",
        lambda d_y, *args: d_y.new_empty((*d_y.shape[:-1], args[count + k])),
    )

    class FrozenProduct(Function):
        """The weight is frozen, so nothing but its bytes is needed again: x is never saved."""

        @staticmethod
        def forward(*args):
            if unread():
                return unwritten(args[0], args[count + 2 + n])
            return fwd(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            bias, ctx.rest = inputs[1 + count], inputs[2 + count :]
            ctx.bias_dtype = None if bias is None else bias.dtype
            if ctx.needs_input_grad[0]:
                ctx.save_for_backward(*inputs[1 : 1 + count])

        @staticmethod
        @once_differentiable
        def backward(ctx, d_y):
            d_x = bwd(d_y, *ctx.saved_tensors, *ctx.rest) if ctx.needs_input_grad[0] else None
            d_bias = bias_gradient(d_y, ctx.bias_dtype) if ctx.needs_input_grad[1 + count] else None
            return d_x, *[None] * count, d_bias, *[None] * len(ctx.rest)

    return Product(fwd, bwd, FrozenProduct.apply, meaning)


def linear(
    name: str, product: Product, x: Tensor, argument: str, weight: FrozenWeight, bias: Tensor | None, impl: str | None
) -> Tensor:
    """y = x W^T + bias through `product`, checked; `argument` is what function `name` calls the weight."""
    x, bias = autocast(x, bias)
    if len(weight.shape) != 2:
        raise ValueError(f"{name}: {argument} must have shape (N, K); got {tuple(weight.shape)}")
    N, K = weight.shape
    if not floating(x) or x.dim() < 1 or x.shape[-1] != K:
        raise ValueError(f"{name}: x must be floating [..., {K}]; got {given(x)}")
    if bias is not None and (not floating(bias) or tuple(bias.shape) != (N,)):
        raise ValueError(f"{name}: bias must be floating ({N},); got {given(bias)}")
    check_impl(name, impl)
    tensors, integers = weight.operands()
    same_device(name, x=x, **{argument: tensors[0]}, bias=bias)
    args = (x, *tensors, bias, *weight.kind.split(":")[1:], *integers)
    if impl == "spec":
        return product.meaning(*args)
    return product.apply(*args) if needs_grad(x, bias) else product.fwd(*args)


def bias_gradient(d_y: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of d_y [..., N] over its rows, in float32 at least, rounded once to the bias's dtype."""
    acc = torch.promote_types(d_y.dtype, torch.float32)
    rows = d_y.unsqueeze(0)  # summed over no dimension at all, a single vector would give a scalar
    return rows.sum(tuple(range(rows.dim() - 1)), dtype=acc).to(dtype)
