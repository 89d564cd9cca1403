"""What a decoder has read, slot by slot: keys and values over the kernels' cache, and whatever else a layer keeps.

Layers that see everything share one buffer of `window` rows a slot, or pages of it. Layers with a sliding window share
a ring: as many rows as the window needs, which a block table folds the positions into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..functional import Cache, attention_with_cache, decode_with_cache
from .config import DecoderConfig
from .errors import ModelError
from .kv_rows import DTYPES, Pages, Ring, Rows, Slots
from .rotary import Rotation

LAYOUTS = ("slot", "paged")


class State(Protocol):
    """What a layer without keys and values keeps (a recurrent state): whole, it cannot be cut back."""

    def ends_at(self, slot: int) -> int:
        """How many positions it has read."""
        ...

    def snapshot(self, slot: int) -> Any: ...

    def restore(self, slot: int, saved: Any) -> None: ...

    def clear(self, slot: int) -> None: ...


@dataclass(frozen=True)
class Snapshot:
    """The bytes of positions [start, end) of a slot in every layer that keeps rows, and the other layers' states.

    rows: for each group of layers the first position that is there, and its tensors.
    """

    start: int
    end: int
    rows: tuple[tuple[int, tuple[Tensor, ...]], ...]
    states: Mapping[int, Any]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for _, tensors in self.rows for t in tensors)


class KVCache:
    """Room for `window` positions of each of `slots` sequences; `lengths` are filled.

    A forward with a cache appends to it and attends to everything before. Keys are stored as attention reads them:
    normed and rotated. Holds no gradients.

    Args:
        config: of the model.
        slots: sequences.
        window: positions of a slot, at most the model's context.
        dtype: "float32", "float16", "bfloat16" or "q8_0" (GGUF's blocks: 8.5 bits a number), or a torch dtype.
        layout: "slot": one piece a slot. "paged": pages are given to a slot as it grows, out of one pool.
        page_size, pages: of the paged layout: rows of a page, and how many there are (default: enough for all slots).
        undo: how many positions `cut` can take back at least where a layer has a sliding window; None: all.
        states: layer -> its State, for layers that keep no keys and values.
        device: where the rows are.

    Raises:
        ModelError: sizes or options that do not fit, each named.
    """

    def __init__(
        self,
        config: DecoderConfig,
        slots: int = 1,
        window: int | None = None,
        *,
        dtype: str | torch.dtype = "float32",
        layout: str = "slot",
        page_size: int = 64,
        pages: int | None = None,
        undo: int | None = 0,
        states: Mapping[int, State] | None = None,
        device: torch.device | str = "cpu",
    ):
        longest = config.max_position_embeddings
        window = longest if window is None else window
        if not 0 < window <= longest:
            raise ModelError(f"KVCache: window must be between 1 and the model's context, {longest}; got {window}")
        if slots < 1 or page_size < 1 or (pages is not None and pages < 1) or (undo is not None and undo < 0):
            raise ModelError(f"KVCache: sizes must be at least 1; got {slots=}, {page_size=}, {pages=}, {undo=}")
        if layout not in LAYOUTS:
            raise ModelError(f"KVCache: layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
        named = next((n for n, kind in DTYPES.items() if dtype == n or (dtype is kind and kind is not None)), None)
        if named is None:
            raise ModelError(f"KVCache: dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        self.slots, self.window, self.dtype, self.layout = slots, window, named, layout
        self.states: Mapping[int, State] = dict(states or {})
        self.lengths = [0] * slots
        self.changes = [0] * slots  # how often each slot was written or cut: who reads it twice reads the same rows
        self.device = torch.device(device)
        self.groups: list[Rows] = []
        self._place: dict[int, tuple[Rows, int]] = {}
        for reach, layers in self._reaches(config, undo).items():
            shape = (len(layers), slots, window, config.num_kv_heads, config.head_dim)
            try:
                if reach is not None:
                    group: Rows = Ring(shape, named, self.device, reach, 0 if undo is None else undo)
                elif layout == "paged":
                    group = Pages(shape, named, self.device, page_size, pages)
                else:
                    group = Slots(shape, named, self.device)
            except ValueError as refused:
                raise ModelError(f"KVCache: {str(refused).removeprefix('Cache: ')}") from None
            self.groups.append(group)
            self._place |= {layer: (group, i) for i, layer in enumerate(layers)}

    def _reaches(self, config: DecoderConfig, undo: int | None) -> dict[int | None, list[int]]:
        """How far back layers look (None: to the start, or too far for a ring to save rows) -> those layers."""
        found: dict[int | None, list[int]] = {}
        for layer in range(config.num_layers):
            if layer in self.states:
                continue
            window = config.window_of(layer)
            ring = window is not None and undo is not None and window - 1 + undo < self.window
            found.setdefault(window - 1 if ring and window is not None else None, []).append(layer)
        return found

    @property
    def nbytes(self) -> int:
        """Of all rows, scales included."""
        return sum(group.nbytes for group in self.groups)

    @property
    def longest(self) -> int:
        """The most positions that one slot can have while the others hold none."""
        return min([self.window, *(group.longest(self.window) for group in self.groups)])

    @property
    def length(self) -> int:
        """Of slots that are filled alike."""
        if len(set(self.lengths)) > 1:
            raise ModelError(f"KVCache: its slots hold different lengths, {self.lengths}; ask for `lengths`")
        return self.lengths[0]

    def begin(self, runs: Sequence[tuple[int, int]]) -> Step:
        """The next forward's rows: (slot, how many tokens) of each run. Nothing counts as read before `finish`.

        Raises:
            ModelError: as `reserve` does.
        """
        self.reserve(runs)
        return Step(self, runs)

    def reserve(self, runs: Sequence[tuple[int, int]]) -> None:
        """Make room for the rows of the next forward.

        Raises:
            ModelError: a slot that is not there or twice, more rows or pages than there are, gradients; before
                anything changes.
        """
        named = [slot for slot, _ in runs]
        if not named or len(set(named)) != len(named) or any(not 0 <= s < self.slots for s in named):
            raise ModelError(
                f"KVCache: runs must be of one or more different slots below {self.slots}; got slots {named}"
            )
        for slot, count in runs:
            if count < 1 or self.lengths[slot] + count > self.window:
                raise ModelError(
                    f"KVCache: {count} more positions after {self.lengths[slot]} do not fit its window of {self.window}"
                )
        if torch.is_grad_enabled():
            raise ModelError("KVCache: holds no gradients; run the forward under torch.no_grad()")
        ends = {slot: self.lengths[slot] + count for slot, count in runs}
        for group in self.groups:
            group.check_room(ends)
        for slot in named:
            self.changes[slot] += 1
        for group in self.groups:
            group.reserve(ends)

    def grow(self, runs: Sequence[tuple[int, int]]) -> None:
        """Every layer has written these rows: they count as read."""
        for slot, count in runs:
            self.lengths[slot] += count
            for group in self.groups:
                group.grown(slot, self.lengths[slot])

    def cut(self, slot: int, length: int) -> None:
        """Forget a slot's positions from `length` on; nothing changes where `check_cut` raises."""
        self.check_cut(slot, length)
        self.changes[slot] += 1
        for group in self.groups:
            group.cut(slot, length)
        for state in self.states.values() if not length else ():
            state.clear(slot)
        self.lengths[slot] = length

    def check_cut(self, slot: int, length: int) -> None:
        """Whether a slot's first `length` positions are all there for what follows them.

        Raises:
            ModelError: more than there are; a layer's state that cannot be cut back; rows of a sliding window that
                later ones have replaced.
        """
        if not 0 <= length <= self.lengths[slot]:
            raise ModelError(f"KVCache: cannot cut {self.lengths[slot]} positions to {length}")
        for layer, state in self.states.items():
            if length and state.ends_at(slot) != length:
                raise ModelError(
                    f"KVCache: the state of layer {layer} has read {state.ends_at(slot)} positions and cannot be cut "
                    f"back to {length}; restore a snapshot that ends there"
                )
        for group in self.groups:
            group.check_cut(slot, length)

    def truncate(self, length: int) -> None:
        """Cut every slot."""
        for slot in range(self.slots):
            self.cut(slot, length)

    def clear(self, slot: int) -> None:
        """Forget all of a slot; its pages are free."""
        self.cut(slot, 0)

    def snapshot(self, slot: int, start: int = 0, end: int | None = None) -> Snapshot:
        """The bytes of positions [start, end), as they are stored. `end` is the slot's length unless given."""
        end = self.lengths[slot] if end is None else end
        if not 0 <= start <= end <= self.lengths[slot]:
            raise ModelError(
                f"KVCache: positions {start} to {end} are not among the {self.lengths[slot]} of slot {slot}"
            )
        for layer, state in self.states.items():
            if state.ends_at(slot) != end:
                raise ModelError(
                    f"KVCache: the state of layer {layer} has read {state.ends_at(slot)} positions; a snapshot of it "
                    f"cannot end at {end}"
                )
        for group in self.groups:
            group.check_cut(slot, end)
        rows = tuple(group.take(slot, start, end) for group in self.groups)
        return Snapshot(start, end, rows, {layer: s.snapshot(slot) for layer, s in self.states.items()})

    def restore(self, saved: Snapshot, slot: int) -> None:
        """Put a snapshot's bytes into a slot, which then ends where the snapshot does.

        Raises:
            ModelError: a slot that ends before the snapshot starts, or a snapshot of another cache; nothing changed.
        """
        if saved.start > self.lengths[slot] or saved.end > self.window:
            raise ModelError(
                f"KVCache: a snapshot of positions {saved.start} to {saved.end} does not fit slot {slot}, which ends "
                f"at {self.lengths[slot]} of {self.window}"
            )
        if len(saved.rows) != len(self.groups) or saved.states.keys() != self.states.keys():
            raise ModelError("KVCache: the snapshot is of a cache with other layers")
        for group, (first, tensors) in zip(self.groups, saved.rows):
            group.check_put(slot, saved.start, first, saved.end, tensors)
            group.check_room({slot: saved.end})
        self.changes[slot] += 1
        for group, (first, tensors) in zip(self.groups, saved.rows):
            if saved.end < self.lengths[slot]:
                group.cut(slot, saved.end)
            group.reserve({slot: saved.end})
            group.put(slot, saved.start, first, saved.end, tensors)
        for layer, state in self.states.items():
            state.restore(slot, saved.states[layer])
        self.lengths[slot] = saved.end

    def layer(self, index: int) -> tuple[Cache, int]:
        """The kernels' cache that holds a layer's rows, and its place there."""
        group, place = self._place[index]
        return group.cache, place


class Step:
    """One forward over a cache: its runs, and their physical rows, made once for all layers.

    Attributes:
        positions: int64 [total], of every token.
        cu_seqlens: int32 [runs + 1], where runs begin and end; None: each is one token.
    """

    def __init__(self, cache: KVCache, runs: Sequence[tuple[int, int]]):
        self.cache, self.runs = cache, list(runs)
        starts = [cache.lengths[slot] for slot, _ in runs]
        counts = torch.tensor([count for _, count in runs])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.total, self.longest = int(bounds[-1]), max((count for _, count in runs), default=0)
        of = torch.repeat_interleave(torch.arange(len(runs)), counts)
        begun = torch.tensor(starts, dtype=torch.int64)
        positions = begun[of] + torch.arange(self.total) - bounds[of]
        ends = (begun + counts)[of] if runs else positions
        device = cache.device
        self.slots = torch.tensor([slot for slot, _ in runs], dtype=torch.int64).to(device)
        self.first = begun.to(device)
        self.cu_seqlens: Tensor | None = bounds.to(torch.int32).to(device)
        self.positions = positions.to(device)
        left = (ends - positions).to(device)
        self.rows = {id(g): g.rows(self.slots, self.first, self.total, self.cu_seqlens, left) for g in cache.groups}

    @property
    def reach(self) -> int:
        """How long sequences in this cache may get."""
        return self.cache.window

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """Attention of the new rows [.., H, D] over what their slots hold and each other; they are written after it."""
        group, place = self.cache._place[layer]
        qs, ks, vs = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
        out = attention_with_cache(
            qs, ks, vs, group.cache, place, self.slots, self.first, cu_seqlens_q=self.cu_seqlens,
            max_seqlen_q=self.longest, **how,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        group.cache.write(place, self.rows[id(group)], ks, vs)
        return out.view(q.shape)

    def finish(self) -> None:
        """Every layer has written its rows: they count as read."""
        self.cache.grow(self.runs)


class RowStep(Step):
    """The next tokens of each of some slots, which the device alone knows: fixed shapes, nothing waits for the host.

    Who uses it calls KVCache.reserve before the forward and KVCache.grow after it.

    Args:
        slots, first: int64 [n]: the slots, -1 for one that is not there, and how many positions each has read.
        each: rows of a slot, of which `counts` [n] int64 are there; rows behind them are not written.
    """

    def __init__(self, cache: KVCache, slots: Tensor, first: Tensor, each: int = 1, counts: Tensor | None = None):
        self.cache, self.runs, self.total, self.longest = cache, [], len(slots) * each, each
        self.slots, self.first, self.positions, self.cu_seqlens = slots, first, first, None
        if counts is None:
            self.rows = {id(g): g.cache.rows_of_tokens(slots, first) for g in cache.groups}
            return
        step = torch.arange(each, device=slots.device)
        self.positions = (first[:, None] + step).flatten()
        of, there = slots[:, None].expand(-1, each).flatten(), (step < counts[:, None]).flatten()
        at = self.positions.clamp(max=cache.window - 1)
        self.rows = {id(g): g.cache.rows_of_tokens(of, at).where(there, -1) for g in cache.groups}

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, **how: Any) -> Tensor:
        """`attend` of rows that are not rotated yet (None: that never are): all of it in one launch on a GPU."""
        group, place = self.cache._place[layer]
        qs, ks, vs = (t.reshape(-1, *t.shape[-2:]) for t in (q, k, v))
        cos = sin = None
        if rotation is not None:
            assert rotation.rows is None  # a step's tokens are packed
            cos, sin = rotation.cos, rotation.sin
        out = decode_with_cache(
            qs, ks, vs, group.cache, place, self.slots, self.first, self.rows[id(group)], cos=cos, sin=sin, **how
        )
        return out.view(q.shape)
