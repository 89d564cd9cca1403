"""What a trace found, as plain records, and as text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

KINDS = ("parameter", "frozen weight", "gradient", "optimizer state", "input", "saved for backward", "other")


@dataclass(frozen=True)
class Row:
    """One tensor's storage.

    Attributes:
        bytes: of the storage; `shape` and `dtype` are those of the tensor that it was made for.
        kind: one of KINDS: the first that applies.
        op: what made it; "leaf" where it existed before the trace.
        module: the module that ran then, by its name in the model.
        where: the line of code that ran then; "" inside of autograd's own nodes.
        owners: who holds it at the peak: parameters by name, gradients, optimizer state, saves by their line of code.
        sources: the tensors that it was computed from, as op @ module.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: str
    op: str
    module: str
    where: str
    owners: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class MemoryReport:
    """The state of memory at the peak of a step.

    Attributes:
        peak_bytes: of all storages alive at once, those that existed before included.
        phase: in which part of the step.
        count: how many they are.
        kinds: kind -> bytes.
        tensors: the largest ones, whatever they are.
        leaves: the largest of those that existed before: weights, optimizer state, inputs.
        leaf_bytes, leaf_count: of all of those.
        saved: line of code -> bytes that it keeps for the backward, largest first, without leaves. What several lines
            keep counts for each.
        allocator_bytes: the most that a CUDA device's allocator held, buffers inside of PyTorch's kernels
            included.
    """

    peak_bytes: int
    phase: str
    count: int
    kinds: dict[str, int]
    tensors: tuple[Row, ...]
    leaves: tuple[Row, ...]
    leaf_bytes: int
    leaf_count: int
    saved: dict[str, int]
    allocator_bytes: int | None = None

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterable[str]:
        """The report as text."""
        yield f"peak {size(self.peak_bytes)} in the {self.phase}, {self.count} tensors"
        if self.allocator_bytes is not None:
            yield f"the device's allocator held at most {size(self.allocator_bytes)}"
        for kind in KINDS:
            if self.kinds.get(kind):
                yield f"  {size(self.kinds[kind]):>16s}  {kind}"
        yield f"the {len(self.tensors)} largest tensors then"
        for rows in _alike(self.tensors):
            yield from _lines(rows)
        yield f"input leaves: {self.leaf_count}, {size(self.leaf_bytes)}; the largest"
        for rows in _alike(self.leaves):
            yield f"  {_head(rows)}  {', '.join(rows[0].owners) or 'held outside'}"
        yield "kept for the backward, by the line that keeps it"
        for place, nbytes in list(self.saved.items())[: max(len(self.tensors), 1)]:
            yield f"  {size(nbytes):>16s}  {place}"


def _alike(rows: Iterable[Row]) -> list[list[Row]]:
    """Tensors that differ in nothing but the layer's number are shown as one."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        texts = row.kind, row.op, row.module, row.where, *row.owners, *row.sources
        groups.setdefault((row.bytes, row.shape, row.dtype, *map(general, texts)), []).append(row)
    return list(groups.values())


def general(name: str) -> str:
    """A module's name with its layer's number left out."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _head(rows: list[Row]) -> str:
    shape = "x".join(map(str, rows[0].shape)) or "scalar"
    count = f"{len(rows)} x " if len(rows) > 1 else ""
    return f"{count + size(rows[0].bytes):>16s}  {rows[0].dtype} {shape}"


def _lines(rows: list[Row]) -> Iterable[str]:
    row = rows[0]
    made = " ".join(part for part in (row.op, row.module and f"@ {row.module}", row.where and f"({row.where})") if part)
    yield f"  {_head(rows)}  {row.kind}: {made}"
    if row.sources:
        yield f"{'':20s}from {'; '.join(row.sources)}"
    if row.owners:
        yield f"{'':20s}held by {'; '.join(row.owners)}"


def size(nbytes: int) -> str:
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << scale:
            return f"{nbytes / (1 << scale):.1f} {unit}"
    return f"{nbytes} B"
