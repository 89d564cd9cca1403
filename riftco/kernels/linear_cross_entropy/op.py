"""The contract of linear + cross-entropy: schema, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .._contract import checks_enabled, define, needs_grad, once_differentiable, same_device
from ..cross_entropy.op import check_targets, reduce
from . import spec

HERE = "riftco.kernels.linear_cross_entropy"
INPUTS = "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? row_weight"
COMPUTE_ALL = -1  # as n_labelled: every row is computed, and those without a label are masked


def _fake_fwd(x, weight, target, bias, row_weight, ignore_index, slice_bytes, n_labelled):
    acc = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(target.shape, dtype=acc), x.new_empty(target.shape, dtype=acc)


def _fake_bwd(
    d_loss, x, weight, target, bias, row_weight, ignore_index, slice_bytes, n_labelled, accum_dtype,
    need_x, need_weight, need_bias,
):  # fmt: skip
    loss, lse = _fake_fwd(x, weight, target, bias, row_weight, ignore_index, slice_bytes, n_labelled)
    d_x = x.new_empty(x.shape if need_x else 0)
    wide = torch.promote_types(weight.dtype, accum_dtype)
    d_weight = weight.new_empty(weight.shape if need_weight else 0, dtype=wide)
    return loss, lse, d_x, d_weight, loss.new_empty(weight.shape[0] if need_bias else 0)


def _launchers(function: str) -> dict[str, str]:
    modules = {"cpu": f"{HERE}.cpu", "cuda": f"{HERE}.cuda", "mps": f"{HERE}.plain"}
    modules["xla"] = "riftco.tpu.linear_cross_entropy"
    return {device: f"{module}:{function}" for device, module in modules.items()}


fwd = define(
    "linear_cross_entropy_fwd",
    f"({INPUTS}, int ignore_index, int slice_bytes, SymInt? n_labelled) -> (Tensor loss, Tensor lse)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers=_launchers("forward"),
)
bwd = define(
    "linear_cross_entropy_bwd",
    f"(Tensor? d_loss, {INPUTS}, int ignore_index, int slice_bytes, SymInt? n_labelled, ScalarType accum_dtype, "
    "bool need_x, bool need_weight, bool need_bias) "
    "-> (Tensor loss, Tensor lse, Tensor d_x, Tensor d_weight, Tensor d_bias)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers=_launchers("backward"),
)


class SummedLoss(torch.autograd.Function):
    """The sum of the losses. Its gradients are taken in the forward, so that no logits are computed twice."""

    @staticmethod
    def forward(x, weight, target, bias, row_weight, options, accum_dtype, needs):
        loss, *rest = bwd(None, x, weight, target, bias, row_weight, *options, accum_dtype, *needs)
        return loss.sum(), *rest

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options, ctx.accum_dtype, ctx.needs = inputs
        _, lse, *grads = output
        ctx.mark_non_differentiable(lse, *grads)
        ctx.set_materialize_grads(False)
        ctx.dtypes = tuple(t.dtype for t in (tensors[0], tensors[1], tensors[1]))
        ctx.traced = _traced()
        # In eager the first backward scales these buffers in place and gives them away; a second one (retain_graph)
        # recomputes. A traced backward cannot branch on having run before: it multiplies out of place.
        ctx.held = None if ctx.traced else grads
        ctx.save_for_backward(*(grads if ctx.traced else tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total, *_):
        if d_total is None:
            return (None,) * 8
        if ctx.traced:
            grads = [_scaled(g, d_total) for g in ctx.saved_tensors]
        elif ctx.held is not None:
            grads, ctx.held = [_scale_(g, d_total) for g in ctx.held], None
        else:
            x, weight, target, bias, row_weight = ctx.saved_tensors
            d_loss = d_total.expand(target.shape)
            _, _, *grads = bwd(
                d_loss, x, weight, target, bias, row_weight, *ctx.options, ctx.accum_dtype, *ctx.needs
            )  # fmt: skip
        return _returned(grads, ctx.dtypes, ctx.needs)


class RowLosses(torch.autograd.Function):
    """The losses of the rows; the gradient recomputes the logits, a slice at a time."""

    @staticmethod
    def forward(x, weight, target, bias, row_weight, options, accum_dtype, needs):
        return fwd(x, weight, target, bias, row_weight, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options, ctx.accum_dtype, ctx.needs = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, _d_lse):
        x, weight, target, bias, row_weight = ctx.saved_tensors
        _, _, *grads = bwd(d_loss, x, weight, target, bias, row_weight, *ctx.options, ctx.accum_dtype, *ctx.needs)
        return _returned(grads, (x.dtype, weight.dtype, weight.dtype), ctx.needs)


def _traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _scaled(g: Tensor, scale: Tensor) -> Tensor:
    return (g * scale.reshape([1] * g.dim())).to(g.dtype)  # as a 0-dim tensor the scale would be rounded to g's dtype


def _scale_(g: Tensor, scale: Tensor) -> Tensor:
    """g *= scale with the product in float32, also for 16-bit g."""
    return torch.mul(g, scale.reshape([1] * g.dim()), out=g) if g.is_cuda else g.mul_(scale)


def _returned(grads, dtypes, needs):
    """The gradients of (x, weight, target, bias, row_weight, options, accum_dtype, needs)."""
    d_x, d_weight, d_bias = (g.to(d) if need else None for g, d, need in zip(grads, dtypes, needs))
    return d_x, d_weight, None, d_bias, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    row_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    denominator: int | Tensor | None = None,
    slice_bytes: int = 256 << 20,
    accum_dtype: torch.dtype = torch.float32,
    n_labelled: int | None = None,
    shift: bool = False,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of integer labels against the logits x weight^T + bias, which never exist as a whole.

    loss[n] = row_weight[n] * (logsumexp(z[n]) - z[n, target[n]]) with z = x weight^T + bias, in nats. Rows are taken
    in slices of at most `slice_bytes` of logits; with "mean" or "sum" their gradients are taken in the same pass.

    Args:
        x: [..., C], float16/bfloat16/float32/float64, any strides. Differentiable.
        weight: [V, C], x's dtype, one of its strides 1 (a matmul copies anything else). Differentiable.
        target: [...], int32 or int64. `ignore_index` and every negative value mark a row without a label: loss 0,
            gradient 0, its x is not read. A value >= V gives NaN for that row (with RIFTCO_CHECK=1: IndexError).
        bias: [V], x's dtype. Differentiable.
        row_weight: [...], float32 >= 0, scales a row's loss and gradient; weight 0 drops the row. Not differentiable.
        ignore_index: the label of rows without one.
        reduction: "mean", "sum" or "none". "mean" divides by the number of rows that carry a label, never by the sum
            of weights; with nothing labelled it is 0 (PyTorch: NaN) with a live graph and zero gradients. "none"
            recomputes the logits in the backward.
        denominator: replaces the number of labelled rows in "mean" (gradient accumulation).
        slice_bytes: most bytes of logits, with the loss's own temporaries, held at once; at least one row. The CPU
            takes 32 MiB where more is allowed.
        accum_dtype: the dtype in which weight's gradient is summed over slices: float32, or weight's own.
        n_labelled: an upper bound on the rows that carry a label (B * T will do). Without it an accelerator is waited
            for once, to count them; under torch.compile and CUDA graph capture all rows are computed instead. Fewer
            than there are is an error: ValueError on the CPU, a NaN loss elsewhere.
        shift: row t predicts target[..., t + 1]; target and row_weight are given unshifted, [..., T].
        return_lse: also return the rows' logsumexp (0 on rows without a label), not differentiable.
        impl: "spec" runs the plain-torch meaning, unsliced, under autograd (double backward works).

    Returns:
        The loss: float32 (float64 for float64 x); a scalar, or [...] for reduction "none".

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        IndexError: with RIFTCO_CHECK=1, a target >= V, with its row.

    Devices: cpu, cuda (cuBLAS and Triton), mps and xla (plain torch on slices).
    Memory: slice_bytes, the gradients asked for (weight's in accum_dtype), O(rows).
    Numerics: logits are rounded to x's dtype once, their gradient once; the loss is float32; deterministic. Under
        autocast x, weight and bias are cast as F.linear's are.
    Source: Hsu et al. 2024, "Liger Kernel: efficient Triton kernels for LLM training", section 3.2.
    """
    x, weight, bias = _autocast(x, weight, bias)
    _check(x, weight, target, bias, row_weight, reduction, denominator, slice_bytes, accum_dtype, n_labelled, impl)
    if shift:
        target, row_weight = _shifted(target, row_weight, ignore_index)
    if checks_enabled():
        check_targets(target, weight.shape[0], ignore_index)
    if n_labelled is None and torch.compiler.is_compiling():
        n_labelled = COMPUTE_ALL
    tensors, options = (x, weight, target, bias, row_weight), (ignore_index, slice_bytes, n_labelled)
    summed = reduction != "none"
    needs = tuple(needs_grad(t) for t in (x, weight, bias))
    if impl == "spec":
        loss, lse = spec.forward(*tensors, *options)
        lse = lse.detach()
    elif any(needs) and summed:
        loss, lse, *_ = SummedLoss.apply(*tensors, options, accum_dtype, needs)
    elif any(needs):
        loss, lse = RowLosses.apply(*tensors, options, accum_dtype, needs)
    else:
        loss, lse = fwd(*tensors, *options)
    if summed:  # a sum of one value is itself
        loss = reduce(loss, target, ignore_index, reduction, denominator)
    return (loss, lse) if return_lse else loss


