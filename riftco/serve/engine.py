"""The engine: slots that serve and learn. Training is inference with labels; there is no second mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..adapters import LoraSpec
from ..models import Decoder, KVCache, ModelError
from ..models.compiled import CompiledDecoder
from ..models.joined import lay_side_by_side
from ..train.capture import Capture
from .bank import AdapterBank, AdapterSet
from .batch import UNLABELLED, Batch, Refused, Run, ids_of, whole
from .compiled import CompiledSteps
from .decode_step import DecodeStep, Row, Served
from .learn_step import LearnStep
from .learner import Learner, LearnOutcome, Lesson
from .slots import Slot, State
from .store import Store, tokens_sha256
from .writing import Writing

NO_SLOT = -1
CHUNK = 512  # rows of a forward that other turns wait for
LEARN_CHUNK = 2048  # rows; on a GPU
LOGGED = ("loss_before", "loss_after", "gradient_norm", "clip_scale", "n_labelled", "ms", "step", "digest")


class Decoded(NamedTuple):
    """What a batch gives: of its output rows the logits [outputs, V] as served and the likeliest tokens [outputs], and
    what its labels did (None: it had none)."""

    logits: Tensor
    learn: LearnOutcome | None
    likeliest: Tensor


class Engine:
    """A decoder with slots, a cache, and adapters that learn in place.

    Args:
        model: the base; frozen from here on.
        slots: how many sequences are held at once.
        window: rows of each slot.
        cache_dtype: "float32", "float16", "bfloat16" or "q8_0".
        page_size: rows of a cache page; None: one piece a slot.
        pages: how many of them; None: enough for all slots.
        undo: how far a slot can be cut back where layers have sliding windows, which then keep no more rows than they
            need; None: they keep all.
        chunk: the most rows of a forward. None: 512, and on a GPU 2,048 while no turn waits for its next token: there
            even forwards of that many rows may wait for launches.
        learn_chunk: rows of a chunk of a reply that learns, halved where memory runs out; its gradient does not depend
            on it. None: `chunk`, but at least LEARN_CHUNK on a GPU, where small chunks wait for launches.
        store: where adapters, their journals and the log live; None: in memory alone.
        cuda_graphs: whether decode steps on a GPU are recorded, one for each of a few sizes, and done again by one
            launch. Replies do not depend on it.
        compiled: whether batches of few rows on a CPU are decoded by the compiled step, built by this machine's C++
            compiler when it is first needed. None: where that can be, and `compiled_steps.off` says why not; True: or
            the engine is refused.
        learn_graphs: whether the gradients of replies of one chunk are recorded on a GPU, too, one graph for each of a
            few lengths (LearnStep). They keep what a learn's peak takes, and the adapter's gradients; where memory runs
            out they are given back. What is learned does not depend on it. None: as `cuda_graphs`.
        capture: how both are recorded; None: with CUDA graphs, where there is a GPU.
        options: of the Learner.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        slots: int = 1,
        window: int | None = None,
        cache_dtype: str = "float16",
        page_size: int | None = None,
        pages: int | None = None,
        undo: int | None = None,
        chunk: int | None = None,
        learn_chunk: int | None = None,
        store: Store | None = None,
        cuda_graphs: bool = True,
        learn_graphs: bool | None = None,
        compiled: bool | None = None,
        capture: Capture | None = None,
        **options,
    ):
        layout, rows = ("slot", 1) if page_size is None else ("paged", page_size)
        self.cache = KVCache(
            model.config, slots, window, dtype=cache_dtype, layout=layout, page_size=rows, pages=pages, undo=undo,
            device=model.device,
        )  # fmt: skip
        self.model, self.window, self.chunk = model.eval(), self.cache.window, CHUNK if chunk is None else chunk
        self.alone = LEARN_CHUNK if chunk is None and self.model.device.type == "cuda" else self.chunk
        if self.model.device.type == "cuda":
            lay_side_by_side(self.model)
            torch.cuda.empty_cache()  # where the weights were
        self.slots = [Slot(i) for i in range(slots)]
        self.decoding: DecodeStep | None = None
        if capture is not None or self.model.device.type == "cuda":
            self.decoding = DecodeStep(self.model, self.cache, graphs=cuda_graphs, capture=capture)
        self.bank = AdapterBank(model)
        off = "it is switched off" if compiled is False else "" if self.decoding is None else "steps are recorded"
        self.compiled_steps = CompiledSteps(self.model, self.cache, off)
        if compiled and self._compiled(()) is None:
            raise ModelError(f"compiled=True: {self.compiled_steps.off}")
        if learn_chunk is None:
            learn_chunk = max(self.chunk, LEARN_CHUNK) if self.model.device.type == "cuda" else self.chunk
        step = None
        if capture is not None or self.model.device.type == "cuda":
            wanted = cuda_graphs if learn_graphs is None else learn_graphs
            step = LearnStep(self.bank, self.cache, graphs=wanted, capture=capture)
        self.learner = Learner(self.bank, self.cache, chunk=learn_chunk, step=step, **options)
        self.store = store
        if store is not None:
            store.load(self.bank, self.learner)
        self.writing: Writing | None = None  # a learn that the disk does not have yet
        self.trainable: str | None = None
        self.lr = 1e-4

    def prepare(self, adapters: Mapping[str, float] | None = None, guesses: int = 0) -> None:
        """Record the decode steps of all numbers of slots under these adapters (id -> scale; None: the base), with up
        to so many guesses a slot, so that no request waits for it; on a CPU build the compiled step."""
        key = self.bank.set_of(adapters or {})
        self._compiled(key)
        if self.decoding is not None:
            self.decoding.prepare(key, self.bank.layers(key), lambda: self.bank.serving(key), 1 + guesses)

    def slot(self, id: int) -> Slot:
        """Raises Refused where there is none."""
        if not 0 <= whole(id, "slot") < len(self.slots):
            raise Refused(f"no slot {id}; there are {len(self.slots)}")
        return self.slots[id]

    def use(self, slot: int, adapters: Mapping[str, float] | AdapterSet) -> None:
        """Serve this slot under these adapters (id -> scale: newest versions); rows of another set are forgotten."""
        key = adapters if isinstance(adapters, tuple) else self.bank.set_of(adapters)
        if self.slot(slot).key != key:
            self.cut(slot, 0)
            self.slots[slot].key = key

    def cut(self, slot: int, n: int) -> None:
        """Forget a slot's rows from n on.

        Raises:
            Refused: more than it holds, or what precedes n is not all there (sliding windows).
        """
        held = self.slot(slot)
        try:
            self.cache.cut(slot, n)
        except ModelError as why:
            raise Refused(f"slot {slot}: {why}") from None
        del held.tokens[n:]
        held.unsure = 0

    def lend(self, lender: int, slot: int, start: int, end: int) -> None:
        """Copy rows [start, end) of one slot behind the `start` rows that another, of the same adapters, has."""
        self.cache.restore(self.cache.snapshot(lender, start, end), slot)
        self.slots[slot].tokens += self.slots[lender].tokens[start:end]

    def train(self, adapter: str | None, lr: float = 1e-4) -> None:
        """Let labels in a batch teach this adapter at this rate; None: labels are refused."""
        if adapter is not None:
            self.bank.of(adapter)
        self.trainable, self.lr = adapter, lr

    def decode(self, batch: Batch) -> Decoded:
        """Serve a batch's rows: write them into their slots, and return the output rows' logits.

        Each slot's rows must follow what it holds. Labels make one step of the trainable adapter: each labelled run is
        given everything before it as served. The served rows and logits are those of the batch without labels.

        Raises:
            Refused: before anything changed.
        """
        runs = self._check(batch)
        lessons = self._lessons(batch, runs)
        if lessons:
            assert self.trainable is not None
            self.learner.check(lessons, self.trainable, self.lr)
        served, outcome = self._serve(batch.unlabelled(), runs), None
        if lessons:
            assert self.trainable is not None
            try:
                outcome = self._learn(lessons, self.trainable, self.lr)
            except (Refused, OSError) as why:  # after the rows were served: a step that was taken back
                outcome = LearnOutcome(False, str(why), adapter=self.trainable)
        return Decoded(served.logits, outcome, served.likeliest)

    def _learn(
        self,
        lessons: list[Lesson],
        adapter: str,
        lr: float,
        note: Mapping[str, Any] | None = None,
        wait: bool = True,
        **options,
    ) -> LearnOutcome:
        def commit(outcome: LearnOutcome, take_back: Callable[[], None]) -> None:
            if self.store is None:
                return
            line = {**(note or {}), **said(lessons, outcome), "lr": float(lr)}
            if wait:
                self._record("learn", adapter, line)
            else:
                written = self.store.begin("learn", adapter, self.bank, self.learner, line)
                self.writing = Writing(written, take_back)

        self.settle()
        return self.learner.learn(lessons, adapter, lr, commit=commit, **options)

    def _record(self, kind: str, adapter: str, line: Mapping[str, Any] | None = None) -> None:
        if self.store is not None:
            self.store.record(kind, adapter, self.bank, self.learner, line or {})

    def settle(self) -> None:
        """Wait until the last learn is on the disk; one that the disk refused is taken back. Nothing else may change an
        adapter before."""
        if self.writing is not None:
            self.writing.settle()
            self.writing = None

    def create(self, adapter: str, spec: LoraSpec, **options) -> None:
        """A new adapter, as AdapterBank.create has it, that lasts."""
        self.settle()
        self.bank.create(adapter, spec, **options)
        try:
            self._record("create", adapter)
        except BaseException:
            self.bank.remove(adapter)
            raise

    def remove(self, adapter: str) -> None:
        """Take an adapter out of memory, with its shadow and every row that was made under it.

        Raises:
            Refused: a slot runs under it, or it lives in a store, which would bring it back.
        """
        self.bank.of(adapter)
        if self.store is not None:
            raise Refused(f"adapter {adapter!r} lives in {self.store.folder}; delete its folder there, and start again")
        under = [slot for slot in self.slots if any(use.id == adapter for use in slot.key)]
        for slot in under:
            if slot.state is not State.IDLE:
                raise Refused(f"adapter {adapter!r} is in use on slot {slot.id}; remove it once that is done")
        self.bank.remove(adapter)
        for slot in under:
            self.use(slot.id, ())
        self.learner.pupils.pop(adapter, None)
        if self.learner.step is not None:
            self.learner.step.forget(adapter)
        self.trainable = None if self.trainable == adapter else self.trainable

    def promote(self, adapter: str) -> int:
        """Publish what an adapter has learned as its next version; slots use it from their next prompt on."""
        self.settle()
        version = self.bank.promote(adapter)
        try:
            self._record("promote", adapter)
        except BaseException:
            self.bank.withdraw(adapter)
            raise
        return version

    def undo(self, adapter: str, steps: int = 1) -> int:
        """Take back the last steps of an adapter's shadow; the step that it is at then. Versions stay."""
        self.bank.of(adapter)
        self.settle()
        pupil = self.learner.pupil(adapter)
        now, journal = pupil.moment(), list(pupil.journal)
        step = self.learner.undo(adapter, steps)
        try:
            self._record("undo", adapter, {"steps": steps})
        except BaseException:
            pupil.go_back(now)
            pupil.journal.extend(journal[len(pupil.journal) :])
            raise
        return step

    def rollback(self, adapter: str, version: int) -> int:
        """Serve an earlier version's weights again, as the next version; its number.

        The shadow starts from them afresh (an undo gives back what it was). Of the newest version, only the shadow goes
        back, and nothing new is published.
        """
        self.settle()
        held, pupil = self.bank.of(adapter), self.learner.pupil(adapter)
        if not 1 <= whole(version, "version") <= held.version:
            raise Refused(f"adapter {adapter!r} has no version {version}; newest: {held.version}")
        before, journal, newest = pupil.moment(), list(pupil.journal), held.version
        try:
            self.learner.start_from(adapter, held.versions[version - 1])
            if held.digests[version - 1] != held.digests[-1]:
                self.bank.publish(adapter, held.versions[version - 1])
            self._record("rollback", adapter, {"to": version})
        except BaseException:
            if held.version > newest:
                self.bank.withdraw(adapter)
            pupil.go_back(before)
            pupil.journal = type(pupil.journal)(journal)
            raise
        return held.version

    def study(
        self,
        texts: Sequence[tuple[Tensor, Tensor, Tensor | None]],
        *,
        adapter: str,
        lr: float,
        note: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> LearnOutcome:
        """One step on texts of their own (tokens, labels, weights or None), behind no slot's rows and beside no other
        adapter; a refusal is an outcome. `wait` as of `learn`."""
        try:
            lessons = [Lesson(NO_SLOT, 0, (), tokens, label, weight) for tokens, label, weight in texts]
            return self._learn(lessons, adapter, lr, note, wait)
        except Refused as why:
            return LearnOutcome(False, str(why), adapter=adapter)

    def learn(
        self,
        slot: int,
        n_cached: int,
        tokens: Sequence[int] | Tensor | None,
        labels: Sequence[int] | Tensor | None,
        weights: Sequence[float] | Tensor | None = None,
        *,
        adapter: str,
        lr: float,
        dry_run: bool = False,
        measure_after: bool = False,
        note: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> LearnOutcome:
        """One step on labelled tokens behind the first `n_cached` rows of a slot; a refusal is an outcome.

        The slot's rows stay what they are: the next turn goes on from the same bytes. The reply's first label sits on
        the last prompt token, so a reply r to a prompt of n tokens is learn(slot, n - 1, [prompt[-1], *r[:-1]], r).
        `note` goes into the log's line (a learn id, a caller). With `wait` the step is on the disk when this returns;
        else it is once `writing` is done, and must not be acknowledged before.
        """
        try:
            lesson = self._lesson(slot, n_cached, tokens, labels, weights)
            return self._learn([lesson], adapter, lr, note, wait, dry_run=dry_run, measure_after=measure_after)
        except Refused as why:
            return LearnOutcome(False, str(why), adapter=adapter)

    def _lesson(self, slot, n_cached, tokens, labels, weights) -> Lesson:
        for name, given in (("tokens", tokens), ("labels", labels)):
            if given is None:
                raise Refused(f"learn needs {name}")
        held = self.slot(slot)
        slot, n_cached = held.id, whole(n_cached, "n_cached")
        if not 0 <= n_cached <= len(held.tokens):
            raise Refused(
                f"slot {slot} holds {len(held.tokens)} rows, not the {n_cached} that the lesson stands behind; "
                "serve the prompt again, then learn"
            )
        if held.unsure:
            raise Refused(f"slot {slot}: {held.unsure} of its rows may yet be taken back; learn once that is decided")
        try:
            self.cache.check_cut(slot, n_cached)
        except ModelError as why:
            raise Refused(f"slot {slot}: {why}; serve the prompt again, then learn") from None
        ids, label = (
            torch.tensor(ids_of(t, n), dtype=torch.int64) for t, n in ((tokens, "tokens"), (labels, "labels"))
        )
        try:
            weight = None if weights is None else torch.as_tensor(weights, dtype=torch.float32).cpu()
        except (TypeError, ValueError, RuntimeError):
            raise Refused(f"weights must be numbers; got {weights!r:.60}") from None
        return Lesson(slot, n_cached, held.key, ids, label, weight)

    def _check(self, batch: Batch) -> list[Run]:
        runs = batch.check(self.model.config.vocab_size)
        for run in runs:
            held = len(self.slot(run.slot).tokens)
            if run.position != held:
                raise Refused(f"slot {run.slot} holds {held} rows; the batch's rows begin at position {run.position}")
            if run.position + run.end - run.start > self.window:
                raise Refused(
                    f"slot {run.slot}: {run.end - run.start} rows behind {held} are beyond its window of {self.window}"
                )
        for key in {self.slots[run.slot].key for run in runs}:
            self.bank.ready(key)
        self._check_room({run.slot: run.position + run.end - run.start for run in runs})
        if batch.n_labels and self.trainable is None:
            raise Refused("the batch has labels and no adapter is trainable; name one with Engine.train")
        return runs

    def fits(self, ends: Mapping[int, int]) -> bool:
        """Whether the cache has pages for slots (slot -> rows) that would end there."""
        try:
            self._check_room(ends)
        except Refused:
            return False
        return True

    def _check_room(self, ends: Mapping[int, int]) -> None:
        """Refuse more rows than the cache has pages for."""
        for group in self.cache.groups:
            try:
                group.check_room(ends)
            except ModelError as why:
                raise Refused(str(why)) from None

    def _lessons(self, batch: Batch, runs: list[Run]) -> list[Lesson]:
        lessons = []
        for run in runs if batch.n_labels else []:
            assert batch.label is not None
            labelled = int((batch.label[run.start : run.end] != UNLABELLED).sum())
            if labelled:
                part = batch.slice(run.end - labelled, run.end)
                assert part.label is not None
                prefix = int(part.positions[0])
                key = self.slots[run.slot].key
                lessons.append(Lesson(run.slot, prefix, key, part.tokens, part.label, part.label_weight))
        return lessons

    def _serve(self, batch: Batch, runs: list[Run]) -> Served:
        """One forward for each set of adapters; what it gives in the batch's order."""
        keys = {self.slots[run.slot].key for run in runs}
        made = []
        for key in sorted(keys):
            some = [run for run in runs if self.slots[run.slot].key == key]
            if len(keys) == 1:
                return self._forward(batch, runs, key)
            part = Batch.join([batch.slice(run.start, run.end) for run in some])
            made.append((some, self._forward(part, list(part.runs()), key)))
        rank = batch.output.cumsum(0) - 1
        of = [rank[run.start : run.end][batch.output[run.start : run.end]] for some, _ in made for run in some]
        order = torch.cat(of).argsort().to(self.model.device)
        return Served(*(torch.cat(column)[order] for column in zip(*(served for _, served in made))))

    @torch.no_grad()
    def _forward(self, batch: Batch, runs: list[Run], key: AdapterSet) -> Served:
        """Write rows into the cache; what their output rows give. The one forward of serving."""
        counts = [(run.slot, run.end - run.start) for run in runs]
        tokens = batch.tokens.tolist()
        rows = [Row(run.slot, run.position, tokens[run.start : run.end]) for run in runs]
        if self.decoding is not None and self.decoding.fits(rows) and bool(batch.output.all()):
            self.cache.reserve(counts)
            served = self.decoding(rows, key, self.bank.layers(key), lambda: self.bank.serving(key))
            self.cache.grow(counts)
        else:
            served = self._any_rows(batch, counts, key)
        for row in rows:
            self.slots[row.slot].tokens += row.tokens
        return served

    def _compiled(self, key: AdapterSet, rows: int = 1) -> CompiledDecoder | None:
        return self.compiled_steps.find(key, self.bank.layers(key), lambda: self.bank.serving(key), rows)

    @torch.no_grad()
    def hidden(self, tokens: Sequence[int], runs: Sequence[tuple[int, int]], cache: KVCache, key: AdapterSet) -> Tensor:
        """Hidden states [T, C] of runs (slot, count) of tokens behind what `cache` holds, which is not the slots'."""
        with self.bank.serving(key):
            ids = torch.tensor(tokens, device=self.model.device)
            return self.model.hidden(ids, kv_cache=cache.begin(runs))

    def _any_rows(self, batch: Batch, counts: list[tuple[int, int]], key: AdapterSet) -> Served:
        """The forward of prompts and guesses, of whatever lengths."""
        device = self.model.device
        wanted = batch.output.nonzero().flatten()
        compiled = self._compiled(key, len(batch))
        if compiled is not None:
            logits = compiled.logits(batch.tokens, self.cache.begin(counts), wanted)
            return Served(logits, logits.argmax(-1))
        with self.bank.serving(key):
            hidden = self.model.hidden(batch.tokens.to(device), kv_cache=self.cache.begin(counts))
            logits = hidden.new_empty(0, self.model.config.vocab_size)
            if len(wanted):
                logits = self.model.logits(hidden.index_select(0, wanted.to(device)))
        return Served(logits, logits.argmax(-1))


def said(lessons: list[Lesson], outcome: LearnOutcome) -> dict[str, Any]:
    """What the log says of a learn; of the tokens their number and hash alone."""
    line = {name: getattr(outcome, name) for name in LOGGED}
    slots = [lesson.slot for lesson in lessons]
    prefix, tokens = [lesson.prefix for lesson in lessons], torch.cat([lesson.tokens for lesson in lessons])
    return {**line, "slots": slots, "prefix": prefix, "n_tokens": len(tokens), "tokens_sha256": tokens_sha256(tokens)}
