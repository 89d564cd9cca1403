"""The contract of cross-entropy: schemas, shapes, devices, gradient. Torch-only; imports no kernel."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._arguments import flags
from .._contract import TABLE, Function, checks_enabled, choose, define, needs_grad, once_differentiable
from . import spec
from .checks import check, check_inplace, check_options, check_targets, class_weight_for, ignored

HERE = "riftco.kernels.cross_entropy"
INPUTS = "Tensor target, Tensor? row_weight, Tensor? class_weight"
OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale"
ROWS = "Tensor loss, Tensor top, Tensor log_total, Tensor log_prob, Tensor entropy, Tensor argmax"
MEAN, LABELLED = "cross_entropy_mean_fwd_bwd_", "the labelled rows"
FUSED = ("cpu", "cuda", "mps")  # devices whose launchers make the loss and its gradient in one pass


def _launchers(function: str, devices: tuple[str, ...] = ("cpu", "cuda", "mps", "xla")) -> dict[str, str]:
    modules = {"cpu": f"{HERE}.cpu", "cuda": f"{HERE}.cuda"}
    modules |= {"mps": "riftco.metal.cross_entropy", "xla": "riftco.tpu.cross_entropy"}
    return {device: f"{modules[device]}:{function}" for device in devices}


def _fake_rows(logits, metrics):
    acc = torch.promote_types(logits.dtype, torch.float32)
    shape, extra = logits.shape[:-1], logits.shape[:-1] if metrics else (0,)
    rows = [logits.new_empty(shape, dtype=acc) for _ in range(3)]
    rows += [logits.new_empty(extra, dtype=acc) for _ in range(2)]
    return (*rows, logits.new_empty(extra, dtype=torch.int64))


def _fake_fwd(logits, target, row_weight, class_weight, *options):
    return _fake_rows(logits, options[-1])


def _fake_bwd(d_loss, d_lse, logits, *rest):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_fwd_bwd(logits, target, row_weight, class_weight, d_loss, *options):
    return *_fake_rows(logits, options[-1]), torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_fwd_bwd_(logits, target, row_weight, class_weight, d_loss, *options):
    return _fake_rows(logits, options[-1])


def _fake_mean_fwd_bwd_(logits, g, target, row_weight, class_weight, *options):
    return *_fake_rows(logits, options[-1]), *(logits.new_empty((), dtype=torch.float32) for _ in range(2))


fwd = define(
    "cross_entropy_fwd",
    f"(Tensor logits, {INPUTS}, {OPTIONS}, bool metrics) -> ({ROWS})",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers=_launchers("forward"),
)
bwd = define(
    "cross_entropy_bwd",
    f"(Tensor? d_loss, Tensor? d_lse, Tensor logits, {INPUTS}, Tensor top, Tensor log_total, {OPTIONS}) -> Tensor",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers=_launchers("backward"),
)
fwd_bwd = define(
    "cross_entropy_fwd_bwd",
    f"(Tensor logits, {INPUTS}, Tensor? d_loss, {OPTIONS}, bool metrics) -> ({ROWS}, Tensor d_logits)",
    fake=_fake_fwd_bwd,
    spec=f"{HERE}.spec:forward_backward",
    launchers=_launchers("forward_backward", FUSED),
    routes=f"{HERE}.route:routes",
)
fwd_bwd_ = define(
    "cross_entropy_fwd_bwd_",
    f"(Tensor(a!) logits, {INPUTS}, Tensor? d_loss, {OPTIONS}, bool metrics) -> ({ROWS})",
    fake=_fake_fwd_bwd_,
    spec=f"{HERE}.spec:forward_backward_",
    launchers=_launchers("forward_backward_", FUSED),
    routes=f"{HERE}.route:routes",
)
# the mean over the labelled rows: on CUDA the fused pass begins while they are counted
mean_fwd_bwd_ = define(
    MEAN,
    f"(Tensor logits, Tensor(a!) g, {INPUTS}, {OPTIONS}, bool metrics) -> ({ROWS}, Tensor mean, Tensor reciprocal)",
    fake=_fake_mean_fwd_bwd_,
    spec=f"{HERE}.spec:mean_forward_backward_",
    launchers={"cuda": f"{HERE}.cuda:mean_forward_backward_", "mps": f"{HERE}.spec:mean_forward_backward_"},
)
scale_ = define(
    "cross_entropy_scale_",
    "(Tensor(a!) g, Tensor scale) -> ()",
    fake=lambda g, scale: None,
    spec=f"{HERE}.spec:scale_",
    launchers={"cuda": f"{HERE}.cuda:scale_", "mps": "riftco.metal.cross_entropy:scale_"},
)
# what other devices and the sliced head need for a mean before the fused pass
labelled = define(
    "cross_entropy_labelled",
    "(Tensor target, int ignore_index) -> (Tensor, Tensor)",
    fake=lambda target, ignore_index: tuple(target.new_empty((), dtype=torch.float32) for _ in range(2)),
    spec=f"{HERE}.spec:labelled",
    launchers={"cuda": f"{HERE}.cuda:labelled", "mps": f"{HERE}.spec:labelled"},
)


class Metrics(NamedTuple):
    """What one pass says of every row, [...] each, and the accuracy over the rows that were computed; all detached.

    Skipped rows: 0, and -1 in argmax. With nothing computed the accuracy is 0.
    """

    loss: Tensor
    lse: Tensor
    log_prob: Tensor
    entropy: Tensor
    argmax: Tensor
    accuracy: Tensor


class RowLosses(Function):
    """The rows' losses and lse; the gradient reads the logits again."""

    @staticmethod
    def forward(logits, target, row_weight, class_weight, options, metrics, trains_lse):
        out = fwd(logits, target, row_weight, class_weight, *options, metrics)
        return *out, spec.lse_of(out[1], out[2], *options[-2:])

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options, _, ctx.trains_lse = inputs
        ctx.save_for_backward(*tensors, output[1], output[2])
        ctx.mark_non_differentiable(*output[1 : 6 if ctx.trains_lse else 7])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, *d_rest):
        d_lse = d_rest[-1] if ctx.trains_lse else None
        return bwd(d_loss, d_lse, *ctx.saved_tensors, *ctx.options), *(None,) * 6


