"""The fused losses of PyTorch, Liger and cut-cross-entropy, by their own signatures."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments import flags, floating, given, whole
from ..cross_entropy.op import denominator_of
from .op import linear_cross_entropy


def torch_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor:
    """torch.nn.functional.linear_cross_entropy of torch 2.13, for class indices.

    `options`: of torch.nn.LinearCrossEntropyOptions, acc_dtype and batch_chunk_size (rows of a slice) are followed; any
    number of backward passes works without allow_retain_graph. Differs in one documented way: "mean" over nothing
    labelled is 0, not NaN.

    Raises:
        ValueError: class probabilities, a K-dimensional weight, and what linear_cross_entropy refuses.
    """
    if not floating(linear_weight) or linear_weight.dim() != 2:
        raise ValueError(
            f"linear_cross_entropy: linear_weight must be [classes, in_features]; got {given(linear_weight)} "
            "(K-dimensional losses are not served)"
        )
    if floating(target):
        raise ValueError("linear_cross_entropy: target holds class probabilities; only class indices are served")
    more: dict[str, Any] = {}
    if getattr(options, "acc_dtype", None) is not None:
        more["accum_dtype"] = options.acc_dtype
    if getattr(options, "batch_chunk_size", None) is not None:
        row = linear_weight.shape[0] * input.dtype.itemsize + 2 * input.shape[-1] * input.dtype.itemsize
        more["slice_bytes"] = options.batch_chunk_size * row
    loss = linear_cross_entropy(
        input, linear_weight, target, linear_bias, class_weight=weight, reduction=reduction,
        ignore_index=-100 if ignore_index is None else ignore_index, label_smoothing=label_smoothing, **more,
    )  # fmt: skip
    assert isinstance(loss, Tensor)
    return loss


class CrossEntropyOutput(NamedTuple):
    """What Liger returns when more than the loss is asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Liger's functional form: input [N, C] first, then weight [V, C].

    Gradients are summed over slices in float32 unless `accum_dtype` says otherwise. `use_token_scaling` scales each row
    by its target's probability, which takes a forward of its own.
    """
    flags(
        "linear_cross_entropy", return_z_loss=return_z_loss, use_token_scaling=use_token_scaling,
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
    )  # fmt: skip
    common: dict[str, Any] = dict(class_weight=ce_weight, ignore_index=ignore_index, softcap=softcap)
    scaling = None
    if use_token_scaling:
        with torch.no_grad():
            _, metrics = linear_cross_entropy(input, weight, target, bias, return_metrics=True, **common)
            scaling = metrics.log_prob.float().exp()
    loss, m = linear_cross_entropy(
        input, weight, target, bias, row_weight=scaling, z_loss=lse_square_scale, label_smoothing=label_smoothing,
        reduction=reduction, accum_dtype=accum_dtype or torch.float32, return_metrics=True, **common,
    )  # fmt: skip
    if not (return_z_loss or return_token_accuracy or return_predicted_tokens):
        return loss
    z = lse_square_scale * m.lse.square() * (1.0 if scaling is None else scaling)
    if reduction != "none":
        z = z.sum()
    if reduction == "mean":
        z = z / denominator_of(target, ce_weight, ignore_index, None)
    return CrossEntropyOutput(
        loss,
        z if return_z_loss else None,
        m.accuracy if return_token_accuracy else None,
        m.argmax if return_predicted_tokens else None,
    )


CCE_IMPLS = ("cce", "torch_compile", "cce_kahan", "cce_kahan_full_c", "cce_kahan_full_c_full_e", "cce_exact")


def cce_linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: str = "cce",
    vocab_parallel_options: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """cut-cross-entropy's linear_cross_entropy(e, c, targets). Always exact: the filters and `impl` change nothing.

    shift=s: position t of e predicts targets[..., t + s]; "none" and lse then have s fewer positions.

    Raises:
        ValueError: vocab_parallel_options, an unknown impl, and what linear_cross_entropy refuses.
    """
    if vocab_parallel_options is not None:
        raise ValueError("linear_cross_entropy: vocab_parallel_options is not served; gather the classifier first")
    if impl not in CCE_IMPLS:
        raise ValueError(f"linear_cross_entropy: impl must be one of {', '.join(CCE_IMPLS)}; got {impl!r}")
    whole("linear_cross_entropy", "shift", int(shift) if isinstance(shift, bool) else shift, "0 or more", least=0)
    if shift and isinstance(e, Tensor) and isinstance(targets, Tensor):  # others are refused below
        T = targets.shape[-1] if targets.dim() else 0
        if shift >= T:
            raise ValueError(f"linear_cross_entropy: shift must be below targets' length {T}; got {shift}")
        e, targets = e[..., : -int(shift), :], targets[..., int(shift) :]
    return linear_cross_entropy(
        e, c, targets, bias, ignore_index=ignore_index, softcap=softcap, reduction=reduction, return_lse=return_lse
    )
