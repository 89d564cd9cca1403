"""One learner: labelled rows behind what a slot served become one step of an adapter's shadow.

The served rows are constants and are never written: a learn keeps its own rows aside, so the slot, its neighbours and
the next reply are what they were, whatever happens on the way.
"""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..models import KVCache
from ..optim import Adam
from ..train.chunked import Rows, adjoint_bytes, rows_of, runs_of, stateful, walk
from ..train.failures import diagnostic, out_of_memory
from ..train.state import random_state, set_random_state
from .bank import AdapterBank, AdapterSet, digest
from .batch import UNLABELLED, Refused, check_weights, whole
from .learn_step import LearnStep, Reply
from .pupil import Moment, Pupil
from .versions import State

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lesson:
    """Labelled tokens behind the first `prefix` rows that a slot serves under `key`.

    label [T] is the token that ought to follow each of `tokens` [T], -1 where there is none; label_weight [T] or None.
    """

    slot: int
    prefix: int
    key: AdapterSet
    tokens: Tensor
    label: Tensor
    label_weight: Tensor | None = None


@dataclass(frozen=True)
class LearnOutcome:
    """What a learn did; on a refusal only `reason` is set, and nothing changed.

    Attributes:
        loss_before: mean loss of the labelled rows, in nats, at the parameters before the step.
        loss_after: the same after it, where it was asked for.
        gradient_norm, clip_scale: as riftco.optim.Adam's step returns them.
        adapter, version: the adapter that learned, and the version that serves (a learn changes no version).
        digest: SHA-256 of the shadow after the step.
    """

    success: bool
    reason: str | None = None
    loss_before: float | None = None
    loss_after: float | None = None
    gradient_norm: float | None = None
    clip_scale: float | None = None
    n_labelled: int = 0
    ms: float = 0.0
    adapter: str | None = None
    version: int | None = None
    step: int | None = None
    digest: str | None = None