class SummedLoss(Function):
    """sum(loss) / over with its gradient made in the same pass, in a buffer that the first backward gives away.

    divisor: (over, its reciprocal), LABELLED for the number of labelled rows, or None for the sum.
    """

    @staticmethod
    def forward(ctx, logits, target, row_weight, class_weight, divisor, options, metrics, inplace):
        loss, d_loss, out, d_logits = _summed(
            logits, target, row_weight, class_weight, divisor, options, metrics, inplace
        )
        if inplace:
            torch.autograd.graph.increment_version(logits)
            ctx.save_for_backward(d_logits)
        else:
            ctx.save_for_backward(d_logits, logits, target, row_weight, class_weight, d_loss, out[1], out[2])
        ctx.options, ctx.inplace, ctx.given = options, inplace, False
        ctx.mark_non_differentiable(*out)
        ctx.set_materialize_grads(False)
        return loss, *out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total, *_):
        none = (None,) * 7
        if d_total is None:
            return None, *none
        d_logits, *saved = ctx.saved_tensors
        if not ctx.given:
            ctx.given = True
            # .data twice: neither this nor what the caller does to the gradient (clipping, zero_grad) may count as a
            # change of the saved tensor, as a second pass may come
            scale_(d_logits.data, d_total)
            return d_logits.data, *none
        if ctx.inplace:
            raise RuntimeError("cross_entropy: inplace=True gave its gradient away in the first backward pass")
        logits, target, row_weight, class_weight, d_loss, top, log_total = saved
        d_loss = d_total.expand(target.shape) if d_loss is None else d_loss * d_total
        tensors = (logits, target, row_weight, class_weight, top, log_total)
        return bwd(d_loss, None, *tensors, *ctx.options), *none


