"""What the engine is given: rows of tokens, each of a slot, and what the batch switches on.

T rows. A batch without labels is inference; labels make the labelled rows train as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNLABELLED = -1


class Refused(ValueError):
    """A request that is turned down before anything changed; the message says why, where, and what to do."""


def whole(value: Any, name: str) -> int:
    """A whole number, of numpy or torch too; a truth value is none."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without data
        pass
    raise Refused(f"{name} must be a whole number; got {value!r}")


def ids_of(given: Any, name: str) -> list[int]:
    """Token ids [T] of whatever holds them, as numbers of one's own."""
    try:
        ids = [whole(t, name) for t in (given.tolist() if hasattr(given, "tolist") else given)]
    except (TypeError, ValueError, RuntimeError):  # not to be iterated over, a tensor without data, no numbers
        raise Refused(f"{name} must be one row of token ids; got {type(given).__name__} {given!r:.60}") from None
    for token in ids:
        if not -(1 << 31) <= token < 1 << 31:
            raise Refused(f"{name}: {token} is no token id")
    return ids


class Run(NamedTuple):
    """Consecutive rows of one slot: rows [start, end) of the batch, the first one at `position`."""

    slot: int
    position: int
    start: int
    end: int


@dataclass(frozen=True)
class Batch:
    """Rows on the host; those of one slot stand together, at consecutive positions.

    Attributes:
        tokens, positions, slots: int64 [T].
        output: bool [T], the rows whose logits are wanted. A label needs none: its row's loss is made in slices.
        label: int64 [T], the token that ought to follow each row, -1 where there is none; None: inference.
        label_weight: float32 [T], 0 or more and finite where there is a label; None: 1. Other rows' is not read.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    output: Tensor
    label: Tensor | None = None
    label_weight: Tensor | None = None

    @classmethod
    def of(cls, slot: int, position: int, tokens, *, output: str = "last", label=None, label_weight=None) -> Batch:
        """Rows of one slot from `position` on; `output` is "last", "all" or "none"."""
        ids = torch.tensor(ids_of(tokens, "tokens"), dtype=torch.int64)
        slot, position = whole(slot, "slot"), whole(position, "position")
        if output not in ("last", "all", "none"):
            raise Refused(f"output must be last, all or none; got {output!r}")
        wanted = torch.full(ids.shape, output == "all")
        wanted[-1:] = output != "none"
        label = None if label is None else torch.tensor(ids_of(label, "labels"), dtype=torch.int64)
        weight = None if label_weight is None else torch.as_tensor(label_weight, dtype=torch.float32)
        at = torch.arange(position, position + len(ids))
        return cls(ids, at, torch.full_like(ids, slot), wanted, label, weight)

    @classmethod
    def serving(cls, parts: Sequence[tuple[int, int, Sequence[int], str]]) -> Batch:
        """Inference: (slot, position, tokens, output) of each slot, as `of` takes them, of callers who know them."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[bool] = []
        for slot, position, own, output in parts:
            n = len(own)
            tokens += own
            positions += range(position, position + n)
            slots += [slot] * n
            wanted += [output == "all"] * (n - 1) + [output != "none"]
        ids, at, of = torch.tensor([tokens, positions, slots], dtype=torch.int64).unbind()
        return cls(ids, at, of, torch.tensor(wanted))

    @classmethod
    def join(cls, batches: list[Batch]) -> Batch:
        """One batch of several; a label column as soon as one has it."""
        labelled = any(b.label is not None for b in batches)
        weighted = any(b.label_weight is not None for b in batches)
        whole = [b.filled(labelled, weighted) for b in batches]
        columns = {f.name: [getattr(b, f.name) for b in whole] for f in dataclasses.fields(cls)}
        joined: dict[str, Any] = {n: None if c[0] is None else torch.cat(c) for n, c in columns.items()}
        return cls(**joined)

    def filled(self, label: bool, weight: bool) -> Batch:
        """The same rows with the columns that are asked for: no label, weight 1."""
        made = {}
        if label and self.label is None:
            made["label"] = torch.full_like(self.tokens, UNLABELLED)
        if weight and self.label_weight is None:
            made["label_weight"] = torch.ones(len(self), dtype=torch.float32)
        return dataclasses.replace(self, **made)

    def __len__(self) -> int:
        return len(self.tokens)

    def slice(self, start: int, end: int) -> Batch:
        """Rows [start, end) with every field that the batch has."""
        columns = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        part: dict[str, Any] = {name: None if t is None else t[start:end] for name, t in columns.items()}
        return Batch(**part)

    def unlabelled(self) -> Batch:
        """The same rows as inference."""
        return dataclasses.replace(self, label=None, label_weight=None)

    @property
    def n_labels(self) -> int:
        return 0 if self.label is None else int((self.label >= 0).sum())

    def runs(self) -> Iterator[Run]:
        """Neighbouring rows of one slot, in the order of the rows."""
        start, positions = 0, self.positions.tolist()
        for slot, rows in itertools.groupby(self.slots.tolist()):
            end = start + len(list(rows))
            yield Run(slot, positions[start], start, end)
            start = end

    def check(self, vocab: int) -> list[Run]:
        """Its runs; refuses what is no batch, or cannot train."""
        if not len(self):
            raise Refused("a batch has one row or more")
        for field in dataclasses.fields(self):
            t = getattr(self, field.name)
            kind = {"output": torch.bool, "label_weight": torch.float32}.get(field.name, torch.int64)
            if t is not None and (t.shape != self.tokens.shape or t.dim() != 1 or t.dtype != kind):
                raise Refused(f"{field.name} must be {kind} [{len(self)}]; got {t.dtype} {tuple(t.shape)}")
        outside = ((self.tokens < 0) | (self.tokens >= vocab)).nonzero()
        if len(outside):
            row = int(outside[0])
            raise Refused(f"row {row}: token {int(self.tokens[row])} is outside the vocabulary of {vocab}")
        runs = list(self.runs())
        if len({run.slot for run in runs}) < len(runs):
            raise Refused("the rows of one slot must stand together in a batch")
        positions = self.positions.tolist()
        for run in runs:
            if positions[run.start : run.end] != list(range(run.position, run.position + run.end - run.start)):
                raise Refused(f"slot {run.slot}: its rows must be at consecutive positions from {run.position} on")
        if self.label is not None:
            self._check_labels(vocab, runs)
        return runs

    def _check_labels(self, vocab: int, runs: list[Run]) -> None:
        assert self.label is not None
        outside = ((self.label < UNLABELLED) | (self.label >= vocab)).nonzero()
        if len(outside):
            row = int(outside[0])
            raise Refused(f"row {row}: label {int(self.label[row])} is neither -1 nor in the vocabulary of {vocab}")
        for run in runs:
            labelled = (self.label[run.start : run.end] >= 0).nonzero().flatten()
            if len(labelled) and len(labelled) != run.end - run.start - int(labelled[0]):
                raise Refused(
                    f"slot {run.slot}: its labelled rows must be one run that ends its rows in the batch; "
                    "send what follows them in another batch"
                )
        check_weights(self.label, self.label_weight)


def check_weights(label: Tensor, weight: Tensor | None) -> None:
    if weight is None:
        return
    read = weight[label >= 0]
    bad = (~read.isfinite() | (read < 0)).nonzero()
    if len(bad):
        raise Refused(f"a label's weight must be finite and 0 or more; got {float(read[bad[0]])}")
