"""What may be passed to lora_linear: each refusal names the argument, what came and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._arguments import check_impl, floating, given, number
from .._contract import checks_enabled, same_device
from .._frozen_weight import FrozenWeight, is_frozen

MAX_RANK = 256


def check(
    x: Tensor, weights: Sequence[Tensor | FrozenWeight], biases: Sequence[Tensor | None], lora_a: Sequence[Tensor],
    lora_b: Sequence[Tensor], scales: Sequence[float], dropout_p: float, rows: Tensor | None, impl: str | None,
) -> None:  # fmt: skip
    counts = {len(weights), len(biases), len(lora_a), len(lora_b), len(scales)}
    if len(counts) > 1 or not weights:
        raise ValueError(
            f"lora_linear: a group needs one weight, bias, A, B and scale for each member; got {len(weights)} weights, "
            f"{len(biases)} biases, {len(lora_a)} lora_a, {len(lora_b)} lora_b, {len(scales)} scales"
        )
    for member in zip(weights, biases, lora_a, lora_b):
        _check_member(x, *member)
    for scale in scales:
        number("lora_linear", "scale", scale, "finite")
    number("lora_linear", "dropout_p", dropout_p, "in [0, 1]", least=0, most=1)
    if rows is not None and (not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64):
        raise ValueError(f"lora_linear: rows must be int64 [L]; got {given(rows)}")
    check_impl("lora_linear", impl)
    for weight, bias, a, b in zip(weights, biases, lora_a, lora_b):
        held = weight if isinstance(weight, Tensor) else weight.operands()[0][0]
        same_device("lora_linear", x=x, weight=held, lora_a=a, lora_b=b, bias=bias, rows=rows)
    if rows is not None and checks_enabled():
        _check_rows(rows, x.shape[:-1].numel())


def _check_member(x: Tensor, weight, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor) -> None:
    if not isinstance(weight, Tensor) and not is_frozen(weight):
        raise ValueError(f"lora_linear: weight must be a tensor or a frozen weight; got {given(weight)}")
    if len(weight.shape) != 2:
        raise ValueError(f"lora_linear: weight must be [N, C]; got {tuple(weight.shape)}")
    N, C = weight.shape
    if not floating(x) or x.dim() < 1 or x.shape[-1] != C:
        raise ValueError(f"lora_linear: x must be floating [..., {C}]; got {given(x)}")
    if isinstance(weight, Tensor) and weight.dtype != x.dtype:
        raise ValueError(f"lora_linear: weight must have x's dtype {x.dtype}; got {weight.dtype}")
    if not floating(lora_a) or lora_a.dim() != 2 or lora_a.shape[1] != C:
        raise ValueError(f"lora_linear: lora_a must be floating [R, {C}]; got {given(lora_a)}")
    R = lora_a.shape[0]
    if not 1 <= R <= MAX_RANK:
        raise ValueError(f"lora_linear: the rank must be 1..{MAX_RANK}; got {R}")
    if not floating(lora_b) or tuple(lora_b.shape) != (N, R):
        raise ValueError(f"lora_linear: lora_b must be floating ({N}, {R}); got {given(lora_b)}")
    if bias is not None and (not floating(bias) or tuple(bias.shape) != (N,)):
        raise ValueError(f"lora_linear: bias must be floating ({N},); got {given(bias)}")


def check_magnitude(magnitude: Tensor, lora_a: Tensor, lora_b: Tensor) -> None:
    for name, t, shape in (("lora_a", lora_a, "[R, C]"), ("lora_b", lora_b, "[N, R]")):
        if not floating(t) or t.dim() != 2:
            raise ValueError(f"lora_linear: {name} must be floating {shape}; got {given(t)}")
    if not floating(magnitude) or tuple(magnitude.shape) != lora_b.shape[:1]:
        raise ValueError(f"lora_linear: magnitude must be floating ({lora_b.shape[0]},); got {given(magnitude)}")
    same_device("lora_linear", lora_b=lora_b, magnitude=magnitude)


def _check_rows(rows: Tensor, M: int) -> None:
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= M):
        raise IndexError(f"lora_linear: rows must be in [0, {M}); got {int(rows.min())}..{int(rows.max())}")
    if rows.unique().numel() != rows.numel():
        raise IndexError("lora_linear: rows must be distinct")
