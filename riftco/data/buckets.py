"""Packed micro-batches in few shapes, for devices that compile a program for each: XLA's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from .batch import IGNORE, Batch
from .geometry import Geometry

LEAST_TOKENS, LEAST_DOCUMENTS = 64, 16


class Buckets:
    """Pads a batch to as many tokens and documents as any before it had, rounded up to a power of two.

    Rows that are added belong to no document and carry no label. All of them are computed: how many labels there are
    is not part of the shape. A batch that fits the shapes so far makes no new one.

    Args:
        tokens: most tokens of a batch, where that is known: the bucket then holds them and no more.
        documents: most documents of one, where that is known.
    """

    def __init__(self, tokens: int = 0, documents: int = 0):
        self.tokens = tokens or LEAST_TOKENS
        self.documents = _power(max(documents, LEAST_DOCUMENTS))

    @classmethod
    def of(cls, source: object) -> Buckets:
        """For what `source` hands out, as far as it says."""
        return cls(getattr(source, "tokens", 0), getattr(source, "most_documents", 0))

    def __call__(self, batch: Batch) -> Batch:
        total, documents = batch.physical_tokens, batch.geometry.sequences
        if total > self.tokens:
            self.tokens = _power(total)
        if documents > self.documents:
            self.documents = _power(documents)
        behind = self.tokens - total
        weight = torch.ones(total) if batch.row_weight is None else batch.row_weight
        cu = batch.cu_seqlens
        return replace(
            batch,
            input_ids=pad(batch.input_ids, (0, behind)),
            target=pad(batch.target, (0, behind), value=IGNORE),
            geometry=Geometry(
                pad(batch.positions, (0, behind)),
                torch.cat([cu, cu[-1:].expand(self.documents - documents)]),
                batch.max_seqlen,
            ),
            row_weight=pad(weight, (0, behind)),
            n_labelled=self.tokens,
            topk_ids=_below(batch.topk_ids, behind),
            topk_weights=_below(batch.topk_weights, behind),
        )


def _below(t: Tensor | None, rows: int) -> Tensor | None:
    return None if t is None else pad(t, (0, 0, 0, rows))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
