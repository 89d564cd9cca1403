"""Packed micro-batches: documents laid end to end in one row, without padding. The shift to next tokens happens here,
once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .chat import Example
from .errors import DataError
from .geometry import Geometry

IGNORE = -100
TENSORS = ("input_ids", "target", "row_weight", "topk_ids", "topk_weights")


@dataclass(frozen=True)
class Batch:
    """One micro-batch: documents packed into a single row of `total` tokens.

    Attributes:
        input_ids: int [total].
        target: int [total], the token that follows each position; negative where none is trained on. The last token
            of a document is a target only, so that no label crosses a boundary.
        geometry: where the documents lie.
        row_weight: float32 [total], or None when every label weighs 1.
        n_labelled: labels in `target`, counted on the host.
        documents: the examples' indices in their dataset.
        topk_ids, topk_weights: [total, k], several weighted labels a position; `target` is then the first of them, the
            one label that metrics read.
    """

    input_ids: Tensor
    target: Tensor
    geometry: Geometry
    row_weight: Tensor | None
    n_labelled: int
    documents: tuple[int, ...] = ()
    topk_ids: Tensor | None = None
    topk_weights: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        return self.geometry.positions

    @property
    def cu_seqlens(self) -> Tensor:
        return self.geometry.cu_seqlens

    @property
    def max_seqlen(self) -> int:
        return self.geometry.max_seqlen

    @property
    def physical_tokens(self) -> int:
        return self.input_ids.numel()

    @functools.cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of each run of labelled rows."""
        edges = np.flatnonzero(np.diff(self.target.cpu().numpy() >= 0, prepend=False, append=False))
        return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))

    def to(self, device: torch.device | str) -> Batch:
        moved: dict[str, Any] = {}
        for name in TENSORS:
            value = getattr(self, name)
            moved[name] = value if value is None else value.to(device, non_blocking=True)
        return replace(self, geometry=self.geometry.to(device), **moved)

    def halves(self) -> list[Batch]:
        """The same documents once each in two batches about equal in tokens; one batch where there is one document."""
        bounds = self.cu_seqlens.tolist()
        if len(bounds) == 2:
            return [self]
        cut = min(range(1, len(bounds) - 1), key=lambda i: abs(2 * bounds[i] - bounds[-1]))
        return [self._documents(bounds, 0, cut), self._documents(bounds, cut, len(bounds) - 1)]

    def _documents(self, bounds: list[int], first: int, last: int) -> Batch:
        rows = slice(bounds[first], bounds[last])
        part: dict[str, Any] = {n: getattr(self, n) for n in TENSORS}
        part = {n: t if t is None else t[rows] for n, t in part.items()}
        lengths = [b - a for a, b in itertools.pairwise(bounds[first : last + 1])]
        return Batch(
            geometry=Geometry.of(lengths),
            n_labelled=int((part["target"] >= 0).sum()),
            documents=self.documents[first:last],
            **part,
        )


def pack(examples: Sequence[Example], documents: Sequence[int] = ()) -> Batch:
    """Lay examples of two or more tokens end to end."""
    if not examples:
        raise DataError("cannot pack a batch of no examples")
    ids: list[int] = []
    target: list[int] = []
    weights: list[float] = []
    for example in examples:
        if len(example) < 2:
            raise DataError(f"line {example.line}: an example of {len(example)} tokens has nothing to predict")
    geometry = Geometry.of([len(e) - 1 for e in examples])  # refuses a size before anything of it is built
    for example in examples:
        ids += example.ids[:-1]
        target += [i if w > 0 else IGNORE for i, w in zip(example.ids[1:], example.weights[1:], strict=True)]
        weights += example.weights[1:]
    labelled = [w for w in weights if w > 0]
    plain = all(w == 1 for w in labelled)
    return Batch(
        input_ids=torch.tensor(ids),
        target=torch.tensor(target),
        geometry=geometry,
        row_weight=None if plain else torch.tensor(weights, dtype=torch.float32),
        n_labelled=len(labelled),
        documents=tuple(documents),
    )


def nothing() -> Batch:
    """A batch of one token without a label: its loss and gradients are 0."""
    return Batch(
        input_ids=torch.zeros(1, dtype=torch.int64),
        target=torch.full((1,), IGNORE),
        geometry=Geometry.of([1]),
        row_weight=None,
        n_labelled=0,
    )
