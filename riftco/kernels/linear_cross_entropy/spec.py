"""What linear + cross-entropy means, in plain torch, unsliced. problem.Problem names the arguments."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cross_entropy.spec import forward as losses_of
from ..cross_entropy.spec import forward_backward, forward_backward_, lse_of
from . import labels
from .problem import Problem, meaning


def forward(*arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, log_prob, entropy, argmax), each [...]; the last three are empty without `metrics`.

    The logits are x W^T + bias + lora_scale (x A^T) B^T. A row without a label is not read: its x may hold NaN.
    """
    p = Problem(*arguments)
    return _losses(p, _logits(p, _rows(p)))


def backward(
    d_loss: Tensor | None, *arguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`forward`, and d_x, d_weight, d_bias, d_lora_a, d_lora_b of sum(d_loss * loss); d_loss None means ones.

    Behind Problem's stand accum_dtype, five booleans: which gradients are needed (the others are empty), and places of
    cross_entropy.spec, where that is known: it changes no result. With g the
    gradient of the logits: d_x = g W + scale (g B) A, d_W = g^T x, d_A = scale (g B)^T x, d_B = scale g^T (x A^T).
    """
    n = len(Problem._fields)
    p, accum_dtype, needs = Problem(*arguments[:n]), *arguments[n : n + 2]
    x = _rows(p)
    logits = _logits(p, x)
    results = _losses(p, logits)
    g = _d_logits(p, logits, d_loss).reshape(-1, p.V)
    flat = x.reshape(-1, p.C)
    wide = torch.promote_types(p.x.dtype, accum_dtype)
    d_x = p.x.new_empty(0)
    d_w = p.x.new_empty(0, dtype=p.weight_grad_dtype(accum_dtype))
    d_bias, d_a, d_b = (p.x.new_empty(0, dtype=p.acc) for _ in range(3))
    a, b = p.lora_a, p.lora_b
    if needs[0]:
        d_x = p.base.backward(g, meaning)
        if a is not None and b is not None:
            d_x = d_x + p.lora_scale * (g @ b.to(g.dtype)) @ a.to(g.dtype)
        d_x = d_x.view(p.x.shape)
    if needs[1]:
        d_w = (g.to(wide).t() @ flat.to(wide)).to(p.weight_grad_dtype(accum_dtype))
    if needs[2]:
        d_bias = g.to(p.acc).sum(0)
    if needs[3]:
        assert a is not None and b is not None
        d_a = p.lora_scale * (g.to(p.acc) @ b.to(p.acc)).t() @ flat.to(p.acc)
    if needs[4]:
        assert a is not None and b is not None
        d_b = p.lora_scale * g.to(p.acc).t() @ (flat.to(p.acc) @ a.to(p.acc).t())
    return *results, d_x, d_w, d_bias, d_a, d_b


def scale_(g: Tensor, scale: Tensor) -> None:
    """g *= scale, a tensor of one value; the product is taken in scale's dtype and rounded once."""
    g.copy_(g.to(scale.dtype) * scale)


def _rows(p: Problem) -> Tensor:
    return p.x.masked_fill(~p.live().unsqueeze(-1), 0.0)


def _logits(p: Problem, x: Tensor) -> Tensor:
    logits = p.base.forward(x, p.bias, meaning)
    if p.lora_a is None or p.lora_b is None:
        return logits
    return logits + p.lora_scale * F.linear(F.linear(x, p.lora_a.to(x.dtype)), p.lora_b.to(x.dtype))


def _losses(p: Problem, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    results: tuple[Tensor, ...]
    if p.label_weight is None:
        results = losses_of(logits, p.target, p.row_weight, p.class_weight, *p.options, p.metrics)
    else:
        results = labels.forward(
            losses_of, logits, p.target, p.label_weight, p.row_weight, p.ignore_index, p.softcap, p.logit_scale,
            p.metrics,
        )  # fmt: skip
    loss, top, log_total, log_prob, entropy, argmax = results
    return loss, lse_of(top, log_total, p.softcap, p.logit_scale), log_prob, entropy, argmax


def _d_logits(p: Problem, logits: Tensor, d_loss: Tensor | None) -> Tensor:
    if p.label_weight is None:
        return forward_backward(
            logits, p.target, p.row_weight, p.class_weight, d_loss, *p.options, metrics=False, inplace=False
        )[-1]
    g = logits.clone()
    labels.forward_backward_(
        forward_backward_, g, p.target, p.label_weight, p.row_weight, d_loss, p.ignore_index, p.softcap,
        p.logit_scale, False,
    )  # fmt: skip
    return g
