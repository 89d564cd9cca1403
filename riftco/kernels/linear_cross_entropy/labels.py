"""Several weighted labels a row, on top of a loss that knows one: no pass over the logits is added.

The dense part of the gradient is W softmax(z) with W the sum of a row's weights: what a single label of weight W gives
everywhere but at the labels, whose k entries are computed from the logits there and written over.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def forward(
    one_label: Callable, logits: Tensor, ids: Tensor, weights: Tensor, row_weight: Tensor | None, ignore_index: int,
    softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What one_label, a `forward` of cross_entropy, returns, for loss = -sum_j weights_j log softmax(z)[ids_j].

    log_prob is the weighted mean over the labels. Ids that are ignore_index or negative carry nothing; equal ids add.
    """
    row = Labels(logits, ids, weights, row_weight, ignore_index, softcap, logit_scale)
    results = one_label(logits, row.first, row.total, None, ignore_index, 0.0, 0.0, softcap, logit_scale, metrics)
    return row.corrected(results)


def forward_backward_(
    one_label: Callable, logits: Tensor, ids: Tensor, weights: Tensor, row_weight: Tensor | None,
    d_loss: Tensor | None, ignore_index: int, softcap: float, logit_scale: float, metrics: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `forward`; one_label is a `forward_backward_`, and the logits become their gradient here, too."""
    row = Labels(logits, ids, weights, row_weight, ignore_index, softcap, logit_scale)
    results = one_label(
        logits, row.first, row.total, None, d_loss, ignore_index, 0.0, 0.0, softcap, logit_scale, metrics
    )
    logits.scatter_(-1, row.index, row.gradient(results[1], results[2], d_loss).to(logits.dtype))
    return row.corrected(results)


class Labels:
    """The labels of n rows [n, k], with the logits there as they were before anything overwrote them."""

    def __init__(self, logits, ids, weights, row_weight, ignore_index, softcap, logit_scale):
        V, acc = logits.shape[-1], torch.promote_types(logits.dtype, torch.float32)
        kept = (ids != ignore_index) & (ids >= 0) & (weights != 0)
        self.weights = torch.where(kept, weights.to(acc), 0.0)
        if row_weight is not None:
            self.weights = self.weights * row_weight.to(acc).unsqueeze(-1)
        self.outside = (kept & (ids >= V)).any(-1)
        inside = kept & (ids < V)
        # an id that carries nothing points where another of its row does: what is written there is the same
        best = inside.to(torch.uint8).argmax(-1, keepdim=True)
        home = ids.gather(-1, best).where(inside.gather(-1, best), 0)
        self.index = ids.where(inside, home).long()
        self.total = self.weights.sum(-1).float()
        self.first = home.squeeze(-1).where(~self.outside, V).to(ids.dtype)
        x = logits.gather(-1, self.index).to(acc)
        bent = (x * (logit_scale / softcap)).tanh() if softcap else None
        self.u = x if bent is None else softcap * bent
        self.slope = logit_scale if bent is None else logit_scale * (1 - bent.square())
        self.s, self.softcap, self.logit_scale = 1.0 if softcap else logit_scale, softcap, logit_scale

    def log_prob(self, top: Tensor, log_total: Tensor) -> Tensor:
        return self.s * (self.u - top.unsqueeze(-1)) - log_total.unsqueeze(-1)

    def corrected(self, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        _, top, log_total, log_prob, entropy, argmax = results
        loss = -(self.weights * self.log_prob(top, log_total)).sum(-1)
        loss = loss.masked_fill(self.outside, torch.nan)
        if log_prob.numel():
            log_prob = torch.where(self.total == 0, 0.0, -loss / self.total.to(loss.dtype))
        return loss, top, log_total, log_prob, entropy, argmax

    def gradient(self, top: Tensor, log_total: Tensor, d_loss: Tensor | None) -> Tensor:
        """At the labels: W p_j minus the weights of all labels equal to j, with p - 1 taken by expm1."""
        log_p = self.log_prob(top, log_total)
        same = (self.index.unsqueeze(-1) == self.index.unsqueeze(-2)).to(log_p.dtype)
        mass = (same * self.weights.unsqueeze(-2)).sum(-1)
        total = self.weights.sum(-1, keepdim=True)
        d = (mass * log_p.expm1() + (total - mass) * log_p.exp()) * self.slope
        if d_loss is not None:
            d = d * d_loss.to(d.dtype).unsqueeze(-1)
        d = d.masked_fill(self.outside.unsqueeze(-1), torch.nan)
        return torch.where((total == 0) & ~self.outside.unsqueeze(-1), 0.0, d)