def _summed(logits, target, row_weight, class_weight, divisor, options, metrics, inplace):
    """(loss, the rows' upstream gradient, the rows' numbers, d_logits)"""
    if divisor == LABELLED:
        d_logits = logits.detach() if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        args = (d_logits, target, row_weight, class_weight, *options, metrics)
        *out, loss, reciprocal = mean_fwd_bwd_(logits, *args)
        return loss, reciprocal.expand(target.shape), out, d_logits
    d_loss = None if divisor is None else divisor[1].expand(target.shape)
    args = (target, row_weight, class_weight, d_loss, *options, metrics)
    if inplace:
        out, d_logits = fwd_bwd_(logits, *args), logits.detach()
    else:
        *out, d_logits = fwd_bwd(logits, *args)
    return out[0].sum() if divisor is None else out[0].sum() / divisor[0], d_loss, out, d_logits


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    row_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    denominator: int | float | Tensor | None = None,
    inplace: bool = False,
    return_lse: bool = False,
    return_metrics: bool = False,
    impl: str | None = None,
):
    """Cross-entropy of integer labels, in nats.

    With z = logit_scale * logits, or softcap * tanh(logit_scale * logits / softcap), w = weight or 1 and
    e = label_smoothing:
    loss[n] = row_weight[n] * ((1 - e) w[y] (lse - z[y]) + e / V * sum_v w[v] (lse - z[v]) + z_loss * lse^2)
    with y = target[n].

    Args:
        logits: [..., V], float16/bfloat16/float32/float64, any strides. Differentiable.
        target: [...], int32 or int64. `ignore_index` and every negative value mark a row without a label: loss 0,
            gradient 0, not read. A value >= V gives NaN for that row and touches no memory outside
            (with RIFTCO_CHECK=1: IndexError).
        weight: [V] floating, PyTorch's weight of each class. Not differentiable.
        row_weight: [...], float32 >= 0, scales a row's loss and gradient; weight 0 skips the row. Not differentiable.
        ignore_index: the label of rows without one.
        label_smoothing: 0..1, PyTorch's.
        z_loss: coefficient of lse^2 (no class weight applies to it). Differentiable like the rest.
        softcap: positive, or None for none. logit_scale: positive; applies before the softcap.
        reduction: "mean", "sum" or "none". "mean" divides by the number of rows that carry a label, never by the sum
            of row weights, or by the sum of weight[target] where `weight` is given; with nothing labelled it is 0
            (PyTorch: NaN) with a live graph and zero gradients.
        denominator: replaces that in "mean" (gradient accumulation): a number, or a tensor of one value.
        inplace: the gradient is written over the logits by the forward, for "mean" and "sum" in eager mode. The logits
            are lost, and one backward pass is possible.
        return_lse: also return the rows' logsumexp of z (0 on skipped rows), differentiable; the backward then reads
            the logits again.
        return_metrics: also return `Metrics`, from the same pass.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        The loss: float32 (float64 for float64 logits); a scalar, or [...] for reduction "none". With return_lse and
        return_metrics a tuple: the loss, then what was asked for, in this order.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        NotImplementedError: an option that a device's kernel lacks, named.
        IndexError: with RIFTCO_CHECK=1, a target >= V, with its row.

    Devices: cpu, cuda (Triton), mps (Metal), xla.
    Memory: in eager mode "mean" and "sum" make the gradient in the forward: one buffer of the logits' size, none with
        `inplace`. "none", torch.compile and torch.func read the logits twice instead.
    Numerics: float32 accumulation, gradient rounded once to the logits' dtype; a row's maximum and the logarithm of its
        sum are kept apart, so that large logits and confident rows lose nothing; deterministic.
    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3.
    """
    flags("cross_entropy", inplace=inplace, return_lse=return_lse, return_metrics=return_metrics)
    check("cross_entropy", logits, target, weight, row_weight, reduction, denominator, impl)
    check_options("cross_entropy", ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    ignore_index = ignored(ignore_index, target)
    if checks_enabled():
        check_targets(target, logits.shape[-1], ignore_index)
    options: Any = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), float(logit_scale))
    class_weight = class_weight_for(weight, logits)
    tensors = (logits, target, row_weight, class_weight)
    recorded = needs_grad(logits)
    if inplace:
        check_inplace(logits, reduction, return_lse, impl)
        if not _traced() and not _fused(logits):
            raise NotImplementedError(f"cross_entropy: no {logits.device.type} kernel writes inplace")
    if recorded and impl is None and reduction != "none" and not return_lse and _fused(logits):
        divisor = None
        if reduction == "mean":
            divisor = _divisor(logits, target, class_weight, ignore_index, denominator)
        loss, *out = SummedLoss.apply(*tensors, divisor, options, return_metrics, inplace)
        return (loss, metrics_of(out, target, options)) if return_metrics else loss
    over: Any = None
    if reduction == "mean" and denominator is None and class_weight is None and _fused(logits):
        over = labelled(target, ignore_index)[0].to(_acc(logits))  # one launch
    elif reduction == "mean":
        over = denominator_of(target, class_weight, ignore_index, denominator)
    if recorded and impl is None:
        *out, lse = RowLosses.apply(*tensors, options, return_metrics, return_lse)
    else:
        losses: Any = fwd if impl is None else spec.forward
        out = losses(*tensors, *options, return_metrics)
    loss = out[0] if reduction == "none" else out[0].sum() if over is None else out[0].sum() / over
    if not return_lse and not return_metrics:
        return loss
    extra = []
    if return_lse:
        extra.append(lse if recorded and impl is None else spec.lse_of(out[1], out[2], *options[-2:]))
    if return_metrics:
        extra.append(metrics_of(out, target, options))
    return loss, *extra


