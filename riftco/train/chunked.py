"""Exact chunked training of long rows.

A run of tokens is cut into chunks. They are read forward without a graph, keeping each layer's keys and values; then
they are computed again with a graph, the last one first, and each chunk's backward leaves the gradients of the earlier
rows' keys and values to the chunk that made them. Memory is one chunk's graph plus the run's keys, values and their
adjoints, whatever lies before the run in a cache; the gradients are those of one graph over the whole run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data import Batch
from ..functional import Cache, attention_with_cache
from ..models import Decoder, KVCache
from ..models.decoder import too_long
from .state import random_state, set_random_state

Span = tuple[int, int]


@dataclass(frozen=True)
class WalkResult:
    """What a walk did; the gradients are in the parameters' `.grad`.

    Attributes:
        loss: the sum of the labelled rows' losses over the denominator, at the parameters before any step.
        labelled, chunks: how many.
        adjoint_bytes: what the run's keys, values and adjoints took; 0 where it was one chunk.
    """

    loss: Tensor
    labelled: int
    chunks: int
    adjoint_bytes: int


class Rows(NamedTuple):
    """Keys and values of rows, [n, K, D] a layer."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def n(self) -> int:
        return len(self.keys[0])

    def first(self, n: int) -> Rows:
        return Rows([t[:n] for t in self.keys], [t[:n] for t in self.values])


class _Reading:
    """Attention of new rows that are written into the cache: serving."""

    def __init__(self, cache: Cache, slot: int, start: int, rows: int, device: torch.device):
        self.cache = cache
        self.slots, self.positions = torch.tensor([[slot], [start]], device=device).unbind()
        self.rows = cache.rows(self.slots, self.positions, rows)
        self.reach = cache.window

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        out = attention_with_cache(q[0], k[0], v[0], self.cache, layer, self.slots, self.positions, **how)
        self.cache.write(layer, self.rows, k[0], v[0])
        assert isinstance(out, Tensor)
        return out[None]


