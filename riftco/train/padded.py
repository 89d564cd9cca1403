"""The walk of a run that is one chunk, padded: all that differs from run to run is read on the device.

So its gradients are the same work for every run of up to T rows, and can be recorded (train.capture).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..functional import Cache, attention_with_cache
from ..models import Decoder, KVCache
from .chunked import differentiate


class PaddedRun(NamedTuple):
    """A run of n rows behind `first` rows of a slot, padded to T. What is padded has no label.

    Attributes:
        input_ids, target, positions: int64 [T]; target is negative where there is no label.
        row_weight: float32 [T].
        slot, first: int64 [1]; the rows before the run are first in number, and the slot's.
        bounds: int64 [2], 0 and n.
        denominator: float32 [], what the summed loss is divided by.
    """

    input_ids: Tensor
    target: Tensor
    positions: Tensor
    row_weight: Tensor
    slot: Tensor
    first: Tensor
    bounds: Tensor
    denominator: Tensor


class _Alone:
    """Attention of the run's rows over what its slot holds and over each other; rows that are padded give 0."""

    def __init__(self, run: PaddedRun, cache: Cache | KVCache):
        self.run, self.cache = run, cache

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        # nobody reads the one layer of a cache that is no server's
        cache, place = self.cache.layer(layer) if isinstance(self.cache, KVCache) else (self.cache, 0)
        run = self.run
        out = attention_with_cache(
            q[0], k[0], v[0], cache, place, run.slot, run.first, cu_seqlens_q=run.bounds,
            max_seqlen_q=len(run.input_ids), **how,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out[None]


def walk_padded(model: Decoder, run: PaddedRun, cache: Cache | KVCache, reach: int, recompute: bool) -> Tensor:
    """Add the gradients of a run's loss to the parameters' `.grad`, where gradients are wanted; the loss, float32.

    Args:
        cache: whose slot the rows stand behind; a Cache where they stand behind none.
        reach, recompute: as the model's `run` and `walk` take them.
    """
    mode = "block" if recompute else "disabled"
    hidden = model.run(
        run.input_ids[None], run.positions, reach, None, _Alone(run, cache), checkpointing=mode
    )  # fmt: skip
    loss = model.head_loss(
        hidden[0], run.target, row_weight=run.row_weight, n_labelled=len(run.target), denominator=run.denominator
    )
    differentiate(loss)
    return loss.detach().float()
