"""The gradients of a reply that is one chunk, padded to one of a few lengths; on CUDA a graph for each.

Recorded or not, it is one function over the same buffers, so what is learned does not depend on it. A length is
computed as it comes the first time, which compiles its kernels, and recorded the second time.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..data.buckets import halves
from ..functional import Cache
from ..models import Decoder, KVCache
from ..train.capture import Capture, Captured, CudaCapture, attempt
from ..train.padded import PaddedRun, walk_padded
from ..train.state import random_state, set_random_state
from .bank import AdapterBank, AdapterSet
from .batch import UNLABELLED
from .graphs import Graph, Graphs
from .host import DeviceRow
from .pupil import Pupil
from .side_by_side import SideBySide

log = logging.getLogger(__name__)
MOST = 16  # graphs that are kept; the longest unused one leaves
LEAST = 16  # rows that a run is padded to, at least


class Shape(NamedTuple):
    """What a graph is recorded for, besides its adapters: rows, whether any lie before them, and how they are kept."""

    rows: int
    behind: bool
    recompute: bool


class Key(NamedTuple):
    others: AdapterSet  # that serve beside the one that learns
    adapter: str
    shape: Shape


class Reply(NamedTuple):
    """A labelled run on the host: tokens, label and weight (or None) [n], behind `prefix` rows of a slot."""

    slot: int
    prefix: int
    tokens: Tensor
    label: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class _Seen:
    """What was computed once: under which layers, and which parameters got a gradient."""

    layers: Mapping[str, nn.Module]
    reached: tuple[str, ...]


@dataclass(frozen=True)
class _Graph(Graph):
    """A recorded run, which parameters get a gradient, and where those land."""

    reached: tuple[str, ...]
    gradients: SideBySide

    def replay(self, pupil: Pupil) -> Tensor:
        """The loss of the run in the buffers; its gradients come on top of those that are there."""
        views, before = self.gradients.views, _taken(pupil)
        fresh = [views[name] for name in self.reached if before.get(name) is not views[name]]
        if len(fresh) == len(views):
            self.gradients.zero_()
        elif fresh:
            torch._foreach_zero_(fresh)
        for name in self.reached:
            pupil.shadow[name].grad = views[name]
        _added(pupil, {name: g for name, g in before.items() if g is not views[name]})
        self.captured.replay()
        return self.captured.output.clone()  # the next replay writes where this one did


class _Buffers(DeviceRow):
    """A PaddedRun, its float32 numbers in pairs behind the whole ones."""

    def __init__(self, rows: int, device: torch.device):
        n = 3 * rows + 4
        super().__init__(n + (rows + 2) // 2, device)
        self.rows, self._sizes = rows, [rows, rows, rows, 1, 1, 2]
        self.run, self._mine = (self._parts(t, n) for t in (self.there, self.host))

    def _parts(self, t: Tensor, n: int) -> PaddedRun:
        ids, target, positions, slot, first, bounds = t[:n].split(self._sizes)
        floats = t[n:].view(torch.float32)
        return PaddedRun(ids, target, positions, floats[: self.rows], slot, first, bounds, floats[self.rows])

    def fill(self, reply: Reply, denominator: int, context: int) -> None:
        mine, n = self._mine, len(reply.tokens)
        self.writable().zero_()
        mine.input_ids[:n] = reply.tokens
        mine.target.fill_(UNLABELLED)
        mine.target[:n] = reply.label
        torch.arange(reply.prefix, reply.prefix + self.rows, out=mine.positions)
        mine.positions.clamp_(max=context - 1)  # of rows that are padded
        mine.row_weight[:n] = 1.0 if reply.weight is None else reply.weight
        mine.slot.fill_(reply.slot if reply.prefix else 0)  # what stands for a cache where none lie before has one
        mine.first.fill_(reply.prefix)
        mine.bounds[1] = n
        mine.denominator.fill_(denominator)
        self.send()


class LearnStep:
    """
    Args:
        bank, cache: the engine's; the model's own tensors stay where they are.
        graphs: whether to record; else every run is computed as it comes.
        capture: how; CUDA graphs by default, which share their memory.

    Attributes:
        off: why nothing is recorded; "" while it may be.
        captured, replayed, eager: runs.
    """

    def __init__(self, bank: AdapterBank, cache: KVCache, *, graphs: bool = True, capture: Capture | None = None):
        self.bank, self.cache, self.model = bank, cache, bank.model
        self._capture = capture or CudaCapture(shared=True)
        self.off = self._capture.why_not(cache.device) if graphs else "graphs are switched off"
        self.captured = self.replayed = self.eager = 0
        self._buffers: dict[int, _Buffers] = {}
        self._graphs: Graphs[Key, _Graph] = Graphs(self.model, MOST)
        self._seen: OrderedDict[Key, _Seen] = OrderedDict()
        self._large: set[Key] = set()  # that would hold too much
        self._gradients: dict[str, tuple[Pupil, SideBySide]] = {}  # of an adapter, for all of its graphs
        self._warm: set[int] = set()  # threads that have recorded: cuBLAS keeps a handle for each
        self._nothing = nothing_before(self.model)

    def takes(self, rows: int, chunk: int, prefix: int) -> bool:
        """Whether a run is one chunk, and its rotation does not depend on how many rows of it there are."""
        turns = [turn for turn in (self.model.rotary, self.model.local_rotary) if turn is not None]
        return rows <= chunk and (prefix > 0 or all(turn.switches_at is None for turn in turns))

    def __call__(
        self, reply: Reply, key: AdapterSet, adapter: str, pupil: Pupil, denominator: int, chunk: int, recompute: bool
    ) -> Tensor:
        """The loss of a run, whose gradients have been added to the shadow's `.grad` where they are wanted.

        Args:
            key: what the slot serves under; `adapter` learns, as its `pupil`.
            denominator: labelled rows of the whole step.
            chunk: the most rows that a run may have, and be padded to.
        """
        rows = min(max(halves(len(reply.tokens)), LEAST), chunk)
        if rows not in self._buffers:
            self._buffers[rows] = _Buffers(rows, self.cache.device)
        self._buffers[rows].fill(reply, denominator, self.model.config.max_position_embeddings)
        shape = Shape(rows, reply.prefix > 0, recompute)
        others = tuple(use for use in key if use.id != adapter)
        wanted = Key(others, adapter, shape)
        graph = None if self.off or not torch.is_grad_enabled() else self._graph(wanted, pupil)
        if graph is not None:
            self.replayed += 1
            return graph.replay(pupil)
        self.eager += 1
        if self.off or not torch.is_grad_enabled():
            return self._compute(wanted)
        before = _taken(pupil)
        loss = self._compute(wanted)
        reached = tuple(name for name, p in pupil.shadow.items() if p.grad is not None)
        self._seen[wanted] = _Seen(self.bank.learning_layers(others, adapter), reached)
        while len(self._seen) > 4 * MOST:
            self._seen.popitem(last=False)
        _added(pupil, before)
        return loss

    @property
    def pool_bytes(self) -> int:
        """What recorded runs hold for themselves, activations and workspaces: as much as was taken for them."""
        return sum(graph.captured.pool_bytes for graph in self._graphs.values())

    def forget(self, adapter: str | None = None) -> None:
        """Give back the memory of an adapter's graphs, or of all."""
        for key in [key for key in self._graphs if adapter in (None, key.adapter)]:
            self._graphs.drop(key)
        for key in [key for key in self._seen if adapter in (None, key.adapter)]:
            del self._seen[key]
        self._large = {key for key in self._large if adapter not in (None, key.adapter)}
        for id in [id for id in self._gradients if adapter in (None, id)]:
            del self._gradients[id]

    def give_back(self, why: str) -> bool:
        """Memory ran out: if graphs hold some they are forgotten, and none is recorded from here on."""
        held = bool(self._graphs)
        if held:
            self._turn_off(f"memory ran out: {why}")
        return held

    def _turn_off(self, why: str) -> None:
        self.off = why
        self.forget()
        log.warning("learns stay eager: %s", why)

    def _compute(self, key: Key) -> Tensor:
        rows, behind, recompute = key.shape
        cache, reach = (self.cache, self.cache.window) if behind else (self._nothing, rows)
        with self.bank.learning(key.others, key.adapter):
            return walk_padded(self.model, self._buffers[rows].run, cache, reach, recompute)

    def _graph(self, key: Key, pupil: Pupil) -> _Graph | None:
        layers = self.bank.learning_layers(key.others, key.adapter)
        if (found := self._graphs.find(key, layers)) is not None:
            return found
        seen = self._seen.get(key)
        if seen is None or seen.layers is not layers or key in self._large:
            return None
        self._graphs.make_room()
        if key.adapter not in self._gradients or self._gradients[key.adapter][0] is not pupil:
            self._gradients[key.adapter] = pupil, SideBySide(pupil.weights.shapes, self.cache.device)
        room = self._gradients[key.adapter][1]
        captured = self._record(key, seen.reached, pupil, room)
        if captured is None:
            return None
        self.captured += 1
        graph = self._graphs[key] = _Graph(captured, layers, self._graphs.places(), seen.reached, room)
        if captured.pool_bytes <= (left := self._left()):
            return graph
        self._large.add(key)
        self._graphs.drop(key)
        sizes = key.shape.rows, captured.pool_bytes >> 20, int(left) >> 20
        log.warning("learns of %d rows stay eager: recorded, they would hold %d MiB and leave %d MiB", *sizes)
        return None

    def _left(self) -> float:
        """Bytes that graphs leave to prompts, walks and others on the device."""
        device = self.cache.device
        if device.type != "cuda":
            return math.inf
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held - self.pool_bytes

    def _record(self, key: Key, reached: tuple[str, ...], pupil: Pupil, room: SideBySide) -> Captured | None:
        """A run of this shape, recorded; None, and `off` says why, where that cannot be. Gradients and generators stay
        what they were either way."""
        device = self.cache.device
        before, random = {n: g.clone() for n, g in _taken(pupil).items()}, random_state(device)
        try:
            for name in reached:
                pupil.shadow[name].grad = room.views[name]
            warm = threading.get_ident() in self._warm
            made, why = attempt(
                lambda: self._capture(lambda: self._compute(key), device, warm=warm), "a recorded learn"
            )
        finally:
            _taken(pupil)
            _added(pupil, before)
            set_random_state(random, device)
        if made is None:
            self._turn_off(why)
        else:
            self._warm.add(threading.get_ident())
        return made


def nothing_before(model: Decoder) -> Cache:
    """What a run behind no rows is given for a cache: one layer, which nobody reads, stands for all."""
    config = model.config
    return Cache.allocate(1, 1, 1, config.num_kv_heads, config.head_dim, dtype="float32", device=model.device)


def _taken(pupil: Pupil) -> dict[str, Tensor]:
    """The shadow's gradients, which are taken off it."""
    found = {name: p.grad for name, p in pupil.shadow.items() if p.grad is not None}
    for name in found:
        pupil.shadow[name].grad = None
    return found


@torch.no_grad()
def _added(pupil: Pupil, gradients: Mapping[str, Tensor]) -> None:
    """Put gradients on the shadow, on top of those that it has."""
    here = {name: g for name in gradients if (g := pupil.shadow[name].grad) is not None}
    if here:
        torch._foreach_add_(list(here.values()), [gradients[name] for name in here])
    for name in gradients.keys() - here.keys():
        pupil.shadow[name].grad = gradients[name]
