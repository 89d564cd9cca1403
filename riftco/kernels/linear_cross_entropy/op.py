"""The contract of linear + cross-entropy: schema, shapes, devices, gradient. Torch-only; imports no kernel."""

import torch
from torch import Tensor

from .._arguments import flags
from .._contract import Function, checks_enabled, define, needs_grad, once_differentiable
from .._frozen_weight import FrozenWeight
from ..cross_entropy import op as cross_entropy
from ..cross_entropy.checks import check_options, check_targets, class_weight_for, ignored
from ..cross_entropy.op import Metrics
from . import sharded, spec
from .checks import OP, autocast, check, check_kinds, check_lora, check_sharded, is_shard, shifted, taken_apart
from .problem import OPTIONS, TENSORS, Problem

HERE = "riftco.kernels.linear_cross_entropy"
COMPUTE_ALL = -1  # as n_labelled: every row is computed, and those without a label are masked
FIELDS = Problem._fields
TENSOR_FIELDS = FIELDS[: FIELDS.index("V")]
SLICE_BYTES, SLICE_BYTES_LEARNING = 256 << 20, 512 << 20
TRAINABLE = ("x", "weight", "bias", "lora_a", "lora_b")
ROWWISE = "Tensor loss, Tensor lse, Tensor log_prob, Tensor entropy, Tensor argmax"


def _fake_fwd(*arguments):
    p = Problem(*arguments)
    rows = [p.x.new_empty(p.rows, dtype=p.acc) for _ in range(2)]
    more = [p.x.new_empty(p.rows if p.metrics else 0, dtype=p.acc) for _ in range(2)]
    return *rows, *more, p.x.new_empty(p.rows if p.metrics else 0, dtype=torch.int64)


def _fake_bwd(d_loss, *arguments):
    rest, (accum_dtype, needs, *_) = arguments[: len(FIELDS)], arguments[len(FIELDS) :]
    p = Problem(*rest)
    R = 0 if p.lora_a is None else p.lora_a.shape[0]
    shapes = (p.x.shape, (p.V, p.C), (p.V,), (R, p.C), (p.V, R))
    dtypes = (p.x.dtype, p.weight_grad_dtype(accum_dtype), p.acc, p.acc, p.acc)
    grads = [p.x.new_empty(s if need else 0, dtype=d) for s, d, need in zip(shapes, dtypes, needs)]
    return *_fake_fwd(*rest), *grads


def _launchers(function: str) -> dict[str, str]:
    modules = {"cpu": f"{HERE}.cpu", "cuda": f"{HERE}.cuda", "mps": "riftco.metal.linear_cross_entropy"}
    modules["xla"] = "riftco.tpu.linear_cross_entropy"
    return {device: f"{module}:{function}" for device, module in modules.items()}


fwd = define(
    "linear_cross_entropy_fwd",
    f"({TENSORS}, {OPTIONS}) -> ({ROWWISE})",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers=_launchers("forward"),
)
bwd = define(
    "linear_cross_entropy_bwd",
    f"(Tensor? d_loss, {TENSORS}, {OPTIONS}, ScalarType accum_dtype, bool[] needs, Tensor? places=None) "
    f"-> ({ROWWISE}, Tensor d_x, Tensor d_weight, Tensor d_bias, Tensor d_lora_a, Tensor d_lora_b)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers=_launchers("backward"),
)


# what a mean multiplies by, and where the rows are that carry loss: in one launch
places = define(
    "linear_cross_entropy_places",
    "(Tensor target, Tensor? row_weight, int ignore_index) -> (Tensor, Tensor)",
    fake=lambda target, row_weight, ignore_index: (
        target.new_empty((), dtype=torch.float32),
        target.new_empty(3, dtype=torch.int64),
    ),
    spec="riftco.kernels.cross_entropy.spec:places",
    launchers={
        "cuda": "riftco.kernels.cross_entropy.cuda:places",
        "mps": "riftco.kernels.cross_entropy.spec:places",
    },
)
scale_ = define(
    "linear_cross_entropy_scale_",
    "(Tensor(a!) g, Tensor scale) -> ()",
    fake=lambda g, scale: None,
    spec=f"{HERE}.spec:scale_",
    launchers={"cuda": "riftco.kernels.cross_entropy.cuda:scale_", "mps": "riftco.metal.cross_entropy:scale_"},
)


