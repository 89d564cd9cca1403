"""Where a cache's layers keep their rows: one piece a slot, pages from a pool, or a ring for sliding windows."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..functional import Cache
from .errors import ModelError

# what rows are kept in, and the torch dtype of the same name
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "q8_0": None}
Shape = tuple[int, int, int, int, int]  # layers, slots, window, K, D


class Rows:
    """Layers of one kind over one of the kernels' caches. Everything here is known to the host."""

    cache: Cache

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors())

    def rows(self, slots: Tensor, first: Tensor, total: int, cu: Tensor, left: Tensor) -> Tensor:
        """Physical rows of a step's tokens; left [total]: how many tokens of its run come from each one on."""
        return self.cache.rows(slots, first, total, cu)

    def check_room(self, ends: Mapping[int, int]) -> None:
        """Refuse slots that would end there, if they do not fit."""

    def longest(self, window: int) -> int:
        """The most positions that one slot can have."""
        return window

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Make room for slots that will end there."""

    def grown(self, slot: int, length: int) -> None:
        """The slot's rows up to `length` have been written."""

    def check_cut(self, slot: int, length: int) -> None:
        """Refuse to let a slot end at `length` if rows are gone that its next token sees."""

    def cut(self, slot: int, length: int) -> None:
        """The slot ends at `length`."""

    def take(self, slot: int, start: int, end: int) -> tuple[int, tuple[Tensor, ...]]:
        """(the first of these positions that is kept, copies of the rows from there to `end`)."""
        return start, tuple(self._flat(t)[self._at(slot, start, end)] for t in self._tensors())

    def check_put(self, slot: int, start: int, first: int, end: int, tensors: tuple[Tensor, ...]) -> None:
        mine = [(t.shape[2:], t.dtype) for t in self._tensors()]
        if mine != [(t.shape[1:], t.dtype) for t in tensors] or any(len(t) != end - first for t in tensors):
            raise ModelError("KVCache: the snapshot is of a cache with other layers or of another dtype")

    def put(self, slot: int, start: int, first: int, end: int, tensors: tuple[Tensor, ...]) -> None:
        """The bytes of positions [first, end), of a snapshot of [start, end); the slot ends there."""
        at = self._at(slot, first, end)
        for to, saved in zip(self._tensors(), tensors):
            self._flat(to).index_copy_(0, at, saved.to(to.device))

    def _tensors(self) -> list[Tensor]:
        return [t for of in self.cache.layers for t in (of.k, of.v, of.k_scale, of.v_scale) if t is not None]

    @staticmethod
    def _flat(t: Tensor) -> Tensor:
        return t.flatten(0, 1)

    def _at(self, slot: int, start: int, end: int) -> Tensor:
        device = self.cache.layers[0].k.device
        of, first = torch.tensor([[slot], [start]], device=device).unbind()
        return self.cache.rows(of, first, end - start)


class Slots(Rows):
    """All of the window for every slot."""

    def __init__(self, shape: Shape, dtype: str, device: torch.device):
        self.cache = Cache.allocate(*shape, dtype=dtype, device=device)


class Pages(Rows):
    """Pages that a slot gets when it grows and gives back when it is cut."""

    def __init__(self, shape: Shape, dtype: str, device: torch.device, page_size: int, pages: int | None):
        self.cache = Cache.allocate(*shape, dtype=dtype, page_size=page_size, n_pages=pages, device=device)
        self.page = page_size
        self.free = list(reversed(range(len(self.cache.layers[0].k))))
        self.owned: list[list[int]] = [[] for _ in range(shape[1])]

    def _missing(self, slot: int, end: int) -> int:
        return max(0, -(-end // self.page) - len(self.owned[slot]))

    def longest(self, window: int) -> int:
        return (len(self.free) + sum(map(len, self.owned))) * self.page

    def check_room(self, ends: Mapping[int, int]) -> None:
        need = sum(self._missing(slot, end) for slot, end in ends.items())
        if need > len(self.free):
            raise ModelError(f"KVCache: {need} pages of {self.page} rows are needed, {len(self.free)} are free")

    def reserve(self, ends: Mapping[int, int]) -> None:
        table = self.cache.block_table
        assert table is not None
        for slot, end in ends.items():
            have, more = len(self.owned[slot]), self._missing(slot, end)
            if more:
                self.owned[slot] += [self.free.pop() for _ in range(more)]
                fresh = torch.tensor(self.owned[slot][have:], dtype=table.dtype)
                table[slot, have : have + more] = fresh.to(table.device)

    def cut(self, slot: int, length: int) -> None:
        keep = -(-length // self.page)
        self.free += reversed(self.owned[slot][keep:])
        del self.owned[slot][keep:]


class Ring(Rows):
    """The last rows of each slot: as many as a window looks back, and those that may be cut back."""

    def __init__(self, shape: Shape, dtype: str, device: torch.device, reach: int, undo: int):
        layers, slots, window, K, D = shape
        self.reach, self.size = reach, max(1, reach + undo)
        self.cache = Cache.allocate(
            layers, slots, window, K, D, dtype=dtype, page_size=self.size, n_pages=slots, device=device
        )
        assert self.cache.block_table is not None  # every page of a slot is its one ring
        self.cache.block_table.copy_(torch.arange(slots, device=device).unsqueeze(-1))
        self.lowest = [0] * slots  # the first position that no later one has replaced

    def rows(self, slots: Tensor, first: Tensor, total: int, cu: Tensor, left: Tensor) -> Tensor:
        """Rows that the same run would replace are left out."""
        return super().rows(slots, first, total, cu, left).where(left <= self.size, -1)

    def grown(self, slot: int, length: int) -> None:
        self.lowest[slot] = max(self.lowest[slot], length - self.size)

    def check_cut(self, slot: int, length: int) -> None:
        needed = max(0, length - self.reach)
        if length and needed < self.lowest[slot]:
            raise ModelError(
                f"KVCache: slot {slot} cannot end at {length}: layers with a sliding window need positions from "
                f"{needed} on for it and hold them from {self.lowest[slot]}; make the cache with a larger `undo`"
            )

    def cut(self, slot: int, length: int) -> None:
        if not length:
            self.lowest[slot] = 0

    def take(self, slot: int, start: int, end: int) -> tuple[int, tuple[Tensor, ...]]:
        first = min(max(start, self.lowest[slot]), end)
        return first, super().take(slot, first, end)[1]

    def check_put(self, slot: int, start: int, first: int, end: int, tensors: tuple[Tensor, ...]) -> None:
        super().check_put(slot, start, first, end, tensors)
        needed = max(0, end - self.reach)
        if needed < self._kept(slot, start, first):
            raise ModelError(
                f"KVCache: a slot that ends at {end} needs positions from {needed} on in layers with a sliding window; "
                f"neither the snapshot nor slot {slot} has them all"
            )

    def put(self, slot: int, start: int, first: int, end: int, tensors: tuple[Tensor, ...]) -> None:
        super().put(slot, start, first, end, tensors)
        self.lowest[slot] = max(self._kept(slot, start, first), end - self.size)

    def _kept(self, slot: int, start: int, first: int) -> int:
        """The first position that is there after rows from `first` on were put: the slot's own rows go on before them,
        unless the snapshot had lost some in between."""
        return min(first, self.lowest[slot]) if first == start else first
