"""What the ops of this room refuse, each by name."""

import math

import torch
from torch import Tensor

from .._contract import same_device


def check(op, logits, target, weight, row_weight, reduction, denominator, impl) -> None:
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"{op}: logits must be floating [..., V]; got {logits.dtype} {tuple(logits.shape)}")
    V = logits.shape[-1]
    if target.is_floating_point():
        raise ValueError(
            f"{op}: target holds {target.dtype}: class probabilities are not taken; give class indices "
            "(int32 or int64), or topk_cross_entropy the ids and weights"
        )
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{op}: target must have the shape of logits without its last dimension, "
            f"{tuple(logits.shape[:-1])}; got {tuple(target.shape)}"
        )
    if target.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: target must be int32 or int64 class indices; got {target.dtype}")
    if weight is not None and (weight.shape != (V,) or not weight.is_floating_point()):
        raise ValueError(f"{op}: weight must be floating ({V},), one a class; got {weight.dtype} {tuple(weight.shape)}")
    if V == 0 and target.numel():
        raise ValueError(f"{op}: logits have no classes (V = 0)")
    check_row_weight(op, row_weight, target.shape)
    for name, t in (("weight", weight), ("denominator", denominator if isinstance(denominator, Tensor) else None)):
        if t is not None and t.requires_grad:
            raise ValueError(f"{op}: {name} is not differentiable; detach it")
    check_reduction(op, reduction, denominator, impl)
    same_device(op, logits=logits, target=target, weight=weight, row_weight=row_weight)


def check_row_weight(op: str, row_weight: Tensor | None, shape: torch.Size) -> None:
    if row_weight is None:
        return
    if row_weight.shape != shape or row_weight.dtype != torch.float32:
        raise ValueError(
            f"{op}: row_weight must be float32 {tuple(shape)}; got {row_weight.dtype} {tuple(row_weight.shape)}"
        )
    if row_weight.requires_grad:
        raise ValueError(f"{op}: row_weight is not differentiable; detach it")


def check_reduction(op: str, reduction: str, denominator, impl: str | None) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if denominator is not None and reduction != "mean":
        raise ValueError(f"{op}: denominator belongs to reduction='mean'")
    if isinstance(denominator, Tensor) and denominator.numel() != 1:
        raise ValueError(f"{op}: denominator must be one value; got {tuple(denominator.shape)}")
    if impl not in (None, "spec"):
        raise ValueError(f"{op}: impl must be None or 'spec'; got {impl!r}")


def check_options(op: str, label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be in 0..1; got {label_smoothing}")
    if not -math.inf < z_loss < math.inf:
        raise ValueError(f"{op}: z_loss must be finite; got {z_loss}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{op}: softcap must be positive and finite, or None; got {softcap}")
    if not 0 < logit_scale < math.inf:
        raise ValueError(f"{op}: logit_scale must be positive and finite; got {logit_scale}")


def check_inplace(logits: Tensor, reduction: str, return_lse: bool, impl: str | None) -> None:
    def refuse(text: str) -> None:
        raise ValueError(f"cross_entropy: inplace=True {text}")

    if reduction == "none":
        refuse("belongs to reduction 'mean' or 'sum'")
    if return_lse:
        refuse("leaves no logits for the gradient of lse; return_metrics gives the lse without one")
    if impl is not None:
        refuse(f"and impl={impl!r} exclude each other")
    if any(stride == 0 and size > 1 for size, stride in zip(logits.shape, logits.stride())):
        refuse("cannot write over expanded logits")


def check_targets(target: Tensor, V: int, ignore_index: int) -> None:
    """IndexError naming the first target that is no class, as RIFTCO_CHECK=1 asks. Costs a synchronisation."""
    bad = ((target >= V) & (target != ignore_index)).flatten().nonzero()
    if len(bad):
        row = int(bad[0])
        raise IndexError(f"cross_entropy: target {int(target.flatten()[row])} in row {row}, but there are {V} classes")


def class_weight_for(weight: Tensor | None, logits: Tensor) -> Tensor | None:
    """[V] as the launchers want it: contiguous, in the dtype of the loss."""
    return None if weight is None else weight.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