class SummedLoss(Function):
    """The sum of the losses times `factor`. Its gradients are taken in the forward: no logits are computed twice.

    The factor is part of those gradients, so that an upstream gradient of 1 leaves nothing to do; not in float16, where
    a mean's gradients are too small for it: there they are multiplied in the backward, together with the upstream.
    """

    @staticmethod
    def forward(*arguments):
        *rest, factor, accum_dtype, needs, counted = arguments
        p = Problem(*rest)
        loss, *results = bwd(_upstream(p, factor), *p, accum_dtype, list(needs), counted)
        total = loss.sum()
        return total if factor is None else total * factor, loss, *results

    @staticmethod
    def setup_context(ctx, inputs, output):
        *rest, factor, ctx.accum_dtype, ctx.needs, _ = inputs
        p = Problem(*rest)
        grads = output[6:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.options, ctx.dtypes = p[len(TENSOR_FIELDS) :], _dtypes(p)
        ctx.held_back = p.x.dtype == torch.float16 and factor is not None
        # XLA's tensors are values: an operator there cannot write into its arguments
        ctx.traced = _traced() or p.x.device.type == "xla"
        # In eager the first backward scales these buffers in place and gives them away; a second one (retain_graph)
        # recomputes. A traced backward cannot branch on having run before: it multiplies out of place.
        ctx.held = None if ctx.traced else grads
        ctx.save_for_backward(factor, *(grads if ctx.traced else p[: len(TENSOR_FIELDS)]))

    @staticmethod
    @once_differentiable
    def backward(ctx, d_total, *_):
        if d_total is None:
            return (None,) * (len(FIELDS) + 4)
        factor, *saved = ctx.saved_tensors
        scale = d_total * factor if ctx.held_back else d_total
        if ctx.traced:
            return _returned([_scaled(g, scale) for g in saved], ctx.dtypes, ctx.needs, 4)
        if ctx.held is not None:
            grads, ctx.held = ctx.held, None
        else:
            p = Problem(*saved, *ctx.options)
            grads = bwd(_upstream(p, factor), *p, ctx.accum_dtype, list(ctx.needs))[5:]
        for g, need in zip(grads, ctx.needs):
            if need:
                scale_(g, scale)
        return _returned(grads, ctx.dtypes, ctx.needs, 4)


class RowLosses(Function):
    """The losses of the rows; the gradient recomputes the logits, a slice at a time."""

    @staticmethod
    def forward(*arguments):
        return fwd(*arguments[:-2])

    @staticmethod
    def setup_context(ctx, inputs, output):
        *rest, ctx.accum_dtype, ctx.needs = inputs
        p = Problem(*rest)
        ctx.mark_non_differentiable(*output[1:])
        ctx.options, ctx.dtypes = p[len(TENSOR_FIELDS) :], _dtypes(p)
        ctx.save_for_backward(*p[: len(TENSOR_FIELDS)])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, *_):
        grads = bwd(d_loss, *ctx.saved_tensors, *ctx.options, ctx.accum_dtype, list(ctx.needs))[5:]
        return _returned(grads, ctx.dtypes, ctx.needs, 2)


def _upstream(p: Problem, factor: Tensor | None) -> Tensor | None:
    return None if factor is None or p.x.dtype == torch.float16 else factor.expand(p.rows)


def _traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _scaled(g: Tensor, scale: Tensor) -> Tensor:
    return (g * scale.reshape([1] * g.dim())).to(g.dtype)  # as a 0-dim tensor the scale would be rounded to g's dtype


def _dtypes(p: Problem) -> tuple[torch.dtype | None, ...]:
    tensors = (getattr(p, name) for name in TRAINABLE)
    return tuple(None if t is None else t.dtype for t in tensors)


