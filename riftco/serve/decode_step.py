"""The decode step: the next token of each of some slots, padded to one of a few sizes; on CUDA a graph for each size.

Recorded or not, it is one function over the same buffers, so replies do not depend on it. What changes from step to
step (tokens, slots, lengths) is read from those buffers; pages that a slot gets are written into the block table, which
stays where it is.

n rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models import Decoder, KVCache
from ..models.held import all_held
from ..models.kv_cache import RowStep
from ..train.capture import CannotCapture, Capture, Captured, CudaCapture
from ..train.failures import diagnostic, out_of_memory
from .bank import AdapterSet

log = logging.getLogger(__name__)
MOST = 64  # graphs that are kept; one of a set of adapters that serves no more leaves when it is the longest unused


class Served(NamedTuple):
    """What a step gives: logits [n, V], and the likeliest token of each row [n], int64."""

    logits: Tensor
    likeliest: Tensor


class Row(NamedTuple):
    """One slot's next token, behind the `position` rows that it holds."""

    slot: int
    position: int
    token: int


@dataclass(frozen=True)
class _Graph:
    """A recorded step, and what it has read: the layers of its adapters, and where the model's tensors were."""

    captured: Captured
    layers: Mapping[str, nn.Module]
    places: tuple[int, ...]


class _Buffers:
    """tokens, slots and positions [3, size] on the device, filled in one copy that nobody waits for."""

    def __init__(self, size: int, device: torch.device):
        pinned = device.type == "cuda"
        self.there = torch.zeros((3, size), dtype=torch.int64, device=device)
        self.there[1] = -1  # no slot
        self.host = torch.zeros((3, size), dtype=torch.int64, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None

    def fill(self, rows: Sequence[Row]) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has read what is now overwritten
        more = self.host.shape[1] - len(rows)
        columns = zip(*((row.token, row.slot, row.position) for row in rows), *[(0, -1, 0)] * more)
        self.host.copy_(torch.tensor(list(columns)))
        self.there.copy_(self.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.there.device))

    def empty(self) -> None:
        """Rows of no slot: a step over them writes nothing."""
        self.there.zero_()
        self.there[1] = -1


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
        self._buffers: dict[int, _Buffers] = {}
        self._graphs: OrderedDict[tuple[AdapterSet, int], _Graph] = OrderedDict()
        self._known: set[tuple[tuple[str, ...], int]] = set()  # ids of adapters and sizes that were recorded before
        self._held = tuple(all_held(model))

    def __call__(
        self,
        rows: Sequence[Row],
        key: AdapterSet,
        layers: Mapping[str, nn.Module],
        serving: Callable[[], AbstractContextManager],
    ) -> Served:
        """Write the rows into the cache, whose `reserve` has made room for them.

        Args:
            key, layers: the adapters that the slots serve under; `serving` puts those layers into the model.
        """
        size = next(s for s in self.sizes if s >= len(rows))
        graph = None if self.off else self._graph(key, layers, size, serving)
        self._of(size).fill(rows)
        if graph is None:
            self.eager += 1
            with serving():
                served = self._compute(size)
            return Served(*(t[: len(rows)] for t in served))
        self.replayed += 1
        graph.captured.replay()
        # the next replay writes where this one did
        return Served(*(t[: len(rows)].clone() for t in graph.captured.output))

    def prepare(self, key: AdapterSet, layers: Mapping[str, nn.Module], serving, sizes: Sequence[int] = ()) -> None:
        """Record the steps of these sizes (all, by default), before anyone waits for them."""
        for size in sizes or self.sizes:
            if not self.off:
                self._graph(key, layers, size, serving)

    def forget(self) -> None:
        """Give back the memory of all graphs."""
        for graph in self._graphs.values():
            graph.captured.reset()
        self._graphs.clear()

    def _of(self, size: int) -> _Buffers:
        if size not in self._buffers:
            self._buffers[size] = _Buffers(size, self.cache.device)
        return self._buffers[size]

    def _graph(self, key: AdapterSet, layers: Mapping[str, nn.Module], size: int, serving) -> _Graph | None:
        places = tuple(map(Tensor.data_ptr, self._held))
        found = self._graphs.get((key, size))
        if found is not None and found.layers is layers and found.places == places:
            self._graphs.move_to_end((key, size))
            return found
        if found is not None:
            self._graphs.pop((key, size)).captured.reset()
        while len(self._graphs) >= MOST:
            self._graphs.popitem(last=False)[1].captured.reset()
        like = tuple(use.id for use in key), size  # of another version the kernels are the same
        captured = self._record(size, serving, warm=like in self._known)
        if captured is None:
            return None
        self._known.add(like)
        self.captured += 1
        self._graphs[key, size] = _Graph(captured, layers, places)
        return self._graphs[key, size]

    def _record(self, size: int, serving, warm: bool) -> Captured | None:
        """The step of a size, recorded over rows of no slot; None, and `off` says why, where that cannot be."""
        self._of(size).empty()
        why = ""
        try:
            with serving():
                return self._capture(lambda: self._compute(size), self.cache.device, warm=warm)
        except CannotCapture as refused:
            why = str(refused)
        except Exception as error:
            if not out_of_memory(error):
                raise
            why = f"a recorded step does not fit in memory: {diagnostic(error)}"
        self.off = why
        self.forget()
        log.warning("decode steps stay eager: %s", why)
        return None

    @torch.no_grad()
    def _compute(self, size: int) -> Served:
        tokens, slots, first = self._of(size).there.unbind()
        hidden = self.model.hidden(tokens, kv_cache=RowStep(self.cache, slots, first))
        logits = self.model.logits(hidden)
        return Served(logits, logits.argmax(-1))