def _shifted(target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Labels moved one position to the left, so that x is used where it lies; the last position gets none."""
    if target.dim() == 0:
        raise ValueError("linear_cross_entropy: shift needs a target with a time dimension; got a scalar")
    target = F.pad(target[..., 1:], (0, min(target.shape[-1], 1)), value=ignore_index)
    if row_weight is not None:
        row_weight = F.pad(row_weight[..., 1:], (0, min(row_weight.shape[-1], 1)))
    return target, row_weight


def _autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    device = x.device.type
    if device not in ("cpu", "cuda", "mps", "xla") or not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, weight, bias))  # type: ignore


def _check(x, weight, target, bias, row_weight, reduction, denominator, slice_bytes, accum_dtype, n_labelled, impl):
    def refuse(text: str) -> None:
        raise ValueError(f"linear_cross_entropy: {text}")

    if x.dim() < 1 or not x.is_floating_point():
        refuse(f"x must be floating [..., C]; got {x.dtype} {tuple(x.shape)}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        refuse(f"weight must be [V, C] with C = {x.shape[-1]} as in x; got {tuple(weight.shape)}")
    if weight.dtype != x.dtype:
        refuse(f"x and weight must have one dtype (cast one of them, or use autocast); got {x.dtype}, {weight.dtype}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        refuse(f"bias must be {x.dtype} ({weight.shape[0]},); got {bias.dtype} {tuple(bias.shape)}")
    if target.shape != x.shape[:-1]:
        refuse(
            f"target must have the shape of x without its last dimension, {tuple(x.shape[:-1])}; "
            f"got {tuple(target.shape)}"
        )
    if target.dtype not in (torch.int32, torch.int64):
        refuse(f"target must be int32 or int64 class indices; got {target.dtype}")
    if row_weight is not None and (row_weight.shape != target.shape or row_weight.dtype != torch.float32):
        refuse(f"row_weight must be float32 {tuple(target.shape)}; got {row_weight.dtype} {tuple(row_weight.shape)}")
    if row_weight is not None and row_weight.requires_grad:
        refuse("row_weight is not differentiable; detach it")
    if weight.shape[0] == 0 and target.numel():
        refuse("weight has no classes (V = 0)")
    if reduction not in ("mean", "sum", "none"):
        refuse(f"reduction must be 'mean', 'sum' or 'none'; got {reduction!r}")
    if denominator is not None and reduction != "mean":
        refuse("denominator belongs to reduction='mean'")
    if slice_bytes < 1:
        refuse(f"slice_bytes must be positive; got {slice_bytes}")
    if accum_dtype not in (torch.float32, weight.dtype):
        refuse(f"accum_dtype must be float32 or weight's {weight.dtype}; got {accum_dtype}")
    if n_labelled is not None and n_labelled < 0:
        refuse(f"n_labelled must not be negative; got {n_labelled}")
    if impl not in (None, "spec"):
        refuse(f"impl must be None or 'spec'; got {impl!r}")
    same_device("linear_cross_entropy", x=x, weight=weight, target=target, bias=bias, row_weight=row_weight)
