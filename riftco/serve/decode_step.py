"""The decode step: the next tokens of each of some slots, padded to one of a few shapes; on CUDA a graph for each.

Recorded or not, it is one function over the same buffers, so replies do not depend on it. What changes from step to
step (tokens, slots, lengths) is read from those buffers; pages that a slot gets are written into the block table, which
stays where it is.

n rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models import Decoder, KVCache
from ..models.kv_cache import RowStep
from ..models.kv_rows import Ring
from ..train.capture import Capture, Captured, CudaCapture, attempt
from .bank import AdapterSet
from .graphs import Graph, Graphs
from .host import DeviceRow, sent

log = logging.getLogger(__name__)
MOST = 64  # graphs that are kept; one of a set of adapters that serves no more leaves when it is the longest unused
MOST_ROWS = 8  # of a slot: its newest token and guesses behind it


class Served(NamedTuple):
    """What a step gives: logits [n, V], and the likeliest token of each row [n], int64."""

    logits: Tensor
    likeliest: Tensor


class Row(NamedTuple):
    """One slot's next tokens, behind the `position` rows that it holds."""

    slot: int
    position: int
    tokens: Sequence[int]


class Shape(NamedTuple):
    """How many slots a step is padded to, and rows of each: powers of two."""

    slots: int
    each: int


class _Buffers(DeviceRow):
    """slots, positions and counts [slots] and tokens [slots * each], one behind the other."""

    def __init__(self, shape: Shape, device: torch.device):
        super().__init__(shape.slots * (3 + shape.each), device)
        self.shape = shape

    def parts(self) -> tuple[Tensor, ...]:
        n = self.shape.slots
        return self.there.split([n, n, n, n * self.shape.each])

    def fill(self, rows: Sequence[Row]) -> None:
        more, each = self.shape.slots - len(rows), self.shape.each
        numbers = [row.slot for row in rows] + [-1] * more
        numbers += [row.position for row in rows] + [0] * more
        numbers += [len(row.tokens) for row in rows] + [0] * more
        for row in rows:
            numbers += row.tokens
            numbers += [0] * (each - len(row.tokens))
        self.writable().copy_(torch.tensor(numbers + [0] * (more * each)))
        self.send()

    def wanted(self, rows: Sequence[Row]) -> Tensor | slice:
        """Where the rows stand among all of the shape's."""
        each = self.shape.each
        if all(len(row.tokens) == each for row in rows):
            return slice(0, len(rows) * each)
        at = [i * each + j for i, row in enumerate(rows) for j in range(len(row.tokens))]
        return sent(at, torch.int64, self.there.device)

    def empty(self) -> None:
        """Rows of no slot: a step over them writes nothing."""
        self.there.zero_()
        self.parts()[0].fill_(-1)


class DecodeStep:
    """
    Args:
        model, cache: the engine's; the model's own tensors stay where they are.
        graphs: whether to record; else every step is computed as it comes.
        capture: how; CUDA graphs by default.

    Attributes:
        sizes: powers of two, up to one that holds a row of every slot.
        off: why nothing is recorded; "" while it may be.
        captured, replayed, eager: steps.
    """

    def __init__(self, model: Decoder, cache: KVCache, *, graphs: bool = True, capture: Capture | None = None):
        self.model, self.cache = model, cache
        self.sizes = [1]
        while self.sizes[-1] < cache.slots:
            self.sizes.append(2 * self.sizes[-1])
        self._capture = capture or CudaCapture(shared=True)
        self.off = self._capture.why_not(cache.device) if graphs else "graphs are switched off"
        self.captured = self.replayed = self.eager = 0
        self._buffers: dict[Shape, _Buffers] = {}
        self._graphs: Graphs[tuple[AdapterSet, Shape], Graph] = Graphs(model, MOST)
        self._known: set[tuple[tuple[str, ...], Shape]] = set()  # ids of adapters and shapes that were recorded before

    def __call__(
        self,
        rows: Sequence[Row],
        key: AdapterSet,
        layers: Mapping[str, nn.Module],
        serving: Callable[[], AbstractContextManager],
        tokens: Tensor | None = None,
    ) -> Served:
        """Write the rows into the cache, whose `reserve` has made room for them.

        Args:
            key, layers: the adapters that the slots serve under; `serving` puts those layers into the model.
            tokens: int64 [n] on the device, in place of those of the rows, of which each has one.
        """
        most = max(len(row.tokens) for row in rows)
        shape = Shape(next(s for s in self.sizes if s >= len(rows)), 1 << (most - 1).bit_length())
        graph = None if self.off else self._graph(key, layers, shape, serving)
        buffers = self._of(shape)
        buffers.fill(rows)
        if tokens is not None:
            buffers.parts()[-1][: len(rows)].copy_(tokens)
        wanted = buffers.wanted(rows)
        if graph is None:
            self.eager += 1
            with serving():
                served = self._compute(shape)
            return Served(*(t[wanted] for t in served))
        self.replayed += 1
        graph.captured.replay()
        # copies: the next replay writes where this one did
        return Served(*(t[wanted].clone() if isinstance(wanted, slice) else t[wanted] for t in graph.captured.output))

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether these rows are a decode step."""
        most = max(len(row.tokens) for row in rows)
        rings = [group for group in self.cache.groups if isinstance(group, Ring)]
        return most == 1 or (most <= MOST_ROWS and all(ring.size >= most for ring in rings))

    def prepare(self, key: AdapterSet, layers: Mapping[str, nn.Module], serving, most: int = 1) -> None:
        """Record the steps of up to `most` rows of any number of slots, before anyone waits for them."""
        for each in (1, 2, 4, 8):
            for slots in self.sizes:
                if not self.off and each < 2 * min(most, MOST_ROWS):
                    self._graph(key, layers, Shape(slots, each), serving)

    def forget(self) -> None:
        """Give back the memory of all graphs."""
        for key in list(self._graphs):
            self._graphs.drop(key)

    def _of(self, shape: Shape) -> _Buffers:
        if shape not in self._buffers:
            self._buffers[shape] = _Buffers(shape, self.cache.device)
        return self._buffers[shape]

    def _graph(self, key: AdapterSet, layers: Mapping[str, nn.Module], shape: Shape, serving) -> Graph | None:
        if (found := self._graphs.find((key, shape), layers)) is not None:
            return found
        self._graphs.make_room()
        like = tuple(use.id for use in key), shape  # of another version the kernels are the same
        captured = self._record(shape, serving, warm=like in self._known)
        if captured is None:
            return None
        self._known.add(like)
        self.captured += 1
        made = self._graphs[key, shape] = Graph(captured, layers, self._graphs.places())
        return made

    def _record(self, shape: Shape, serving, warm: bool) -> Captured | None:
        """The step of a shape, recorded over rows of no slot; None, and `off` says why, where that cannot be."""
        self._of(shape).empty()
        with serving():
            made, why = attempt(
                lambda: self._capture(lambda: self._compute(shape), self.cache.device, warm=warm), "a recorded step"
            )
        if made is None:
            self.off = why
            self.forget()
            log.warning("decode steps stay eager: %s", why)
        return made

    @torch.no_grad()
    def _compute(self, shape: Shape) -> Served:
        slots, first, counts, tokens = self._of(shape).parts()
        step = RowStep(self.cache, slots, first, shape.each, counts if shape.each > 1 else None)
        logits = self.model.logits(self.model.hidden(tokens, kv_cache=step))
        return Served(logits, logits.argmax(-1))
