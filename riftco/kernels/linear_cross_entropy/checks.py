"""What linear_cross_entropy accepts, and what it does to its arguments before anything is computed."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .._contract import autocast as cast
from .._contract import same_device
from .._frozen_weight import DENSE, FrozenWeight, is_frozen
from ..cross_entropy.checks import check_reduction, check_row_weight
from .problem import Problem

OP = "linear_cross_entropy"


def autocast(x: Tensor, weight: Tensor | FrozenWeight, bias: Tensor | None) -> tuple:
    """As F.linear's arguments are cast; a frozen weight decodes to x's dtype anyway."""
    if isinstance(weight, Tensor):
        return cast(x, weight, bias)
    x, bias = cast(x, bias)
    return x, weight, bias


def taken_apart(weight: Tensor | FrozenWeight) -> tuple[Tensor, Tensor | None, str, int]:
    """(packed bytes or the weight itself, absmax, kind, block size), as Problem has them."""
    if isinstance(weight, Tensor):
        return weight, None, DENSE, 0
    if not is_frozen(weight):
        refuse(f"weight must be a tensor, an NF4Weight or a GGUFWeight; got {type(weight).__name__}")
    tensors, (_, _, *block) = weight.operands()
    packed, *absmax = tensors
    return packed, absmax[0] if absmax else None, weight.kind, block[0] if block else 0


def shifted(
    target: Tensor, row_weight: Tensor | None, label_weight: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Labels moved one position to the left, so that x is used where it lies; the last position gets none."""
    time = -1 if label_weight is None else -2
    if target.dim() < -time:
        raise ValueError("linear_cross_entropy: shift needs a target with a time dimension; got a scalar")

    def move(t: Tensor, dim: int, fill: int) -> Tensor:
        last = min(t.shape[dim], 1)
        return F.pad(t.narrow(dim, last, t.shape[dim] - last), (0, 0) * (-1 - dim) + (0, last), value=fill)

    return (
        move(target, time, ignore_index),
        None if row_weight is None else move(row_weight, -1, 0),
        None if label_weight is None else move(label_weight, -2, 0),
    )


def check(
    p: Problem, weight: Tensor | FrozenWeight, reduction: str, denominator, softcap, accum_dtype: torch.dtype,
    impl: str | None,
) -> None:  # fmt: skip
    _check_head(p, weight)
    _check_labels(p)
    _check_options(p, reduction, denominator, softcap, accum_dtype, impl)
    same_device(
        OP, x=p.x, weight=p.weight, target=p.target, bias=p.bias, row_weight=p.row_weight,
        class_weight=p.class_weight, topk=p.label_weight, lora_a=p.lora_a, lora_b=p.lora_b,
    )  # fmt: skip


def refuse(text: str) -> None:
    raise ValueError(f"{OP}: {text}")


def check_lora(lora: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor, float]:
    if len(lora) != 3 or not isinstance(lora[0], Tensor) or not isinstance(lora[1], Tensor):
        refuse(f"lora must be (A, B, scale), two tensors and a number; got {', '.join(type(t).__name__ for t in lora)}")
    return lora


def _check_head(p: Problem, weight: Tensor | FrozenWeight) -> None:
    x, V = p.x, p.V
    if x.dim() < 1 or not x.is_floating_point():
        refuse(f"x must be floating [..., C]; got {x.dtype} {tuple(x.shape)}")
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1]:
        refuse(f"weight must be [V, C] with x's C = {x.shape[-1]}; got {tuple(weight.shape)}")
    if isinstance(weight, Tensor) and weight.dtype != x.dtype:
        refuse(f"x and weight must have one dtype outside of autocast; got {x.dtype}, {weight.dtype}")
    if p.bias is not None and (p.bias.shape != (V,) or p.bias.dtype != x.dtype):
        refuse(f"bias must be {x.dtype} ({V},); got {p.bias.dtype} {tuple(p.bias.shape)}")
    if V == 0 and p.target.numel():
        refuse("weight has no classes (V = 0)")
    if p.lora_a is None or p.lora_b is None:
        return
    a, b = p.lora_a, p.lora_b
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != x.shape[-1] or b.shape != (V, a.shape[0]):
        refuse(f"lora must be (A [R, {x.shape[-1]}], B [{V}, R], scale); got {tuple(a.shape)}, {tuple(b.shape)}")
    if not a.is_floating_point() or not b.is_floating_point():
        refuse(f"lora's A and B must be floating; got {a.dtype}, {b.dtype}")
    if not -math.inf < p.lora_scale < math.inf:
        refuse(f"lora's scale must be finite; got {p.lora_scale}")


def _check_labels(p: Problem) -> None:
    target, many, w, rows = p.target, p.label_weight, p.row_weight, p.x.shape[:-1]
    got = tuple(target.shape)
    if many is None and target.shape != rows:
        refuse(f"target must have the shape of x without its last dimension, {tuple(rows)}; got {got}")
    if many is not None and (target.dim() == 0 or target.shape[:-1] != rows or target.shape[-1] == 0):
        refuse(f"with topk, target must be {tuple(rows)} and a last dimension of k >= 1 labels; got {got}")
    if many is not None and (many.shape != target.shape or many.dtype != torch.float32):
        refuse(f"topk must be float32 {got}; got {many.dtype} {tuple(many.shape)}")
    if target.dtype not in (torch.int32, torch.int64):
        refuse(f"target must be int32 or int64 class indices; got {target.dtype}")
    check_row_weight(OP, w, rows)
    if p.class_weight is not None and p.class_weight.shape != (p.V,):
        refuse(f"class_weight must be ({p.V},); got {tuple(p.class_weight.shape)}")
    for name, t in (("class_weight", p.class_weight), ("topk", many)):
        if t is not None and t.requires_grad:
            refuse(f"{name} is not differentiable; detach it")


def _check_options(p: Problem, reduction: str, denominator, softcap, accum_dtype: torch.dtype, impl) -> None:
    if p.label_weight is not None and (p.class_weight is not None or p.label_smoothing or p.z_loss):
        refuse("topk cannot be used with class_weight, label_smoothing or z_loss")
    if not 0 <= p.label_smoothing <= 1:
        refuse(f"label_smoothing must be in 0..1; got {p.label_smoothing}")
    if not -math.inf < p.z_loss < math.inf:  # torch.compile cannot trace math.isfinite of a traced number
        refuse(f"z_loss must be finite; got {p.z_loss}")
    if softcap is not None and not 0 < softcap < math.inf:
        refuse(f"softcap must be positive and finite, or None; got {softcap}")
    if not 0 < p.logit_scale < math.inf:
        refuse(f"logit_scale must be positive and finite; got {p.logit_scale}")
    check_reduction(OP, reduction, denominator, impl)
    if isinstance(denominator, Tensor) and denominator.requires_grad:
        refuse("denominator is not differentiable; detach it")
    if p.slice_bytes < 1:
        refuse(f"slice_bytes must be positive; got {p.slice_bytes}")
    if accum_dtype not in (torch.float32, p.x.dtype):
        refuse(f"accum_dtype must be float32 or x's {p.x.dtype}; got {accum_dtype}")
    if p.n_labelled is not None and p.n_labelled < 0:
        refuse(f"n_labelled must not be negative; got {p.n_labelled}")
