"""Packing: documents laid end to end in one row, without padding. The shift to next tokens happens here, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .chat import Example
from .errors import DataError
from .sampler import ShuffledOrder

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """One micro-batch: documents packed into a single row of `total` tokens.

    Attributes:
        input_ids: int64 [total].
        target: int64 [total], the token that follows each position; -100 where none is trained on. The last token of
            a document is a target only, so that no label crosses a boundary.
        positions: int32 [total], counted from 0 in each document.
        cu_seqlens: int32 [documents + 1].
        max_seqlen: the longest document.
        row_weight: float32 [total], or None when every label weighs 1.
        n_labelled: labels in `target`, counted on the host.
        documents: the examples' indices in their dataset.
    """

    input_ids: Tensor
    target: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    row_weight: Tensor | None
    n_labelled: int
    documents: tuple[int, ...] = ()

    @property
    def physical_tokens(self) -> int:
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> Batch:
        tensors = {n: getattr(self, n) for n in ("input_ids", "target", "positions", "cu_seqlens", "row_weight")}
        moved: dict[str, Any] = {n: t if t is None else t.to(device, non_blocking=True) for n, t in tensors.items()}
        return replace(self, **moved)


def pack(examples: Sequence[Example], documents: Sequence[int] = ()) -> Batch:
    """Lay examples of two or more tokens end to end."""
    if not examples:
        raise DataError("cannot pack a batch of no examples")
    ids: list[int] = []
    target: list[int] = []
    weights: list[float] = []
    positions: list[int] = []
    bounds = [0]
    for example in examples:
        if len(example) < 2:
            raise DataError(f"line {example.line}: an example of {len(example)} tokens has nothing to predict")
        ids += example.ids[:-1]
        target += [i if w > 0 else IGNORE for i, w in zip(example.ids[1:], example.weights[1:], strict=True)]
        weights += example.weights[1:]
        positions += range(len(example) - 1)
        bounds.append(len(ids))
    labelled = [w for w in weights if w > 0]
    plain = all(w == 1 for w in labelled)
    return Batch(
        input_ids=torch.tensor(ids),
        target=torch.tensor(target),
        positions=torch.tensor(positions, dtype=torch.int32),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(len(e) - 1 for e in examples),
        row_weight=None if plain else torch.tensor(weights, dtype=torch.float32),
        n_labelled=len(labelled),
        documents=tuple(documents),
    )


class Loader:
    """Micro-batches of at most `tokens` tokens each, in a seeded order; a micro-batch ends with its epoch.

    Args:
        examples: the dataset.
        tokens: most tokens of a micro-batch; every example must fit.
        seed: of the order.
        epochs: stop after so many; None goes on for ever.
    """

    def __init__(self, examples: Sequence[Example], tokens: int, seed: int, epochs: int | None = None):
        for example in examples:
            if len(example) - 1 > tokens:
                raise DataError(
                    f"line {example.line}: an example of {len(example)} tokens does not fit --batch-tokens {tokens}; "
                    f"raise it to {len(example) - 1} or more"
                )
        self.examples, self.tokens, self.epochs = examples, tokens, epochs
        self.order = ShuffledOrder(len(examples), seed)

    def _draw(self) -> list[int]:
        """The documents of the next micro-batch; empty after the last epoch."""
        if self.epochs is not None and self.order.epoch >= self.epochs:
            return []
        chosen, used, epoch = [], 0, self.order.epoch
        while self.order.epoch == epoch:
            length = len(self.examples[self.order.peek()]) - 1
            if used + length > self.tokens:
                break
            chosen.append(self.order.peek())
            used += length
            self.order.advance()
        return chosen

    def next(self) -> Batch | None:
        """The next micro-batch, or None after the last epoch."""
        documents = self._draw()
        return pack([self.examples[i] for i in documents], documents) if documents else None

    def count(self) -> int:
        """How many micro-batches are left until the last epoch ends; the position stays where it is."""
        if self.epochs is None:
            raise DataError("a loader without a number of epochs does not end")
        before, n = self.order.state_dict(), 0
        while self._draw():
            n += 1
        self.order.load_state_dict(before)
        return n

    def sequential(self) -> list[Batch]:
        """Every example once, in the file's order: for evaluation."""
        batches, start, used = [], 0, 0
        for i, example in enumerate(self.examples):
            if used + len(example) - 1 > self.tokens:
                batches.append(pack(self.examples[start:i], range(start, i)))
                start, used = i, 0
            used += len(example) - 1
        return [*batches, pack(self.examples[start:], range(start, len(self.examples)))]

    def state_dict(self) -> dict[str, int]:
        return self.order.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.order.load_state_dict(state)
