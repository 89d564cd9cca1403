"""Loss, perplexity and token accuracy on examples that are not trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import tpu
from ..data import Batch, Buckets
from ..functional import cross_entropy
from .metrics import Evaluation
from .ranks import Ranks

LOGITS_BYTES = 32 << 20


def evaluate(
    model, batches: Iterable[Batch], device: torch.device | str = "cpu", ranks: Ranks | None = None
) -> Evaluation:
    """Evaluate `model` (put into evaluation mode while this runs).

    Args:
        model: has `hidden(input_ids, positions=, cu_seqlens=, max_seqlen=)` and `logits`, as riftco.models.Decoder.
        batches: packed examples with at least one label among them.
        ranks: processes that each evaluate batches of their own; all get the result over all.

    Logits exist for labelled rows only, at most 32 MiB of them at once.
    """
    training = model.training
    on_tpu = torch.device(device).type == tpu.DEVICE_TYPE
    # Metal and TPUs have no float64; the latter's sums of a batch travel to the host
    float64 = "cpu" if on_tpu or torch.device(device).type == "mps" else device
    loss = torch.zeros((), dtype=torch.float64, device=float64)
    right = torch.zeros((), dtype=torch.int64, device="cpu" if on_tpu else device)
    tokens, buckets = 0, Buckets()
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                there = (buckets(batch) if on_tpu else batch).to(device)
                hidden = model.hidden(
                    there.input_ids,
                    positions=there.positions,
                    cu_seqlens=there.cu_seqlens,
                    max_seqlen=there.max_seqlen,
                )
                if on_tpu:  # every row, as the number of labels would be part of the graph
                    pieces: Iterable = _slices(len(there.target), _rows_at_once(model))
                else:
                    pieces = (batch.target >= 0).nonzero().squeeze(-1).to(device).split(_rows_at_once(model))
                sums = []
                for some in pieces:
                    logits = model.logits(hidden[some])
                    target = there.target[some]
                    weight = None if there.row_weight is None else there.row_weight[some]
                    total = cross_entropy(logits, target, row_weight=weight, reduction="sum")
                    assert isinstance(total, Tensor)  # a pair only with return_lse
                    hits = (logits.argmax(-1) == target).sum()
                    if on_tpu:
                        sums += [total, hits]
                    else:
                        loss += total.to(loss.device).double()
                        right += hits
                if on_tpu:
                    values = tpu.read(*sums)
                    loss += sum(values[::2])
                    right += int(sum(values[1::2]))
                tokens += batch.n_labelled
    finally:
        model.train(training)
    if ranks is not None and not ranks.alone:
        counts = torch.tensor([int(right), tokens], device=ranks.device)
        loss = loss.to(ranks.device)
        ranks.sum_(loss, counts)
        right, tokens = counts[0], int(counts[1])
    if not tokens:
        raise ValueError("nothing to evaluate: no example has a labelled token")
    mean = float(loss) / tokens
    return Evaluation(
        loss=mean,
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        accuracy=int(right) / tokens,
        tokens=tokens,
    )


def _slices(count: int, step: int) -> list[slice]:
    return [slice(lo, min(lo + step, count)) for lo in range(0, count, step)]


def _rows_at_once(model) -> int:
    vocabulary = getattr(model.lm_head, "out_features", None) or model.config.vocab_size
    return max(1, LOGITS_BYTES // (4 * vocabulary))
