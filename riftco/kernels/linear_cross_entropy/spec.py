"""What linear + cross-entropy means, in plain torch. C hidden size, V vocabulary; rows are x's leading dimensions.

slice_bytes and n_labelled say how much work is done at once and on which rows; they do not change the meaning.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cross_entropy.spec import backward as d_logits_of
from ..cross_entropy.spec import forward as losses_of

NO_OPTIONS = (0.0, 0.0, 0.0, 1.0)  # label_smoothing, z_loss, softcap, logit_scale of cross-entropy


def forward(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, row_weight: Tensor | None,
    ignore_index: int, slice_bytes: int, n_labelled: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [..., C], weight [V, C], bias [V], target [...] -> loss [...], lse [...] of the logits x weight^T + bias.

    A row without a label is not read: its x may hold NaN.
    """
    logits = F.linear(_live_rows(x, target, row_weight, ignore_index), weight, bias)
    loss, top, log_total, *_ = losses_of(logits, target, row_weight, None, ignore_index, *NO_OPTIONS, False)
    return loss, top + log_total


def backward(
    d_loss: Tensor | None, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, row_weight: Tensor | None,
    ignore_index: int, slice_bytes: int, n_labelled: int | None, accum_dtype: torch.dtype,
    need_x: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, lse, d_x, d_weight, d_bias) of sum(d_loss * loss); d_loss None means ones. Unneeded gradients are empty.

    With g = d_logits: d_x = g weight, d_weight = g^T x, d_bias = sum of g over rows.
    """
    rows = _live_rows(x, target, row_weight, ignore_index)
    logits = F.linear(rows, weight, bias)
    loss, top, log_total, *_ = losses_of(logits, target, row_weight, None, ignore_index, *NO_OPTIONS, False)
    upstream = torch.ones_like(loss) if d_loss is None else d_loss
    options = (ignore_index, *NO_OPTIONS)
    g = d_logits_of(upstream, None, logits, target, row_weight, None, top, log_total, *options)
    wide = torch.promote_types(weight.dtype, accum_dtype)
    g2, x2 = g.reshape(target.numel(), weight.shape[0]), rows.reshape(target.numel(), weight.shape[1])
    d_x = (g2 @ weight).view(x.shape) if need_x else x.new_empty(0)
    d_weight = g2.to(wide).t() @ x2.to(wide) if need_weight else weight.new_empty(0, dtype=wide)
    d_bias = g2.to(loss.dtype).sum(0) if need_bias else loss.new_empty(0)
    return loss, top + log_total, d_x, d_weight, d_bias


def live(target: Tensor, row_weight: Tensor | None, ignore_index: int) -> Tensor:
    """The rows that carry loss: a label, and a weight that is not 0."""
    labelled = (target != ignore_index) & (target >= 0)
    return labelled if row_weight is None else labelled & (row_weight != 0)


def _live_rows(x: Tensor, target: Tensor, row_weight: Tensor | None, ignore_index: int) -> Tensor:
    return x.masked_fill(~live(target, row_weight, ignore_index).unsqueeze(-1), 0.0)