class Learner:
    """Learns, undoes and promotes on one bank of adapters and one cache.

    Args:
        bank, cache: the server's.
        chunk: rows of a chunk of a long reply; halved, and left so, where memory runs out.
        lr_range: learning rates that a request may ask for.
        gradient_clip: largest global gradient norm of a step.
        weight_decay: AdamW's.
        journal: how many steps can be undone.
        budget_bytes: the most that a reply's keys, values and adjoints may take; None: no limit.
        recompute: run each block again in the backward: less memory, more time.
        step: computes the lessons that are one chunk behind a slot's rows alone, padded and recorded; None: they are
            walked as all others.
        probe, probe_rise: rows of tokens [T] whose mean loss under the shadow may rise by so many nats over what it is
            under the base; a step that takes it further is undone.
    """

    def __init__(
        self,
        bank: AdapterBank,
        cache: KVCache,
        *,
        chunk: int = 512,
        lr_range: tuple[float, float] = (1e-7, 1e-1),
        gradient_clip: float = 1.0,
        weight_decay: float = 0.0,
        journal: int = 8,
        budget_bytes: int | None = None,
        recompute: bool = False,
        probe: Sequence[Tensor] = (),
        probe_rise: float = 0.1,
        step: LearnStep | None = None,
    ):
        if chunk < 1 or journal < 0 or not 0 < lr_range[0] <= lr_range[1]:
            raise ValueError(f"Learner: {chunk=} must be 1 or more, {journal=} 0 or more, {lr_range=} rising, above 0")
        self.bank, self.cache, self.chunk, self.lr_range = bank, cache, chunk, lr_range
        self.gradient_clip, self.weight_decay = gradient_clip, weight_decay
        self.depth, self.budget_bytes, self.recompute = journal, budget_bytes, recompute
        self.step = step
        self.probe, self.probe_rise = [t.to(bank.model.device) for t in probe], probe_rise
        self._probe_base: float | None = None
        self.pupils: dict[str, Pupil] = {}

    def learn(
        self,
        lessons: Sequence[Lesson],
        adapter: str,
        lr: float,
        *,
        dry_run: bool = False,
        measure_after: bool = False,
        commit: Callable[[LearnOutcome, Callable[[], None]], None] | None = None,
    ) -> LearnOutcome:
        """Exactly one step on the lessons' labelled rows together; their mean loss, each row weighted.

        Args:
            dry_run: compute loss and gradient, and change nothing.
            measure_after: read the loss again after the step.
            commit: makes the step last, once memory holds it; if it raises, the step is taken back. It is also given
                what takes the step back later, as long as nothing else has changed the adapter.

        Raises:
            Refused: before anything changed. Any other error leaves the shadow and its optimizer as they were.
        """
        began = time.perf_counter()
        self.check(lessons, adapter, lr)
        pupil = self.pupil(adapter, lr)
        pupil.reserve(self.depth + 2)  # besides the journal's the newest one, and the next
        before, states, journal = pupil.moment(), random_state(self.bank.model.device), list(pupil.journal)
        labelled = sum(int((lesson.label >= 0).sum()) for lesson in lessons)
        done = False

        def take_back() -> None:
            pupil.go_back(before)
            pupil.journal = deque(journal)
            set_random_state(states, self.bank.model.device)  # dropout has drawn

        try:
            loss, norm, scale = self._step(lessons, adapter, labelled, None if dry_run else float(lr))
            version = self.bank.adapters[adapter].version
            outcome = LearnOutcome(True, loss_before=loss, n_labelled=labelled, adapter=adapter, version=version)
            if not dry_run:
                assert norm is not None and scale is not None
                if not scale or not math.isfinite(loss):
                    raise Refused(f"loss or gradient is not finite (loss {loss}); nothing was changed")
                pupil.step += 1
                outcome = replace(outcome, gradient_norm=norm, clip_scale=scale)
            if measure_after:
                outcome = replace(outcome, loss_after=self._loss(lessons, adapter, labelled))
            outcome = replace(outcome, digest=digest(pupil.moment().shadow), step=pupil.step)
            if not dry_run:
                self._guard(adapter)
                self._remember(pupil, before)
            outcome = replace(outcome, ms=(time.perf_counter() - began) * 1e3)
            if commit is not None and not dry_run:
                commit(outcome, take_back)
            done = True
        finally:
            if not done:
                take_back()
            elif dry_run:
                set_random_state(states, self.bank.model.device)
            for p in pupil.shadow.values():
                p.grad = None
        return outcome

    def _step(
        self, lessons: Sequence[Lesson], adapter: str, labelled: int, lr: float | None
    ) -> tuple[float, float | None, float | None]:
        """Loss, gradient norm and clip scale of an optimizer's step at a rate; without one, of none."""
        loss = self._gradients_that_fit(lessons, adapter, labelled)
        if lr is None:
            return float(loss), None, None
        optimizer = self.pupil(adapter).optimizer
        for group in optimizer.param_groups:
            group["lr"] = lr
        norm, scale = optimizer.step()  # the host has it ready while a GPU computes gradients
        return float(loss), float(norm), float(scale)

    def _guard(self, adapter: str) -> None:
        """Refuse a step that made the probe worse than allowed."""
        if not self.probe:
            return
        if self._probe_base is None:
            with self.bank.serving(()):
                self._probe_base = self.probe_loss()
        with self.bank.learning((), adapter):
            now = self.probe_loss()
        if not now <= self._probe_base + self.probe_rise:
            raise Refused(
                f"the probe's loss is {now:.4f} after the step and {self._probe_base:.4f} under the base, a rise of "
                f"more than {self.probe_rise:g}; the step was undone"
            )

    @torch.no_grad()
    def probe_loss(self) -> float:
        """Mean loss of the probe's tokens under what the model's layers carry now."""
        total, count = 0.0, 0
        for row in self.probe:
            total += float(self.bank.model.loss(row[None, :-1], row[None, 1:], reduction="sum"))
            count += len(row) - 1
        return total / count

    def undo(self, adapter: str, steps: int = 1) -> int:
        """Give back the shadow and moments of `steps` steps ago; the step that it is at then."""
        pupil, steps = self.pupils.get(adapter), whole(steps, "steps")
        if pupil is None or not 1 <= steps <= len(pupil.journal):
            known = 0 if pupil is None else len(pupil.journal)
            raise Refused(f"adapter {adapter!r}: {steps} steps cannot be undone; the journal holds {known}")
        for _ in range(steps):
            to = pupil.journal.pop()
        pupil.go_back(to)
        return pupil.step

    def start_from(self, adapter: str, weights: State) -> None:
        """Make these the shadow, with moments at rest; one step of the journal leads back."""
        pupil = self.pupil(adapter)
        now = pupil.moment()
        pupil.go_back(Moment(pupil.step, weights, {**now.optimizer, "values": {}}, {}))
        self._remember(pupil, now)

    def _remember(self, pupil: Pupil, before: Moment) -> None:
        pupil.journal.append(before)
        while len(pupil.journal) > self.depth:
            pupil.journal.popleft()

    def pupil(self, adapter: str, lr: float = 1e-4) -> Pupil:
        """The adapter's shadow and its optimizer, made once."""
        shadow = self.bank.shadow(adapter)
        if adapter not in self.pupils or self.pupils[adapter].shadow is not shadow:  # of one that was removed
            options = {"gradient_clip": self.gradient_clip, "weight_decay": self.weight_decay}
            optimizer = Adam(list(shadow.values()), lr=lr, **options)  # type: ignore[arg-type]
            self.pupils[adapter] = Pupil(shadow, self.bank.weights(adapter), optimizer)
        return self.pupils[adapter]

    def check(self, lessons: Sequence[Lesson], adapter: str, lr: float) -> None:
        """Refuse what cannot be learned; changes nothing."""
        self.bank.of(adapter)
        low, high = self.lr_range
        if not isinstance(lr, numbers.Real) or not low <= lr <= high:
            raise Refused(f"lr must be between {low:g} and {high:g}; got {lr!r}")
        if not lessons:
            raise Refused("there is nothing to learn")
        if layers := stateful(self.cache):
            raise Refused(f"layers {layers} keep a state through which no gradient is carried; this model only serves")
        vocab, longest = self.bank.model.config.vocab_size, self.bank.model.config.max_position_embeddings
        for lesson in lessons:
            n = len(lesson.tokens)
            where = f"slot {lesson.slot}, {lesson.prefix} cached rows"
            for name, t in (("labels", lesson.label), ("weights", lesson.label_weight)):
                if t is not None and t.shape != lesson.tokens.shape:
                    raise Refused(f"{where}: {name} must be one for each of the {n} tokens; got {tuple(t.shape)}")
            if not n or not bool((lesson.label >= 0).any()):
                raise Refused(f"{where}: no token carries a label")
            for name, t, least in (("token", lesson.tokens, 0), ("label", lesson.label, UNLABELLED)):
                bad = ((t < least) | (t >= vocab)).nonzero()
                if len(bad):
                    at = int(bad[0])
                    raise Refused(f"{where}: {name} {at} is {int(t[at])}, outside the vocabulary of {vocab}")
            check_weights(lesson.label, lesson.label_weight)
            if lesson.prefix + n > longest:
                raise Refused(f"{where}: {n} more tokens are beyond the model's context of {longest}")
            self._check_budget(lesson, where)

    def _check_budget(self, lesson: Lesson, where: str) -> None:
        run = max(end - start for start, end in runs_of(lesson.label))
        need = adjoint_bytes(self.bank.model, run)
        if self.budget_bytes is not None and need > self.budget_bytes:
            raise Refused(
                f"{where}: the keys, values and adjoints of a reply of {run} tokens take {need} bytes, more than the "
                f"{self.budget_bytes} allowed; send a shorter reply, or raise the budget"
            )

    def _gradients_that_fit(self, lessons: Sequence[Lesson], adapter: str, labelled: int) -> Tensor:
        """`_gradients`; where memory runs out without recorded steps, then in chunks of half the rows, on which no
        gradient depends."""
        state, given = random_state(self.bank.model.device), self.chunk
        while True:
            try:
                return self._gradients(lessons, adapter, labelled)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                why = diagnostic(error)
            if self.step is None or not self.step.give_back(why):
                self._halve(lessons, given, why)
            for p in self.bank.shadow(adapter).values():
                p.grad = None
            set_random_state(state, self.bank.model.device)

    def _halve(self, lessons: Sequence[Lesson], given: int, why: str) -> None:
        longest = max(end - start for lesson in lessons for start, end in runs_of(lesson.label))
        smaller = min(self.chunk, longest) // 2
        if not smaller:
            self.chunk = given
            raise Refused(f"memory ran out even a row at a time, and nothing was changed: {why}")
        log.warning("learning in chunks of %d rows from here on: %s", smaller, why)
        self.chunk = smaller

    def _gradients(self, lessons: Sequence[Lesson], adapter: str, labelled: int) -> Tensor:
        """Put the gradients of all lessons' mean loss on the shadow; the loss."""
        total = torch.zeros((), device=self.bank.model.device)
        for lesson in lessons:
            reply = self._alone(lesson)
            if reply is None or self.step is None:
                total += self._walked(lesson, adapter, labelled)
            else:
                total += self.step(
                    reply, lesson.key, adapter, self.pupil(adapter), denominator=labelled, chunk=self.chunk,
                    recompute=self.recompute,
                )  # fmt: skip
        return total

    def _alone(self, lesson: Lesson) -> Reply | None:
        """The lesson's labelled run, where that is one chunk behind its slot's rows alone."""
        (start, end), *more = runs_of(lesson.label)
        if start or more or self.step is None or not self.step.takes(end, self.chunk, lesson.prefix):
            return None
        weight = None if lesson.label_weight is None else lesson.label_weight[:end]
        return Reply(lesson.slot, lesson.prefix, lesson.tokens[:end], lesson.label[:end], weight)

    def _walked(self, lesson: Lesson, adapter: str, labelled: int) -> Tensor:
        """The loss of a lesson's runs, chunk by chunk."""
        total = torch.zeros((), device=self.bank.model.device)
        ids, label, weight = self._there(lesson)
        context = self._context(lesson, ids)
        with self.bank.learning(lesson.key, adapter):
            for start, end in runs_of(lesson.label):
                before = None if context is None or not start else context.first(start)
                total += walk(
                    self.bank.model, ids[start:end], label[start:end], chunk=self.chunk,
                    row_weight=None if weight is None else weight[start:end], denominator=labelled,
                    before=before, recompute=self.recompute, **self._behind(lesson),
                ).loss  # fmt: skip
        return total

    def _context(self, lesson: Lesson, ids: Tensor) -> Rows | None:
        """The rows before the last labelled run, as serving makes them: what the runs after them are given."""
        last = max(start for start, _ in runs_of(lesson.label))
        if not last:
            return None
        with self.bank.serving(lesson.key):
            return rows_of(self.bank.model, ids[:last], chunk=self.chunk, **self._behind(lesson))

    def _behind(self, lesson: Lesson) -> dict[str, Any]:
        """Where a lesson's rows go on from; one behind nothing is of no slot."""
        return {"cache": self.cache, "slot": lesson.slot, "prefix": lesson.prefix} if lesson.prefix else {}

    @torch.no_grad()
    def _loss(self, lessons: Sequence[Lesson], adapter: str, labelled: int) -> float:
        """The loss alone, under the shadow as it is now."""
        return float(self._gradients_that_fit(lessons, adapter, labelled))

    def _there(self, lesson: Lesson) -> tuple[Tensor, Tensor, Tensor | None]:
        device = self.bank.model.device
        weight = lesson.label_weight
        return lesson.tokens.to(device), lesson.label.to(device), None if weight is None else weight.to(device)