def metrics_of(out, target: Tensor, options) -> Metrics:
    """The rows' metrics from a launcher's six outputs."""
    loss, top, log_total, log_prob, entropy, argmax = (t.detach() for t in out)
    right = ((argmax == target) & (argmax >= 0)).sum()
    accuracy = right / (argmax >= 0).sum().clamp(min=1)
    return Metrics(loss, spec.lse_of(top, log_total, *options[-2:]), log_prob, entropy, argmax, accuracy)


def denominator_of(
    target: Tensor, class_weight: Tensor | None, ignore_index: int, denominator: int | float | Tensor | None
) -> int | float | Tensor:
    """What a mean divides by: `denominator`, the labelled rows, or the sum of their class weights."""
    if denominator is not None:
        return denominator.reshape(()) if isinstance(denominator, Tensor) else denominator
    labelled = (target != ignore_index) & (target >= 0)
    if class_weight is None:
        return labelled.sum().clamp(min=1)
    inside = labelled & (target < class_weight.shape[0])
    w = torch.where(inside, class_weight[target.where(inside, 0).long()], 0.0)
    return torch.where(labelled.any(), w.sum(), 1.0)


def _divisor(logits: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int, denominator):
    """What a mean divides by and its reciprocal, on the logits' device; LABELLED where the fused pass counts rows."""
    acc = _acc(logits)
    if denominator is None and class_weight is None and acc == torch.float32:
        return LABELLED if _counts(logits) else labelled(target, ignore_index)
    over = denominator_of(target, class_weight, ignore_index, denominator)
    if isinstance(over, Tensor):
        over = over.to(logits.device, acc)
    else:  # filled on the device: a copy from the host could not be captured in a CUDA graph
        over = torch.full((), over, dtype=acc, device=logits.device)
    return over, over.reciprocal()


def reduce(
    loss: Tensor, target: Tensor, ignore_index: int, reduction: str, denominator: int | float | Tensor | None,
    class_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Per-row losses -> the reduced loss, by the rule of `cross_entropy`."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / denominator_of(target, class_weight, ignore_index, denominator)


def _acc(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _fused(logits: Tensor) -> bool:
    """Whether the gradient is made in the forward. Under a tracer reading the logits twice moves fewer bytes."""
    if _traced():
        return False
    path = choose("cross_entropy_fwd", logits.device.type, logits.dtype).path
    return path in (f"{HERE}.spec:forward", *_launchers("forward", FUSED).values())


def _counts(logits: Tensor) -> bool:
    return choose(MEAN, logits.device.type, logits.dtype).path == TABLE[MEAN].launchers["cuda"]


def _traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
