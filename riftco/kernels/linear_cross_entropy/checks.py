"""What linear_cross_entropy accepts, and what it does to its arguments before anything is computed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._arguments import floating, given, indices, number, whole
from .._contract import autocast as cast
from .._contract import same_device
from .._frozen_weight import DENSE, FrozenWeight, is_frozen
from ..cross_entropy.checks import check_class_weight, check_reduction, check_row_weight
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


def check_kinds(x, weight, target, bias, row_weight, class_weight, topk) -> None:
    """What is no tensor, or one of another dtype, before anything is made of it."""
    if not floating(x) or x.dim() < 1:
        refuse(f"x must be floating [..., C]; got {given(x)}")
    if not is_frozen(weight) and not floating(weight):
        refuse(f"weight must be floating [V, C], an NF4Weight or a GGUFWeight; got {given(weight)}")
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1]:
        refuse(f"weight must be [V, C] with x's C = {x.shape[-1]}; got {tuple(weight.shape)}")
    if not indices(target):
        refuse(f"target must be int32 or int64 class indices; got {given(target)}")
    for name, t in (("bias", bias), ("row_weight", row_weight), ("topk", topk)):
        if t is not None and not floating(t):
            refuse(f"{name} must be floating; got {given(t)}")
    check_class_weight(OP, "class_weight", class_weight, weight.shape[0])


def is_shard(weight: object) -> bool:
    """Whether `weight` is a DTensor: a look at one name, which imports nothing."""
    return hasattr(weight, "placements")


def check_sharded(x, weight, target, bias, row_weight, given_up, reduction: str, denominator) -> None:
    """What a head that is cut over processes takes."""
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or not (placements[0].is_shard(0) or placements[0].is_replicate()):
        refuse(
            f"a DTensor weight must be Shard(0), classes, or Replicate() on a mesh of one dimension; got {placements} "
            f"on a mesh of {mesh.ndim}"
        )
    if asked := [name for name, value in given_up.items() if isinstance(value, Tensor) or value]:
        refuse(f"{', '.join(asked)} cannot be used with a DTensor weight")
    check_kinds(x, weight, target, bias, row_weight, None, None)
    if x.dtype != weight.dtype or (bias is not None and (bias.dtype != x.dtype or bias.shape != weight.shape[:1])):
        refuse(f"x, weight and bias [V] must have one dtype; got {given(x)}, {given(weight)} and {given(bias)}")
    if target.shape != x.shape[:-1]:
        refuse(f"target must have the shape of x without its last dimension; got {tuple(target.shape)}")
    check_row_weight(OP, row_weight, x.shape[:-1])
    check_reduction(OP, reduction, denominator, None, x.device)


def check(
    p: Problem, weight: Tensor | FrozenWeight, reduction: str, denominator, accum_dtype: torch.dtype, impl: str | None
) -> None:  # fmt: skip
    _check_head(p, weight)
    _check_labels(p)
    _check_options(p, reduction, denominator, accum_dtype, impl)
    same_device(
        OP, x=p.x, weight=p.weight, target=p.target, bias=p.bias, row_weight=p.row_weight,
        class_weight=p.class_weight, topk=p.label_weight, lora_a=p.lora_a, lora_b=p.lora_b,
    )  # fmt: skip


def refuse(text: str) -> None:
    raise ValueError(f"{OP}: {text}")


def check_lora(lora: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor, float]:
    accepted = "(A, B, scale), two tensors and a number"
    if not isinstance(lora, (tuple, list)):
        refuse(f"lora must be {accepted}; got {given(lora)}")
    if len(lora) != 3 or not isinstance(lora[0], Tensor) or not isinstance(lora[1], Tensor):
        refuse(f"lora must be {accepted}; got {given(*lora)}")
    number(OP, "lora's scale", lora[2], "finite")
    return lora


def _check_head(p: Problem, weight: Tensor | FrozenWeight) -> None:
    x, V = p.x, p.V
    if isinstance(weight, Tensor) and weight.dtype != x.dtype:
        refuse(f"x and weight must have one dtype outside of autocast; got {x.dtype}, {weight.dtype}")
    if p.bias is not None and (p.bias.shape != (V,) or p.bias.dtype != x.dtype):
        refuse(f"bias must be {x.dtype} ({V},); got {given(p.bias)}")
    if V == 0 and p.target.numel():
        refuse("weight has no classes (V = 0)")
    if p.lora_a is None or p.lora_b is None:
        return
    a, b = p.lora_a, p.lora_b
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != x.shape[-1] or b.shape != (V, a.shape[0]):
        refuse(f"lora must be (A [R, {x.shape[-1]}], B [{V}, R], scale); got {tuple(a.shape)}, {tuple(b.shape)}")
    if not floating(a) or not floating(b):
        refuse(f"lora's A and B must be floating; got {given(a, b)}")


def _check_labels(p: Problem) -> None:
    target, many, w, rows = p.target, p.label_weight, p.row_weight, p.x.shape[:-1]
    got = tuple(target.shape)
    if many is None and target.shape != rows:
        refuse(f"target must have the shape of x without its last dimension, {tuple(rows)}; got {got}")
    if many is not None and (target.dim() == 0 or target.shape[:-1] != rows or target.shape[-1] == 0):
        refuse(f"with topk, target must be {tuple(rows)} and a last dimension of k >= 1 labels; got {got}")
    if many is not None and (many.shape != target.shape or many.dtype != torch.float32):
        refuse(f"topk must be float32 {got}; got {many.dtype} {tuple(many.shape)}")
    if many is not None and many.requires_grad:
        refuse("topk is not differentiable; detach it")
    check_row_weight(OP, w, rows)


def _check_options(p: Problem, reduction: str, denominator, accum_dtype: torch.dtype, impl) -> None:
    if p.label_weight is not None and (p.class_weight is not None or p.label_smoothing or p.z_loss):
        refuse("topk cannot be used with class_weight, label_smoothing or z_loss")
    check_reduction(OP, reduction, denominator, impl, p.x.device)
    whole(OP, "slice_bytes", p.slice_bytes, "positive", least=1)
    if accum_dtype not in (torch.float32, p.x.dtype):
        refuse(f"accum_dtype must be float32 or x's {p.x.dtype}; got {accum_dtype}")
    if p.n_labelled is not None:
        whole(OP, "n_labelled", p.n_labelled, "at least 0, or None", least=0)
