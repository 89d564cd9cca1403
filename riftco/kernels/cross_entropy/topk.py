"""Cross-entropy against a few weighted classes a row, as distillation has them.

With W = sum of the weights the loss is sum_j w_j (lse - z[id_j]) and its gradient W p minus the weights at their ids:
cross-entropy's kernels give lse and W p, and the k values at the ids are made here, in float32.
"""

import torch
from torch import Tensor

from .._arguments import floating, given, indices
from .._contract import Function, checks_enabled, needs_grad, once_differentiable, same_device
from . import spec
from .checks import check_options, check_reduction, check_row_weight
from .op import bwd, fwd

NO_LABEL = -1


def _plain(softcap: float, logit_scale: float) -> tuple:
    return NO_LABEL, 0.0, 0.0, softcap, logit_scale


def _log_probs(logits, ids, top, log_total, softcap: float, logit_scale: float) -> tuple[Tensor, Tensor]:
    """(log p, u) of the classes `ids`."""
    u, s = spec.scores(logits.gather(-1, ids), softcap, logit_scale)
    return s * (u - top.unsqueeze(-1)) - log_total.unsqueeze(-1), u


class TopK(Function):
    @staticmethod
    def forward(logits, ids, weights, row, softcap, logit_scale):
        _, top, log_total, *_ = fwd(logits, row, None, None, *_plain(softcap, logit_scale), False)
        log_p, _ = _log_probs(logits, ids, top, log_total, softcap, logit_scale)
        parts = torch.where(weights != 0, -weights * log_p, 0.0).sum(-1)  # 0 times -inf would be NaN
        return torch.where(row >= 0, parts, 0.0), top, log_total

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.softcap, ctx.logit_scale = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss, *_):
        logits, ids, weights, row, top, log_total = ctx.saved_tensors
        options = ctx.softcap, ctx.logit_scale
        total = weights.sum(-1)
        up = d_loss.to(top.dtype)
        d = bwd(None, up * total, logits, row, None, None, top, log_total, *_plain(*options))
        log_p, u = _log_probs(logits, ids, top, log_total, *options)
        here = torch.zeros_like(log_p)  # the summed weight of each id: duplicates add
        for j in range(ids.shape[-1]):
            here += torch.where(ids == ids[..., j : j + 1], weights[..., j : j + 1], 0.0)
        # W p - w as W (p - 1) + (W - w): the digits of a confident row stay
        value = total.unsqueeze(-1) * log_p.expm1() + (total.unsqueeze(-1) - here)
        value = value * (up * ctx.logit_scale).unsqueeze(-1)
        if ctx.softcap:
            value = value * (1 - (u / ctx.softcap).square())
        value = torch.where((row >= 0).unsqueeze(-1), value, 0.0)
        return d.scatter(-1, ids, value.to(d.dtype)), None, None, None, None, None


def topk_cross_entropy(
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    row_weight: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    denominator: int | float | Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """-sum_j weights[.., j] * log softmax(z)[ids[.., j]] with z as in `cross_entropy`. Duplicate ids add.

    Args:
        logits: [..., V], float16/bfloat16/float32/float64, any strides. Differentiable.
        ids: [..., k], int32 or int64. A negative id is an empty place. An id >= V gives NaN for its row (with
            RIFTCO_CHECK=1: IndexError).
        weights: [..., k] floating, need not sum to 1; the teacher's probabilities. Not differentiable.
        row_weight: [...], float32 >= 0, scales a row; weight 0 skips it.
        softcap, logit_scale, reduction, impl: `cross_entropy`'s. Rows whose weights are all 0 carry no label.
        denominator: replaces the number of labelled rows in "mean".

    Returns:
        The loss: float32 (float64 for float64 logits); a scalar, or [...] for reduction "none".

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named; weights that require a gradient.
        IndexError: an id >= V with a weight, with RIFTCO_CHECK=1.

    Devices: cpu, cuda (Triton), mps (Metal), xla.
    Numerics: as `cross_entropy`; the gradient at the ids is made of differences, so that confident rows keep their
        digits. Deterministic. Memory: the gradient, made in the backward; O(rows k).
    Source: Hinton et al. 2015, "Distilling the knowledge in a neural network", section 2, on the teacher's top k.
    """
    _check(logits, ids, weights, row_weight, reduction, denominator, impl)
    check_options("topk_cross_entropy", NO_LABEL, 0.0, 0.0, softcap, logit_scale)
    V = logits.shape[-1]
    w = torch.where(ids >= 0, weights.to(torch.promote_types(logits.dtype, torch.float32)), 0.0)
    if checks_enabled() and bool(((ids >= V) & (w != 0)).any()):
        raise IndexError(f"topk_cross_entropy: an id is {int(ids.max())}, but there are {V} classes")
    w = torch.where(ids < V, w, torch.where(w != 0, torch.nan, 0.0))
    safe = torch.where((ids >= 0) & (ids < V), ids, 0).long()
    labelled = (w != 0).any(-1)
    live = labelled if row_weight is None else labelled & (row_weight != 0)
    w = w if row_weight is None else w * row_weight.to(w.dtype).unsqueeze(-1)
    # cross-entropy's kernels want a label, of which only lse's digits depend: the heaviest id keeps those of the others
    heaviest = safe.gather(-1, w.nan_to_num().argmax(-1, keepdim=True)).squeeze(-1) if ids.shape[-1] else 0
    row = torch.where(live, heaviest, NO_LABEL)
    args = (safe, w, row, float(softcap or 0.0), float(logit_scale))
    if impl == "spec":
        loss = _spec(logits, *args)
    elif needs_grad(logits):
        loss = TopK.apply(logits, *args)[0]
    else:
        loss = TopK.forward(logits, *args)[0]
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (labelled.sum().clamp(min=1) if denominator is None else denominator)


def _spec(logits, ids, weights, row, softcap: float, logit_scale: float) -> Tensor:
    """The meaning, with dense labels that start from 0 (A2.9, A2.10)."""
    u, s = spec.scores(torch.where((row >= 0).unsqueeze(-1), logits, 0.0), softcap, logit_scale)
    dense = torch.zeros_like(u).scatter_add(-1, ids, weights.to(u.dtype))
    log_p = torch.log_softmax(s * u, -1)
    return torch.where(row >= 0, -torch.where(dense != 0, dense * log_p, 0.0).sum(-1), 0.0)


def _check(logits, ids, weights, row_weight, reduction, denominator, impl) -> None:
    op = "topk_cross_entropy"
    if not floating(logits) or logits.dim() < 1:
        raise ValueError(f"{op}: logits must be floating [..., V]; got {given(logits)}")
    if not indices(ids) or ids.dim() < 1 or ids.shape[:-1] != logits.shape[:-1]:
        want = tuple(logits.shape[:-1])
        raise ValueError(f"{op}: ids must be int32 or int64 {want} + (k,); got {given(ids)}")
    if not floating(weights) or weights.shape != ids.shape:
        raise ValueError(f"{op}: weights must be floating {tuple(ids.shape)}; got {given(weights)}")
    if weights.requires_grad:
        raise ValueError(f"{op}: weights are not differentiable; detach them")
    if logits.shape[-1] == 0 and ids.numel():
        raise ValueError(f"{op}: logits have no classes (V = 0)")
    check_row_weight(op, row_weight, logits.shape[:-1])
    check_reduction(op, reduction, denominator, impl, logits.device)
    same_device(op, logits=logits, ids=ids, weights=weights, row_weight=row_weight)
