"""Loss, perplexity and token accuracy on examples that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..data import Batch
from ..functional import cross_entropy
from .metrics import Evaluation

LOGITS_BYTES = 32 << 20


def evaluate(model, batches: Iterable[Batch], device: torch.device | str = "cpu") -> Evaluation:
    """Evaluate `model` (put into evaluation mode while this runs).

    Args:
        model: has `hidden(input_ids, positions=, cu_seqlens=, max_seqlen=)` and `logits`, as riftco.models.Decoder.
        batches: packed examples with at least one label among them.

    Logits exist for labelled rows only, at most 32 MiB of them at once.
    """
    training = model.training
    float64 = "cpu" if torch.device(device).type == "mps" else device  # Metal has no float64
    loss = torch.zeros((), dtype=torch.float64, device=float64)
    right = torch.zeros((), dtype=torch.int64, device=device)
    tokens = 0
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                there = batch.to(device)
                hidden = model.hidden(
                    there.input_ids,
                    positions=there.positions,
                    cu_seqlens=there.cu_seqlens,
                    max_seqlen=there.max_seqlen,
                )
                rows = (batch.target >= 0).nonzero().squeeze(-1).to(device)
                for some in rows.split(_rows_at_once(model)):
                    logits = model.logits(hidden[some])
                    target = there.target[some]
                    weight = None if there.row_weight is None else there.row_weight[some]
                    total = cross_entropy(logits, target, row_weight=weight, reduction="sum")
                    assert isinstance(total, Tensor)  # a pair only with return_lse
                    loss += total.to(loss.device).double()
                    right += (logits.argmax(-1) == target).sum()
                tokens += batch.n_labelled
    finally:
        model.train(training)
    if not tokens:
        raise ValueError("nothing to evaluate: no example has a labelled token")
    mean = float(loss) / tokens
    return Evaluation(
        loss=mean,
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        accuracy=int(right) / tokens,
        tokens=tokens,
    )


def _rows_at_once(model) -> int:
    vocabulary = getattr(model.lm_head, "out_features", None) or model.config.vocab_size
    return max(1, LOGITS_BYTES // (4 * vocabulary))
