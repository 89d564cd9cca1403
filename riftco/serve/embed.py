"""Texts as vectors: hidden states of the decoder, pooled. Their rows are in a cache of their own, so no slot changes.

C hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..models import KVCache
from .bank import AdapterSet
from .engine import Engine

PAGE = 16  # rows; short inputs beside a long one take no more than they need


def embed(
    engine: Engine, inputs: Sequence[Sequence[int]], pooling: str = "mean", key: AdapterSet = ()
) -> Iterator[dict[int, Tensor]]:
    """Vectors of unit length, float32 [C], by the inputs' indices, as they are done: one forward for each step of the
    iterator, of no more than the engine's chunk of rows.

    Args:
        inputs: tokens, each at least one and no more than the engine's window.
        pooling: "mean" over the tokens, or the "last" one's.
        key: the adapters, as AdapterBank.set_of gives them.
    """
    at = 0
    while at < len(inputs):
        end, rows = at + 1, len(inputs[at])
        while end < len(inputs) and rows + len(inputs[end]) <= engine.chunk:
            rows += len(inputs[end])
            end += 1
        lengths = [len(tokens) for tokens in inputs[at:end]]
        cache = KVCache(
            engine.model.config, end - at, max(lengths), dtype=engine.cache.dtype, layout="paged", page_size=PAGE,
            pages=sum(-(-n // PAGE) for n in lengths), undo=None, device=engine.model.device,
        )  # fmt: skip
        if rows > engine.chunk:  # one long input
            yield from _long(engine, cache, inputs[at], at, pooling, key)
        else:
            flat = [token for tokens in inputs[at:end] for token in tokens]
            states = engine.hidden(flat, list(enumerate(lengths)), cache, key).split(lengths)
            yield {at + i: unit(of.float().mean(0) if pooling == "mean" else of[-1]) for i, of in enumerate(states)}
        at = end


def _long(
    engine: Engine, cache: KVCache, tokens: Sequence[int], index: int, pooling: str, key: AdapterSet
) -> Iterator[dict[int, Tensor]]:
    total = torch.zeros(engine.model.config.hidden_size, device=engine.model.device)
    for start in range(0, len(tokens), engine.chunk):
        if start:
            yield {}
        part = tokens[start : start + engine.chunk]
        states = engine.hidden(part, [(0, len(part))], cache, key)
        total = total + states.float().sum(0)
    yield {index: unit(total / len(tokens) if pooling == "mean" else states[-1])}


def unit(v: Tensor) -> Tensor:
    return torch.nn.functional.normalize(v.float(), dim=0)
