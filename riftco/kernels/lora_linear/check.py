"""What may be passed to lora_linear: each refusal names the argument, what came and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"lora_linear: dropout_p must be in [0, 1]; got {dropout_p}")
    if rows is not None and (rows.dim() != 1 or rows.dtype != torch.int64):
        raise ValueError(f"lora_linear: rows must be int64 [L]; got {rows.dtype} {tuple(rows.shape)}")
    if impl not in (None, "spec"):
        raise ValueError(f"lora_linear: impl must be None or 'spec'; got {impl!r}")
    for weight, bias, a, b in zip(weights, biases, lora_a, lora_b):
        held = weight if isinstance(weight, Tensor) else weight.operands()[0][0]
        same_device("lora_linear", x=x, weight=held, lora_a=a, lora_b=b, bias=bias, rows=rows)
    if rows is not None and checks_enabled():
        _check_rows(rows, x.shape[:-1].numel())


def _check_member(x: Tensor, weight, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor) -> None:
    if not isinstance(weight, Tensor) and not is_frozen(weight):
        raise ValueError(f"lora_linear: weight must be a tensor or a frozen weight; got {type(weight).__name__}")
    if len(weight.shape) != 2:
        raise ValueError(f"lora_linear: weight must be [N, C]; got {tuple(weight.shape)}")
    N, C = weight.shape
    if x.dim() < 1 or not x.is_floating_point() or x.shape[-1] != C:
        raise ValueError(f"lora_linear: x must be floating [..., {C}]; got {x.dtype} {tuple(x.shape)}")
    if isinstance(weight, Tensor) and weight.dtype != x.dtype:
        raise ValueError(f"lora_linear: weight must have x's dtype {x.dtype}; got {weight.dtype}")
    if lora_a.dim() != 2 or lora_a.shape[1] != C or not lora_a.is_floating_point():
        raise ValueError(f"lora_linear: lora_a must be floating [R, {C}]; got {lora_a.dtype} {tuple(lora_a.shape)}")
    R = lora_a.shape[0]
    if not 1 <= R <= MAX_RANK:
        raise ValueError(f"lora_linear: the rank must be 1..{MAX_RANK}; got {R}")
    if tuple(lora_b.shape) != (N, R) or not lora_b.is_floating_point():
        raise ValueError(f"lora_linear: lora_b must be floating ({N}, {R}); got {lora_b.dtype} {tuple(lora_b.shape)}")
    if bias is not None and (tuple(bias.shape) != (N,) or not bias.is_floating_point()):
        raise ValueError(f"lora_linear: bias must be floating ({N},); got {bias.dtype} {tuple(bias.shape)}")


def check_magnitude(magnitude: Tensor, lora_b: Tensor) -> None:
    if tuple(magnitude.shape) != lora_b.shape[:1] or not magnitude.is_floating_point():
        raise ValueError(
            f"lora_linear: magnitude must be floating ({lora_b.shape[0]},); got {magnitude.dtype} "
            f"{tuple(magnitude.shape)}"
        )
    same_device("lora_linear", lora_b=lora_b, magnitude=magnitude)


def _check_rows(rows: Tensor, M: int) -> None:
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= M):
        raise IndexError(f"lora_linear: rows must be in [0, {M}); got {int(rows.min())}..{int(rows.max())}")
    if rows.unique().numel() != rows.numel():
        raise IndexError("lora_linear: rows must be distinct")
