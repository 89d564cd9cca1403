"""What the ops of this room refuse, each by name."""

import torch
from torch import Tensor

from .._arguments import check_impl, floating, given, indices, number, whole
from .._contract import checks_enabled, same_device
from .._overlap import lies_once

FLOAT32 = torch.finfo(torch.float32).max  # kernels take options in it


def check(op, logits, target, weight, row_weight, reduction, denominator, impl) -> None:
    if not floating(logits) or logits.dim() < 1:
        raise ValueError(f"{op}: logits must be floating [..., V]; got {given(logits)}")
    V = logits.shape[-1]
    if floating(target):
        raise ValueError(
            f"{op}: target holds {target.dtype}: class probabilities are not taken; give class indices "
            "(int32 or int64), or topk_cross_entropy the ids and weights"
        )
    if not indices(target):
        raise ValueError(f"{op}: target must be int32 or int64 class indices; got {given(target)}")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"{op}: target must have the shape of logits without its last dimension, "
            f"{tuple(logits.shape[:-1])}; got {tuple(target.shape)}"
        )
    check_class_weight(op, "weight", weight, V)
    if V == 0 and target.numel():
        raise ValueError(f"{op}: logits have no classes (V = 0)")
    check_row_weight(op, row_weight, target.shape)
    check_reduction(op, reduction, denominator, impl, logits.device)
    same_device(op, logits=logits, target=target, weight=weight, row_weight=row_weight)


def check_class_weight(op: str, name: str, weight: Tensor | None, V: int) -> None:
    if weight is None:
        return
    if not floating(weight) or weight.shape != (V,):
        raise ValueError(f"{op}: {name} must be floating ({V},), one a class; got {given(weight)}")
    if weight.requires_grad:
        raise ValueError(f"{op}: {name} is not differentiable; detach it")


def check_row_weight(op: str, row_weight: Tensor | None, shape: torch.Size) -> None:
    if row_weight is None:
        return
    if not floating(row_weight) or row_weight.shape != shape or row_weight.dtype != torch.float32:
        raise ValueError(f"{op}: row_weight must be float32 {tuple(shape)}; got {given(row_weight)}")
    if row_weight.requires_grad:
        raise ValueError(f"{op}: row_weight is not differentiable; detach it")


def check_reduction(op: str, reduction: str, denominator, impl: str | None, device: torch.device) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if denominator is not None and reduction != "mean":
        raise ValueError(f"{op}: denominator belongs to reduction='mean'")
    if isinstance(denominator, Tensor):
        _check_denominator(op, denominator, device)
    elif denominator is not None:
        number(op, "denominator", denominator, "positive and finite", above=0)
    check_impl(op, impl)


def _check_denominator(op: str, denominator: Tensor, device: torch.device) -> None:
    if denominator.numel() != 1 or not (floating(denominator) or indices(denominator)):
        raise ValueError(f"{op}: denominator must be one value, floating, int32 or int64; got {given(denominator)}")
    if denominator.requires_grad:
        raise ValueError(f"{op}: denominator is not differentiable; detach it")
    if denominator.device.type == "meta" != device.type:
        raise ValueError(f"{op}: denominator must have a value; got a tensor on meta beside others on {device}")
    if checks_enabled() and device.type != "meta":
        number(op, "denominator", denominator.item(), "positive and finite", above=0)


def check_options(
    op: str, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, logit_scale: float
) -> None:
    whole(op, "ignore_index", ignore_index, "within 64 bits")
    number(op, "label_smoothing", label_smoothing, "in 0..1", least=0, most=1)
    number(op, "z_loss", z_loss, "finite in float32", least=-FLOAT32, most=FLOAT32)
    if softcap is not None:
        number(op, "softcap", softcap, "positive and finite in float32, or None", above=0, most=FLOAT32)
    number(op, "logit_scale", logit_scale, "positive and finite in float32", above=0, most=FLOAT32)


def check_inplace(logits: Tensor, reduction: str, return_lse: bool, impl: str | None) -> None:
    def refuse(text: str) -> None:
        raise ValueError(f"cross_entropy: inplace=True {text}")

    if reduction == "none":
        refuse("belongs to reduction 'mean' or 'sum'")
    if return_lse:
        refuse("leaves no logits for the gradient of lse; return_metrics gives the lse without one")
    if impl is not None:
        refuse(f"and impl={impl!r} exclude each other")
    if not lies_once(logits):
        refuse(f"cannot write over expanded or overlapping logits; got strides {logits.stride()}")


def ignored(ignore_index: int, target: Tensor) -> int:
    """ignore_index, or where no label can be it -1, which is none either: PyTorch would compare its low bits."""
    fits = torch.iinfo(target.dtype)
    return ignore_index if fits.min <= ignore_index <= fits.max else -1


def check_targets(target: Tensor, V: int, ignore_index: int) -> None:
    """IndexError naming the first target that is no class, as RIFTCO_CHECK=1 asks. Costs a synchronisation."""
    bad = ((target >= V) & (target != ignore_index)).flatten().nonzero()
    if len(bad):
        row = int(bad[0])
        raise IndexError(f"cross_entropy: target {int(target.flatten()[row])} in row {row}, but there are {V} classes")


def class_weight_for(weight: Tensor | None, logits: Tensor) -> Tensor | None:
    """[V] as the launchers want it: contiguous, in the dtype of the loss."""
    return None if weight is None else weight.to(torch.promote_types(logits.dtype, torch.float32)).contiguous()
