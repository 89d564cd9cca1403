"""Packed micro-batches in few shapes: XLA compiles a program for each, a step graph is recorded for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .batch import IGNORE, Batch
from .geometry import Geometry

LEAST_TOKENS, LEAST_DOCUMENTS = 64, 16
SHAPES = ("tokens", "documents", "labels", "longest", "weighted")


class Buckets:
    """Pads a batch to as many tokens and documents as any before it had, rounded up.

    Rows that are added belong to no document and carry no label. A batch that fits the shapes so far makes no new one.

    Args:
        tokens: most tokens of a batch, where that is known: the bucket then holds them and no more.
        documents: most documents of one, where that is known.
        fine: round tokens and labels up by an eighth at most: a new shape costs a recording. Otherwise tokens go up to
            a power of two and a loss is computed for each, labelled or not: a new shape costs a compilation.
        context: the longest document that the model takes, where it has a limit: none is named longer by rounding.
    """

    def __init__(self, tokens: int = 0, documents: int = 0, *, fine: bool = False, context: int | None = None):
        self.fine, self.context = fine, context
        self.tokens = tokens or (0 if fine else LEAST_TOKENS)
        # room for many more documents than come looks to attention like short ones, which other kernels compute
        self.documents = _power(max(documents, 1 if fine else LEAST_DOCUMENTS))
        self.labels = self.longest = 0
        self.weighted = not fine  # whether every batch comes with weights: some, without, have another shape

    @classmethod
    def of(cls, source: object) -> Buckets:
        """For what `source` hands out, as far as it says."""
        return cls(getattr(source, "tokens", 0), getattr(source, "most_documents", 0))

    def __call__(self, batch: Batch) -> Batch:
        total, documents = batch.physical_tokens, batch.geometry.sequences
        if total > self.tokens:
            self.tokens = _eighths(total) if self.fine else _power(total)
        if documents > self.documents:
            self.documents = _power(documents)
        behind = self.tokens - total
        weight, cu = batch.row_weight, batch.cu_seqlens
        if self.fine:
            self.labels = max(self.labels, min(_eighths(batch.n_labelled), self.tokens))
            rounded = _power(batch.max_seqlen)
            if self.context is not None:
                rounded = max(min(rounded, self.context), batch.max_seqlen)
            self.longest = max(self.longest, rounded)
            self.weighted = self.weighted or weight is not None
        else:
            self.labels, self.longest = self.tokens, batch.max_seqlen
        if self.weighted and weight is None:
            weight = torch.ones(total)
        return replace(
            batch,
            input_ids=pad(batch.input_ids, (0, behind)),
            target=pad(batch.target, (0, behind), value=IGNORE),
            geometry=Geometry(
                pad(batch.positions, (0, behind)),
                torch.cat([cu, cu[-1:].expand(self.documents - documents)]),
                self.longest,
            ),
            row_weight=None if weight is None else pad(weight, (0, behind)),
            n_labelled=self.labels,
            topk_ids=_below(batch.topk_ids, behind),
            topk_weights=_below(batch.topk_weights, behind),
        )

    def state_dict(self) -> dict[str, int]:
        """The shapes so far: what is drawn for a batch, and how its sums round, depends on them."""
        return {name: int(getattr(self, name)) for name in SHAPES}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for name in SHAPES:
            setattr(self, name, type(getattr(self, name))(state[name]))


def _below(t: Tensor | None, rows: int) -> Tensor | None:
    return None if t is None else pad(t, (0, 0, 0, rows))


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _eighths(n: int) -> int:
    """n, or up to an eighth more: a multiple of a sixteenth of the power of two above it."""
    unit = max(_power(n) // 16, 1)
    return -(-n // unit) * unit


def halves(n: int) -> int:
    """n, or up to a half more: a power of two, or three quarters of one."""
    power = _power(n)
    return 3 * power // 4 if n <= 3 * power // 4 else power