def _returned(grads, dtypes, needs, more: int):
    """A gradient for each field of Problem, and None for `more` arguments behind."""
    made = {n: g.to(d) for n, g, d, need in zip(TRAINABLE, grads, dtypes, needs) if need}
    return *(made.get(name) for name in FIELDS), *[None] * more


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor | FrozenWeight,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    row_weight: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    denominator: int | Tensor | None = None,
    lora: tuple[Tensor, Tensor, float] | None = None,
    slice_bytes: int | None = None,
    accum_dtype: torch.dtype = torch.float32,
    n_labelled: int | None = None,
    shift: bool = False,
    topk: Tensor | None = None,
    checkpoint: bool = False,
    return_lse: bool = False,
    return_metrics: bool = False,
    impl: str | None = None,
) -> Tensor | tuple:
    """Cross-entropy of integer labels against the logits x weight^T + bias, which never exist as a whole.

    loss[n] = row_weight[n] * ((1 - eps) w_y (lse - z_y) + eps / V * sum_v w_v (lse - z_v) + z_loss * lse^2), in nats,
    with lse = logsumexp(z), eps = label_smoothing, w the class weights (1 unless given), y the target, and
    z = softcap * tanh(s / softcap), s = logit_scale * (x weight^T + bias + scale * (x A^T) B^T). Rows are taken in
    slices of at most `slice_bytes` of logits; with "mean" or "sum" their gradients are taken in the same pass.

    Args:
        x: [..., C], float16/bfloat16/float32/float64, any strides. Differentiable.
        weight: [V, C], x's dtype, one of its strides 1 (a matmul copies anything else), differentiable; or an
            NF4Weight or GGUFWeight, frozen, decoded in stretches of at most 32 MiB; or a DTensor on a mesh of one
            dimension, whose processes hold some of the classes each (Shard(0)) and must all call. Then x, target and
            row_weight are the same in all of them, or DTensors too; losses and gradients are those of the whole head.
        target: [...], int32 or int64. `ignore_index` and every negative value mark a row without a label: loss 0,
            gradient 0, its x is not read. A value >= V gives NaN for that row (with RIFTCO_CHECK=1: IndexError).
        bias: [V], x's dtype. Differentiable.
        row_weight: [...], float32 >= 0, scales a row's loss and gradient; weight 0 drops the row. Not differentiable.
        class_weight: [V], floating, PyTorch's `weight`. Not differentiable.
        ignore_index: the label of rows without one.
        label_smoothing: eps, in [0, 1].
        z_loss: weight of lse^2; differentiable like the rest of the loss.
        softcap: bends the logits into (-softcap, softcap).
        logit_scale: multiplies the logits, > 0.
        reduction: "mean", "sum" or "none". "mean" divides by the number of rows that carry a label, never by the sum
            of row weights, or, with class weights, by the sum of class_weight[target]; with nothing labelled it is 0
            (PyTorch: NaN) with a live graph and zero gradients. "none" recomputes the logits in the backward.
        denominator: replaces that divisor in "mean" (gradient accumulation).
        lora: (A [R, C], B [V, R], scale), floating: the head's adapter. A and B are differentiable.
        slice_bytes: most bytes of logits, with the loss's own temporaries, held at once beside the gradients; at least
            one row. None: 256 MiB, and 512 where the weight learns: each slice reads and writes its gradient, of
            gigabytes. The CPU takes 32 MiB where more is allowed. On CUDA logits also lie where weight's gradient in
            accum_dtype would, for as long as that is not there.
        accum_dtype: the dtype in which weight's gradient is summed over slices: float32, or x's own. One slice's is
            rounded once, by its product.
        n_labelled: an upper bound on the rows that carry a label (B * T will do). Without it an accelerator is waited
            for once, to count them; under torch.compile and CUDA graph capture all rows are computed instead. Fewer
            than there are is an error: ValueError on the CPU, a NaN loss elsewhere.
        shift: row t predicts target[..., t + 1]; target, row_weight and topk are given unshifted, [..., T].
        topk: float32 [..., k] >= 0, weights of several labels a row: loss = -sum_j topk_j log softmax(z)[target_j] with
            target [..., k]; equal labels add. Not together with class_weight, label_smoothing or z_loss.
        checkpoint: recompute the logits in the backward for "mean" and "sum", too: nothing is held in between.
        return_lse: also return the rows' lse (0 on rows without a label), not differentiable.
        return_metrics: also return `Metrics` (loss, lse, log_prob, entropy, argmax, accuracy), not differentiable.
        impl: "spec" runs the plain-torch meaning, unsliced, under autograd (double backward works).

    Returns:
        The loss: float32 (float64 for float64 x); a scalar, or [...] for reduction "none"; then lse, then metrics.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.
        IndexError: with RIFTCO_CHECK=1, a target >= V, with its row.

    Devices: cpu, cuda (cuBLAS and Triton), mps (PyTorch's products and Metal), xla (plain torch on slices; not a
        GGUFWeight, whose product it has not).
    Memory: slice_bytes, the gradients asked for (weight's in accum_dtype), O(rows); 32 MiB more for a frozen weight.
    Numerics: logits are rounded to x's dtype once (with `lora`, its part once before), their gradient once; the loss is
        float32; deterministic. Under autocast x, weight and bias are cast as F.linear's are.
    Source: Hsu et al. 2024, "Liger Kernel: efficient Triton kernels for LLM training", section 3.2.
    """
    if slice_bytes is None:
        slice_bytes = SLICE_BYTES_LEARNING if isinstance(weight, Tensor) and needs_grad(weight) else SLICE_BYTES
    flags(OP, shift=shift, checkpoint=checkpoint, return_lse=return_lse, return_metrics=return_metrics)
    if is_shard(weight):
        given_up = {
            "class_weight": class_weight, "label_smoothing": label_smoothing, "lora": lora, "shift": shift,
            "topk": topk, "return_metrics": return_metrics, "impl": impl,
        }  # fmt: skip
        check_sharded(x, weight, target, bias, row_weight, given_up, reduction, denominator)
        check_options(OP, ignore_index, label_smoothing, z_loss, softcap, logit_scale)
        ignore_index = ignored(ignore_index, target)
        options = (ignore_index, float(z_loss), float(softcap or 0.0), float(logit_scale), slice_bytes, n_labelled)
        loss, lse, target = sharded.losses(x, weight, target, bias, row_weight, options)
        if reduction == "mean":
            if denominator is None:
                denominator = ((target != ignore_index) & (target >= 0)).sum().clamp(min=1)
            loss = loss.sum() / denominator
        elif reduction == "sum":
            loss = loss.sum()
        return (loss, lse) if return_lse else loss
    check_kinds(x, weight, target, bias, row_weight, class_weight, topk)
    check_options(OP, ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    ignore_index = ignored(ignore_index, target)
    x, weight, bias = autocast(x, weight, bias)
    a, b, scale = (None, None, 1.0) if lora is None else check_lora(lora)
    if shift:
        target, row_weight, topk = shifted(target, row_weight, topk, ignore_index)
    packed, absmax, kind, block = taken_apart(weight)
    p = Problem(
        x, packed, absmax, target, bias, row_weight,
        class_weight_for(class_weight, x), topk, a, b, weight.shape[0],
        kind, block, float(scale), ignore_index, float(label_smoothing), float(z_loss),
        0.0 if softcap is None else float(softcap), float(logit_scale), return_metrics, slice_bytes, n_labelled,
    )  # fmt: skip
    check(p, weight, reduction, denominator, accum_dtype, impl)
    if checks_enabled():
        check_targets(target, p.V, ignore_index)
    if n_labelled is None and torch.compiler.is_compiling():
        p = p._replace(n_labelled=COMPUTE_ALL)
    factor = counted = None
    if reduction == "mean":
        factor, counted = _factor(p, denominator)
    needs = tuple(needs_grad(t) for t in (x, None if p.frozen else packed, bias, a, b))
    if any(needs) and impl is None and reduction != "none" and not checkpoint:
        total, *rows = SummedLoss.apply(*p, factor, accum_dtype, needs, counted)
    else:
        if impl == "spec":
            rows = list(spec.forward(*p))
        elif any(needs):
            rows = list(RowLosses.apply(*p, accum_dtype, needs))
        else:
            rows = list(fwd(*p))
        total = rows[0] if reduction == "none" else rows[0].sum()
        total = total if factor is None else total * factor
    if not (return_lse or return_metrics):
        return total
    more = (rows[1].detach(),) if return_lse else ()
    return (total, *more, _metrics(p, [r.detach() for r in rows[:5]])) if return_metrics else (total, *more)


def _factor(p: Problem, denominator: int | float | Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The reciprocal of what "mean" divides by, and `places` where that comes with it: the launch that a call saves."""
    plain = denominator is None and p.class_weight is None and p.label_weight is None and p.acc == torch.float32
    if not plain or p.x.device.type == "xla" or _traced():
        return denominator_of(p, denominator).reciprocal(), None
    if p.n_labelled is None:
        return places(p.target, p.row_weight, p.ignore_index)
    return cross_entropy.labelled(p.target, p.ignore_index)[0].reciprocal(), None


def denominator_of(p: Problem, denominator: int | float | Tensor | None) -> Tensor:
    """What "mean" divides by, on x's device, by the rule of cross_entropy."""
    if denominator is None and p.label_weight is not None:
        kept = (p.target != p.ignore_index) & (p.target >= 0) & (p.label_weight != 0)
        denominator = kept.any(-1).sum().clamp(min=1)
    elif denominator is None:
        denominator = cross_entropy.denominator_of(p.target, p.class_weight, p.ignore_index, None)
    if isinstance(denominator, Tensor):
        return denominator.detach().reshape(()).to(p.x.device, p.acc)
    return torch.full((), denominator, dtype=p.acc, device=p.x.device)


def _metrics(p: Problem, rows: list[Tensor]) -> Metrics:
    best = p.target
    if p.label_weight is not None:
        best = p.target.gather(-1, p.label_weight.argmax(-1, keepdim=True)).squeeze(-1)
    computed = rows[4] >= 0
    right = (rows[4] == best).sum(dtype=p.acc)
    loss, lse, log_prob, entropy, argmax = rows
    return Metrics(loss, lse, log_prob, entropy, argmax, right / computed.sum().clamp(min=1))
