"""The contract of cross-entropy: schema, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._contract import checks_enabled, define, needs_grad, once_differentiable, same_device
from . import spec

HERE = "riftco.kernels.cross_entropy"


def _fake_fwd(logits, target, row_weight, ignore_index):
    acc = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(logits.shape[:-1], dtype=acc), logits.new_empty(logits.shape[:-1], dtype=acc)


def _fake_bwd(d_loss, logits, target, row_weight, lse, ignore_index):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


fwd = define(
    "cross_entropy_fwd",
    "(Tensor logits, Tensor target, Tensor? row_weight, int ignore_index) -> (Tensor loss, Tensor lse)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={
        "cpu": f"{HERE}.cpu:forward",
        "cuda": f"{HERE}.cuda:forward",
        "mps": "riftco.metal.cross_entropy:forward",
        "xla": "riftco.tpu.cross_entropy:forward",
    },
)
bwd = define(
    "cross_entropy_bwd",
    "(Tensor d_loss, Tensor logits, Tensor target, Tensor? row_weight, Tensor lse, int ignore_index) -> Tensor",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={
        "cpu": f"{HERE}.cpu:backward",
        "cuda": f"{HERE}.cuda:backward",
        "mps": "riftco.metal.cross_entropy:backward",
        "xla": "riftco.tpu.cross_entropy:backward",
    },
)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(logits, target, row_weight, ignore_index):
        return fwd(logits, target, row_weight, ignore_index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, target, row_weight, ignore_index = inputs
        lse = output[1]
        ctx.save_for_backward(logits, target, row_weight, lse)
        ctx.mark_non_differentiable(lse)
        ctx.ignore_index = ignore_index

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, _d_lse):
        logits, target, row_weight, lse = ctx.saved_tensors
        return bwd(d_loss, logits, target, row_weight, lse, ctx.ignore_index), None, None, None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    row_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: int | Tensor | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of integer labels.

    loss[n] = row_weight[n] * (logsumexp(logits[n]) - logits[n, target[n]]), in nats; the gradient is
    row_weight[n] * (softmax(logits[n]) - onehot(target[n])).

    Args:
        logits: [..., V], float16/bfloat16/float32/float64, any strides. Differentiable.
        target: [...], int32 or int64. `ignore_index` and every negative value mark a row without a label: loss 0,
            gradient 0. A value >= V gives NaN for that row and touches no memory outside
            (with RIFTCO_CHECK=1: IndexError).
        row_weight: [...], float32 >= 0, scales a row's loss and gradient; weight 0 skips the row. Not differentiable.
        ignore_index: the label of rows without one.
        reduction: "mean", "sum" or "none". "mean" divides by the number of rows that carry a label, never by the sum
            of weights; with nothing labelled it is 0 (PyTorch: NaN) with a live graph and zero gradients.
        denominator: replaces the number of labelled rows in "mean" (gradient accumulation).
        return_lse: also return the rows' logsumexp (0 on skipped rows), not differentiable.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        The loss: float32 (float64 for float64 logits); a scalar, or [...] for reduction "none".

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        IndexError: with RIFTCO_CHECK=1, a target >= V, with its row.

    Devices: cpu, cuda (Triton), mps (Metal), xla.
    Numerics: float32 accumulation, gradient rounded once to the logits' dtype; deterministic.
    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3.
    """
    _check(logits, target, row_weight, reduction, denominator, impl)
    if checks_enabled():
        check_targets(target, logits.shape[-1], ignore_index)
    if impl == "spec":
        loss, lse = spec.forward(logits, target, row_weight, ignore_index)
        lse = lse.detach()
    elif needs_grad(logits):
        loss, lse = CrossEntropy.apply(logits, target, row_weight, ignore_index)
    else:
        loss, lse = fwd(logits, target, row_weight, ignore_index)
    loss = reduce(loss, target, ignore_index, reduction, denominator)
    return (loss, lse) if return_lse else loss


def reduce(loss: Tensor, target: Tensor, ignore_index: int, reduction: str, denominator: int | Tensor | None) -> Tensor:
    """Per-row losses -> the reduced loss, by the rule of `cross_entropy`."""
    if reduction == "none":
        return loss
    total = loss.sum()
    if reduction == "sum":
        return total
    if denominator is None:
        denominator = ((target != ignore_index) & (target >= 0)).sum().clamp(min=1)
    return total / denominator


def check_targets(target: Tensor, V: int, ignore_index: int) -> None:
    """IndexError naming the first target that is no class, as RIFTCO_CHECK=1 asks. Costs a synchronisation."""
    bad = ((target >= V) & (target != ignore_index)).flatten().nonzero()
    if len(bad):
        row = int(bad[0])
        raise IndexError(f"cross_entropy: target {int(target.flatten()[row])} in row {row}, but there are {V} classes")


def _check(logits, target, row_weight, reduction, denominator, impl) -> None:
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"cross_entropy: logits must be floating [..., V]; got {logits.dtype} {tuple(logits.shape)}")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: target must have the shape of logits without its last dimension, "
            f"{tuple(logits.shape[:-1])}; got {tuple(target.shape)}"
        )
    if target.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cross_entropy: target must be int32 or int64 class indices; got {target.dtype}")
    if row_weight is not None and (row_weight.shape != target.shape or row_weight.dtype != torch.float32):
        raise ValueError(
            f"cross_entropy: row_weight must be float32 {tuple(target.shape)}; "
            f"got {row_weight.dtype} {tuple(row_weight.shape)}"
        )
    if row_weight is not None and row_weight.requires_grad:
        raise ValueError("cross_entropy: row_weight is not differentiable; detach it")
    if logits.shape[-1] == 0 and target.numel():
        raise ValueError("cross_entropy: logits have no classes (V = 0)")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if denominator is not None and reduction != "mean":
        raise ValueError("cross_entropy: denominator belongs to reduction='mean'")
    if impl not in (None, "spec"):
        raise ValueError(f"cross_entropy: impl must be None or 'spec'; got {impl!r}")
    same_device("cross_entropy", logits=logits, target=target, row_weight=row_weight)