class _Run:
    """Keys, values and adjoints [run, K, D] of every layer, and the attention of one chunk at a time.

    The cached prefix is a constant, and so are the rows `before` the run that no cache holds. While `filling` a chunk's
    rows are stored; else they are recorded, and the rows before the chunk become leaves that receive what it puts on
    them. `stored` rows have room, 0 where the run is one chunk; those that are only read need no adjoints.
    """

    def __init__(
        self,
        model: Decoder,
        run: int,
        cache: Cache | KVCache | None,
        slot: int,
        prefix: int,
        reach: int,
        before: Rows | None = None,
        *,
        stored: int | None = None,
        adjoints: bool = True,
    ):
        config, device = model.config, model.device
        self.stored = run if stored is None else stored
        shape = (self.stored, config.num_kv_heads, config.head_dim)
        n = config.num_layers if self.stored else 0

        def rows(dtype: torch.dtype) -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n)]

        accumulator = torch.promote_types(model.dtype, torch.float32)
        self.keys, self.values = rows(model.dtype), rows(model.dtype)
        self.d_keys, self.d_values = (rows(accumulator) if adjoints else [] for _ in range(2))
        # without a prefix one layer of a cache that nobody reads stands for all
        self.cache = cache or Cache.allocate(1, 1, 1, *shape[1:], dtype="float32", device=device)
        self.shared, self.before = cache is None, before
        self.slots, self.positions = torch.tensor([[slot], [prefix]], device=device).unbind()
        self.run, self.filling, self.reach, self.slot = run, False, reach, slot
        self.changes = self._changes()
        self.begin((0, 0))

    @property
    def bytes(self) -> int:
        held = (*self.keys, *self.values, *self.d_keys, *self.d_values)
        return sum(t.numel() * t.element_size() for t in held)

    def begin(self, chunk: Span) -> None:
        """The next forward is of these rows."""
        device = self.slots.device
        self.start, self.end = chunk
        self.cu_q = torch.tensor([0, self.end - self.start], dtype=torch.int32, device=device)
        known = self.before.n if self.before else 0
        self.cu_k = torch.tensor([0, known + self.end], dtype=torch.int32, device=device)
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        self.taps: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        if self.filling:
            self.keys[layer][self.start : self.end] = k[0]
            self.values[layer][self.start : self.end] = v[0]
            k_new, v_new = self.keys[layer][: self.end], self.values[layer][: self.end]
        elif not self.stored:
            k_new, v_new = k[0], v[0]
        else:
            # set once: a block that is run again in the backward finds the leaves and rows of its first run
            self.own.setdefault(layer, (k, v))
            if layer not in self.taps:
                before = (self.keys[layer][: self.start], self.values[layer][: self.start])
                self.taps[layer] = tuple(t.detach().requires_grad_() for t in before)  # type: ignore[assignment]
            tap_k, tap_v = self.taps[layer]
            k_new, v_new = torch.cat([tap_k, k[0]]), torch.cat([tap_v, v[0]])
        if self.before:
            k_new = torch.cat([self.before.keys[layer], k_new])
            v_new = torch.cat([self.before.values[layer], v_new])
        cache, place = self._place(layer)
        out = attention_with_cache(
            q[0], k_new, v_new, cache, place, self.slots, self.positions,
            cu_seqlens_q=self.cu_q, cu_seqlens_k=self.cu_k, max_seqlen_q=self.end - self.start, **how,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out[None]

    def _place(self, layer: int) -> tuple[Cache, int]:
        if isinstance(self.cache, KVCache):
            return self.cache.layer(layer)
        return self.cache, 0 if self.shared else layer

    def _changes(self) -> int:
        """Of the slot that is read; attention's own version counter is off, as other slots may be written meanwhile."""
        return self.cache.changes[self.slot] if isinstance(self.cache, KVCache) else 0

    def surrogate(self) -> tuple[list[Tensor], list[Tensor]]:
        """The chunk's own rows, and what later chunks put on them: roots of its backward beside the loss."""
        roots, grads = [], []
        for layer, own in self.own.items():
            for made, adjoint in zip(own, (self.d_keys[layer], self.d_values[layer])):
                if made.requires_grad and self.end < self.run:
                    roots.append(made)
                    grads.append(adjoint[None, self.start : self.end].to(made.dtype))
        return roots, grads

    def collect(self) -> None:
        """After the backward: what this chunk puts on earlier rows.

        Raises:
            RuntimeError: the slot was written meanwhile; backward and recomputation may have read other rows.
        """
        if self._changes() != self.changes:
            raise RuntimeError(f"walk: slot {self.slot} was written while a chunk's backward was still to read it")
        for layer, taps in self.taps.items():
            for tap, adjoint in zip(taps, (self.d_keys[layer], self.d_values[layer])):
                if tap.grad is not None:
                    adjoint[: self.start] += tap.grad


def walk(
    model: Decoder,
    input_ids: Tensor,
    target: Tensor,
    *,
    chunk: int,
    row_weight: Tensor | None = None,
    denominator: int | None = None,
    cache: Cache | KVCache | None = None,
    slot: int = 0,
    prefix: int = 0,
    before: Rows | None = None,
    recompute: bool = False,
    budget_bytes: int | None = None,
) -> WalkResult:
    """Add the gradients of one run's loss to the parameters' `.grad`, one chunk's graph at a time.

    Args:
        model: a decoder; adapters, quantised bases and dropout included.
        input_ids: [T], the run.
        target: [T], the token that follows each position; negative where there is no label.
        chunk: rows of a chunk. Gradients do not depend on it but for rounding.
        row_weight: float32 [T], scales a row's loss.
        denominator: what the summed loss is divided by; the number of labels by default.
        cache, slot, prefix: what was read before the run: `prefix` rows of a slot of a cache of any dtype and layout,
            as `read` or the model leaves them. Constants; the cache is not written.
        before: rows between the prefix and the run that no cache holds, as `rows_of` makes them; constants too.
        recompute: also run each block again in the backward, so that a chunk's graph is one block's.
        budget_bytes: the most that the run's keys, values and adjoints may take.

    Raises:
        ValueError: shapes, a run without labels, or beyond the budget or the model's context; nothing was changed.

    Source: the recurrences of the KV cache unrolled by chunks, as in truncated backpropagation, but not truncated.
    """
    first = prefix + (before.n if before else 0)  # the position of the run's first row
    _check(model, input_ids, target, row_weight, chunk, cache, prefix, first)
    labelled = (target >= 0).nonzero().flatten().tolist()
    if not labelled:
        raise ValueError("walk: the run carries no label")
    length = labelled[-1] + 1  # what follows the last label reaches no loss
    need = adjoint_bytes(model, length)
    if budget_bytes is not None and need > budget_bytes:
        raise ValueError(
            f"walk: the keys, values and adjoints of a run of {length} tokens (the reply) take {need} bytes, more than "
            f"the {budget_bytes} allowed; they grow with the reply alone: train a shorter one, or allow more"
        )
    chunks = chunks_of(length, chunk)
    reach = len(input_ids) if cache is None else cache.window
    if len(chunks) == 1:
        run = _Run(model, length, cache, slot, prefix, reach, before, stored=0)
        by = denominator or len(labelled)
        total = _backward(model, input_ids, target, row_weight, by, chunks[0], first, run, recompute)
        return WalkResult(total, len(labelled), 1, run.bytes)
    run = _Run(model, length, cache, slot, prefix, reach, before)
    states = _fill(model, input_ids, run, chunks[:-1], first)  # nobody reads the last chunk's rows
    states.append(random_state(model.device))
    run.filling = False
    total, after = torch.zeros((), device=model.device), None
    for span, state in zip(reversed(chunks), reversed(states)):
        set_random_state(state, model.device)  # dropout falls on what it fell on
        total += _backward(
            model, input_ids, target, row_weight, denominator or len(labelled), span, first, run, recompute
        )
        after = after or random_state(model.device)
    assert after is not None
    set_random_state(after, model.device)
    return WalkResult(total, len(labelled), len(chunks), run.bytes)


def _fill(model: Decoder, ids: Tensor, run: _Run, chunks: list[Span], first: int) -> list[dict[str, Tensor]]:
    """Store the rows of these chunks; the generators' state before each."""
    states = []
    run.filling = True
    with torch.no_grad():
        for span in chunks:
            states.append(random_state(model.device))
            run.begin(span)
            _hidden(model, ids, span, first, run, False)
    return states


def rows_of(
    model: Decoder,
    input_ids: Tensor,
    *,
    chunk: int,
    cache: Cache | KVCache | None = None,
    slot: int = 0,
    prefix: int = 0,
) -> Rows:
    """The keys and values that tokens [T] have behind `prefix` cached rows, without writing them into the cache."""
    _check(model, input_ids, None, None, chunk, cache, prefix, prefix)
    reach = len(input_ids) if cache is None else cache.window
    run = _Run(model, len(input_ids), cache, slot, prefix, reach, adjoints=False)
    _fill(model, input_ids, run, chunks_of(len(input_ids), chunk), prefix)
    return Rows(run.keys, run.values)


def _backward(model, input_ids, target, row_weight, denominator, span: Span, first, run: _Run, recompute) -> Tensor:
    """One chunk with a graph: its share of the loss."""
    start, end = span
    run.begin(span)
    hidden = _hidden(model, input_ids, span, first, run, recompute)
    loss = None
    if bool((target[start:end] >= 0).any()):
        loss = model.head_loss(
            hidden[0],
            target[start:end],
            row_weight=None if row_weight is None else row_weight[start:end],
            denominator=denominator,
        )
    differentiate(loss, *run.surrogate())
    run.collect()
    return torch.zeros((), device=hidden.device) if loss is None else loss.detach().float()


def differentiate(loss: Tensor | None, roots: Sequence[Tensor] = (), grads: Sequence[Tensor] = ()) -> None:
    """The backward of a chunk: from its loss, and from what later chunks put on its rows."""
    roots, grads = list(roots), list(grads)
    if loss is not None and loss.requires_grad:
        roots, grads = [loss, *roots], [torch.ones_like(loss), *grads]
    if roots:
        torch.autograd.backward(roots, grads)


def _hidden(model: Decoder, ids: Tensor, span: Span, first: int, attends: _Run | _Reading, recompute: bool) -> Tensor:
    start, end = span
    positions = torch.arange(first + start, first + end, device=ids.device)
    mode = "block" if recompute else "disabled"
    return model.run(ids[None, start:end], positions, attends.reach, None, attends, checkpointing=mode)


def read(model: Decoder, input_ids: Tensor, cache: Cache, *, slot: int = 0, start: int = 0, chunk: int = 512) -> None:
    """Read tokens [T] into a slot of a cache from row `start` on, without gradients."""
    _check(model, input_ids, None, None, chunk, cache, start, start)
    if start + len(input_ids) > cache.window:
        raise ValueError(f"read: {len(input_ids)} rows after {start} do not fit a window of {cache.window}")
    with torch.no_grad():
        for a, b in chunks_of(len(input_ids), chunk):
            _hidden(model, input_ids, (a, b), start, _Reading(cache, slot, start + a, b - a, model.device), False)


def walk_runs(
    model: Decoder, input_ids: Tensor, target: Tensor, cache: Cache, *, chunk: int, slot: int = 0, **options
) -> list[WalkResult]:
    """Walk every labelled run of a row [T], each given everything before it as it lies in the cache: a constant. The
    cache's slot holds the whole row afterwards, as if it had been read without training. Options as in `walk`."""
    weight, total = options.pop("row_weight", None), int((target >= 0).sum())
    options.setdefault("denominator", total)
    results, done = [], 0
    for start, end in runs_of(target):
        if start > done:
            read(model, input_ids[done:start], cache, slot=slot, start=done, chunk=chunk)
        part = slice(start, end)
        options["row_weight"] = None if weight is None else weight[part]
        run = input_ids[part], target[part]
        results.append(walk(model, *run, chunk=chunk, cache=cache, slot=slot, prefix=start, **options))
        read(model, input_ids[part], cache, slot=slot, start=start, chunk=chunk)
        done = end
    if not results:
        raise ValueError("walk_runs: the row carries no label")
    if done < len(input_ids):
        read(model, input_ids[done:], cache, slot=slot, start=done, chunk=chunk)
    return results


def walk_batch(model: Decoder, batch: Batch, there: Batch, chunk: int, denominator: int) -> Tensor:
    """The loss of a packed batch, one document at a time; its gradients are added to the parameters'.

    Args:
        batch: on the host, where the documents' bounds are read; `there` is the same on the model's device.
    """
    recompute, total = model.activation_checkpointing == "block", torch.zeros((), device=model.device)
    for a, b in itertools.pairwise(batch.cu_seqlens.tolist()):
        if any(start < b and end > a for start, end in batch.spans):
            weight = None if there.row_weight is None else there.row_weight[a:b]
            total += walk(
                model, there.input_ids[a:b], there.target[a:b], chunk=chunk, row_weight=weight,
                denominator=denominator, recompute=recompute,
            ).loss  # fmt: skip
    return total


def chunks_of(length: int, chunk: int) -> list[Span]:
    """(start, end) of each chunk."""
    return [(a, min(a + chunk, length)) for a in range(0, length, chunk)]


def runs_of(target: Tensor) -> Iterator[Span]:
    """(start, end) of each stretch of labelled rows."""
    start = None
    for i, label in enumerate([*target.tolist(), -1]):
        if label >= 0 and start is None:
            start = i
        elif label < 0 and start is not None:
            yield start, i
            start = None


def stateful(cache: Cache | KVCache | None) -> list[int]:
    """The layers of a cache that keep something else than keys and values, whose adjoints a walk knows nothing of."""
    return sorted(cache.states) if isinstance(cache, KVCache) else []


def adjoint_bytes(model: Decoder, run: int) -> int:
    """What a run's keys, values and their adjoints take: it grows with the run, not with what lies before it."""
    config, stored = model.config, model.dtype.itemsize
    return 2 * config.num_layers * run * config.num_kv_heads * config.head_dim * (stored + max(stored, 4))


def _check(model, ids, target, weight, chunk, cache, prefix, first) -> None:
    for name, t in (("input_ids", ids), ("target", target), ("row_weight", weight)):
        if t is not None and (t.dim() != 1 or t.shape != ids.shape or not len(t)):
            raise ValueError(f"walk: {name} must be one row [T], not empty; got {tuple(t.shape)}")
    if chunk < 1:
        raise ValueError(f"walk: a chunk has 1 row or more; got {chunk}")
    if prefix < 0 or (prefix and cache is None) or (cache is not None and prefix > cache.window):
        raise ValueError(f"walk: a prefix of {prefix} rows needs a cache that holds it")
    if layers := stateful(cache):
        raise ValueError(f"walk: layers {layers} keep a state through which no gradient is carried from chunk to chunk")
    if first + len(ids) > model.config.max_position_embeddings:
        raise ValueError(f"walk: {too_long(first + len(ids), model.config)}")
