"""Continuous batching: every iteration is one batch of decode rows and prefill chunks of whatever is there."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from ..models import ModelError
from ..models.kv_rows import Ring
from ..train.duty import DutyCycle
from .ahead import Ahead
from .bank import AdapterSet
from .batch import Batch, Refused, ids_of, whole
from .draft import Draft
from .draw import choose
from .engine import Decoded, Engine
from .grammar import Grammar
from .host import HostRow
from .learner import LearnOutcome
from .lessons import Lessons
from .requests import Finished, Request, Teach, Ticket
from .sampling import Sampler, Sampling
from .slots import Slot, State
from .turns import Turn

log = logging.getLogger(__name__)
BORROW = 32  # rows of a neighbour's prefix below which reading them again is as cheap as copying them
LEARN_DUTY = 0.10  # the part of the time that learning may take while others wait


class Scheduler(Lessons):
    """Runs requests on an engine's slots. `step` does one iteration; `start` does them on a thread.

    Args:
        engine: not to be used by anyone else while this runs, but by who holds `lock`.
        duty: the part of the time that learning may take while other slots are busy.
        queue: how many requests may wait.
        speculate: how many tokens to guess from the text so far and check in one forward; replies do not depend on it
            but for rounding.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        duty: float = LEARN_DUTY,
        queue: int = 1024,
        speculate: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        for group in engine.cache.groups:
            if isinstance(group, Ring) and group.size - group.reach < speculate:
                raise ValueError(
                    f"{speculate} guesses cannot be taken back from sliding windows; make the engine with "
                    f"undo={speculate} or more, or guess less"
                )
        self._stopping = False
        busy, stopped = self._busy, lambda: self._stopping
        super().__init__(engine, DutyCycle(duty, busy=busy, stopped=stopped, clock=clock), clock)
        self.limit, self.speculate = queue, speculate
        self.waiting: deque[Ticket] = deque()
        self.turns: dict[int, Turn] = {}
        self.tasks: deque[tuple[int | None, Callable[[], Any], Future]] = deque()
        self._work = threading.Condition()  # of what waits: who submits waits for no iteration
        self.ahead = Ahead(engine)
        self._on_host = HostRow(len(engine.slots) * (1 + speculate), engine.model.device)
        self._thread: threading.Thread | None = None
        self._ticks = self._batches = 0

    def submit(self, request: Request, on_end: Callable[[Finished], None] | None = None) -> Ticket:
        """Queue a request; `on_end` is told how it ended, before its reader is, on the scheduler's thread.

        Raises:
            Refused: it can never run as it stands, too many wait, or this is closed.
        """
        request = self.check(request)
        with self._work:
            if self._stopping:
                raise Refused("the scheduler is closed")
            if len(self.waiting) >= self.limit:
                raise Refused(f"{self.limit} requests wait already; try again later")
            ticket = Ticket(request, on_end)
            self.waiting.append(ticket)
            self._work.notify()
            return ticket

    def between_turns(self, slot: int, task: Callable[[], Any]) -> Future:
        """Run something on a slot once its turn has ended, before another begins; the future has its result.

        Raises:
            Refused: there is no such slot, or this is closed.
        """
        return self._later(self.engine.slot(slot).id, task)

    def between(self, task: Callable[[], Any]) -> Future:
        """Run something that changes no slot between two iterations, one such task each time.

        Raises:
            Refused: this is closed.
        """
        return self._later(None, task)

    def _later(self, slot: int | None, task: Callable[[], Any]) -> Future:
        with self._work:
            if self._stopping:
                raise Refused("the scheduler is closed")
            result: Future = Future()
            self.tasks.append((slot, task, result))
            self._work.notify()
            return result

    def check(self, request: Request) -> Request:
        """The request, with copies of what its sender may change; Refused where it can never run as it stands."""
        engine, vocab = self.engine, self.engine.model.config.vocab_size
        prompt, stops = ids_of(request.prompt, "the prompt"), ids_of(request.stop_ids, "stop_ids")
        if not prompt:
            raise Refused("the prompt is empty; accepted: at least one token")
        if len(prompt) > engine.window:
            raise Refused(f"the prompt has {len(prompt)} tokens, more than the window of {engine.window}")
        if len(prompt) > engine.cache.longest:
            raise Refused(
                f"the prompt has {len(prompt)} tokens; all pages of the cache together hold {engine.cache.longest}"
            )
        for token in prompt:
            if not 0 <= token < vocab:
                raise Refused(f"token {token} is outside the vocabulary of {vocab}")
        if whole(request.max_new_tokens, "max_new_tokens") < 1:
            raise Refused(f"max_new_tokens must be at least 1; got {request.max_new_tokens}")
        kinds = (("sampling", Sampling), ("adapters", Mapping), ("teach", Teach | None), ("grammar", Grammar | None))
        for name, kind in kinds:
            if not isinstance(getattr(request, name), kind):
                raise Refused(f"{name}: {getattr(request, name)!r:.60} is no such thing")
        request.sampling.check(vocab)
        engine.bank.ready(engine.bank.set_of(request.adapters))
        if request.slot is not None:
            engine.slot(request.slot)
        sampling = replace(request.sampling, logit_bias=dict(request.sampling.logit_bias))
        teach = request.teach
        if teach is not None and teach.reply is not None:
            teach = replace(teach, reply=ids_of(teach.reply, "the reply to learn"))
        adapters = dict(request.adapters)
        return replace(
            request, prompt=prompt, stop_ids=frozenset(stops), sampling=sampling, adapters=adapters, teach=teach
        )

    def step(self) -> bool:
        """One iteration; False when there was nothing to do."""
        with self.lock:
            self._drop_cancelled()
            self._do_tasks()
            self._admit()
            self._finish()
            decoded, turns = self.ahead.take(self.turns)
            batch, turns = (None, turns) if decoded is not None else self._batch()
            if not turns:
                return bool(self.turns)
            try:
                if decoded is None:
                    assert batch is not None
                    decoded = self.engine.decode(batch)
                self._choose(decoded, turns)
            except Exception as why:  # the next batch may succeed
                log.exception("a batch of %d slots failed", len(turns))
                self.ahead.drop()
                self._fail([turn for turn in turns if turn.why is None], why)
            self._finish()
            return True

    def _fail(self, turns: list[Turn], why: Exception | str, refused: bool = False) -> None:
        """End turns by an error. What a forward wrote before it broke may have replaced rows of a sliding window."""
        for turn in turns:
            self.engine.cut(turn.slot.id, 0)
            said = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
            self._end(turn, Finished("error", turn.slot.id, error=said, refused=refused))

    def run(self) -> None:
        """Iterate until there is nothing left to do."""
        while self.step() or self.waiting or self.tasks:
            self._rest()

    def start(self) -> None:
        if self._thread is not None or self._stopping:
            raise RuntimeError("a scheduler starts once")
        self._thread = threading.Thread(target=self._loop, name="riftco-scheduler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; what has not ended is cancelled."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()
        with self.lock:
            self.engine.settle()
            for turn in [turn for turn in self.turns.values() if turn.writing is not None]:
                self._finish_one(turn)
            for ticket in [*self.waiting, *(turn.ticket for turn in self.turns.values())]:
                ticket.cancel()
            self._drop_cancelled()
            for _, _, result in self.tasks:
                result.cancel()
            self.tasks.clear()

    def _loop(self) -> None:
        while True:
            with self._work:
                if self._stopping:
                    return
                if not self.waiting and not self.turns and not self.tasks:
                    self._work.wait()
                    continue
            try:
                if not self.step():
                    time.sleep(0.001)
                self._rest()
            except Exception as why:  # who waits for a reply is told, and those who come are served
                log.exception("an iteration failed")
                with self.lock:
                    self._fail([turn for turn in self.turns.values() if turn.writing is None], why)

    def _rest(self) -> None:
        """Where there is nothing to do but to wait for the disk, wait a moment, and let others have the engine."""
        writing = self.engine.writing
        if writing is not None and not self._busy():
            writing.wait(0.001)

    def _busy(self) -> bool:
        """Whether a turn waits for its tokens."""
        return any(turn.why is None for turn in list(self.turns.values()))

    def _drop_cancelled(self) -> None:
        for ticket in [t for t in list(self.waiting) if t.cancelled]:
            self.waiting.remove(ticket)
            ticket.put(Finished("cancelled"))
        for turn in [t for t in self.turns.values() if t.ticket.cancelled and t.writing is None]:
            if turn.why is not None:  # its lesson was what waited
                self.duty.drop()
            self._end(turn, Finished("cancelled", turn.slot.id, turn.cached, len(turn.prompt)))

    def _do_tasks(self) -> None:
        """Run the tasks whose slot is between two turns, and one that is of no slot, in the order that they came."""
        one = True
        for entry in list(self.tasks):
            slot, task, result = entry
            if slot in self.turns or (slot is None and not one):
                continue
            one = one and slot is not None
            self.tasks.remove(entry)
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(task())
            except Exception as why:  # whoever asked for it is told
                result.set_exception(why)

    def _admit(self) -> None:
        """Give waiting requests the idle slots, as they came; who waits for a slot of its own lets others by."""
        for ticket in list(self.waiting):
            idle = [s for s in self.engine.slots if s.id not in self.turns]
            wanted = ticket.request.slot
            if wanted is not None:
                idle = [s for s in idle if s.id == wanted]
            if not idle:
                continue
            self.waiting.remove(ticket)
            try:
                self._begin(ticket, idle)
            except Exception as why:  # an adapter that went away while it waited, or no memory
                log.exception("a request could not begin")
                ticket.put(Finished("error", error=str(why)))

    def _begin(self, ticket: Ticket, idle: list[Slot]) -> None:
        request, engine = ticket.request, self.engine
        prompt, key = list(request.prompt), engine.bank.set_of(request.adapters)
        engine.bank.ready(key)
        matcher = None if request.grammar is None else request.grammar.matcher(prompt)
        sampler = Sampler(request.sampling, prompt, engine.model.config.vocab_size, engine.model.device, matcher)
        slot = max(idle, key=lambda s: (s.common(prompt, key), not s.tokens, -s.used))
        engine.use(slot.id, key)
        self._keep(slot, min(slot.common(prompt, key), len(prompt) - 1))  # the last row's logits are needed
        self._borrow(slot, prompt, key)
        self._ticks += 1
        slot.used, slot.state = self._ticks, State.PREFILLING
        ticket.cached = len(slot.tokens)
        text = Draft(prompt) if self.speculate else None
        self.turns[slot.id] = Turn(ticket, slot, prompt, sampler, len(slot.tokens), text, considered=self._batches)

    def _keep(self, slot: Slot, n: int) -> None:
        """Cut the slot to n rows, or to none where a sliding window has let go of what precedes them."""
        try:
            self.engine.cut(slot.id, n)
        except Refused:
            self.engine.cut(slot.id, 0)

    def _borrow(self, slot: Slot, prompt: list[int], key: AdapterSet) -> None:
        """Copy the rows of a longer prefix from another slot."""
        lender = max(self.engine.slots, key=lambda s: s.common(prompt, key))
        start, end = len(slot.tokens), min(lender.common(prompt, key), len(prompt) - 1)
        if end >= start + BORROW:
            try:
                self.engine.lend(lender.id, slot.id, start, end)
            except ModelError as why:  # its sliding windows have moved on, or pages are short: read them again
                log.debug("slot %d lends nothing to slot %d: %s", lender.id, slot.id, why)

    def _batch(self) -> tuple[Batch | None, list[Turn]]:
        """Decode rows of every slot that has one, then prefill chunks while there is room."""
        room, turns = self._rows(), []
        parts: list[tuple[int, int, list[int], str]] = []
        ends: dict[int, int] = {}  # slot -> rows that it will hold
        self._batches += 1
        for turn, most in self._order():
            if room < 1:
                continue
            turn.considered = self._batches
            pending, held = turn.pending, len(turn.slot.tokens)
            rows = pending[: self._fit(turn.slot, ends, min(room, most, len(pending)))]
            if not rows:
                continue
            room -= len(rows)
            last = len(rows) == len(pending)
            turn.draft = self._guess(turn, room) if last else []
            ends[turn.slot.id] = held + len(rows)
            guessed = held + len(rows) + len(turn.draft)
            if turn.draft and not self.engine.fits({**ends, turn.slot.id: guessed}):
                turn.draft = []
            ends[turn.slot.id] += len(turn.draft)
            room -= len(turn.draft)
            output = ("all" if turn.draft else "last") if last else "none"
            parts.append((turn.slot.id, held, rows + turn.draft, output))
            turns.append(turn)
        if not parts and self.turns and all(turn.why is None for turn in self.turns.values()):
            self._yield()
        return (Batch.serving(parts), turns) if parts else (None, [])

    def _order(self) -> list[tuple[Turn, int]]:
        """Who gets rows of a batch, in turn, and how many at most: those that decode, the longest left out first, then
        prompts. A prompt that the last batch had no row for goes first, with half of this one."""
        running = sorted((t for t in self.turns.values() if t.why is None), key=lambda t: t.slot.used)
        decoding = sorted((t for t in running if t.slot.state is State.DECODING), key=lambda t: t.considered)
        prompts = [t for t in running if t.slot.state is not State.DECODING]
        chunk = self._rows()
        order = [(t, chunk) for t in (*decoding, *prompts)]
        if prompts and prompts[0].considered < self._batches - 1:
            order.remove((prompts[0], chunk))
            order.insert(0, (prompts[0], max(1, chunk // 2)))
        return order

    def _rows(self) -> int:
        """The most rows of the next batch."""
        waits = any(t.why is None and t.slot.state is State.DECODING for t in self.turns.values())
        return self.engine.chunk if waits else self.engine.alone

    def _yield(self) -> None:
        """Nobody can go on for want of pages: the newest turn gives its own to the others, and reads again later."""
        holders = sorted((t for t in self.turns.values() if t.slot.tokens), key=lambda t: t.slot.used)
        if len(holders) > 1:
            self.engine.cut(holders[-1].slot.id, 0)
            holders[-1].slot.state = State.PREFILLING
        else:  # all pages are its own
            self._fail(holders or list(self.turns.values()), "the cache has no page left; make the engine with more")

    def _fit(self, slot: Slot, ends: Mapping[int, int], rows: int) -> int:
        """How many of so many more rows of a slot the cache has pages for, beside slots that end at `ends`. Idle slots
        give theirs up for it, the longest unused first."""
        while rows and not self.engine.fits({**ends, slot.id: len(slot.tokens) + rows}):
            idle = [s for s in self.engine.slots if s.id not in self.turns and s.tokens]
            if idle:
                self.engine.cut(min(idle, key=lambda s: s.used).id, 0)
            else:
                rows //= 2
        return rows

    def _guess(self, turn: Turn, room: int) -> list[int]:
        """What may follow the newest token of a turn that decodes, as far as its rows and tokens go."""
        if turn.text is None or turn.slot.state != State.DECODING:
            return []
        left = turn.ticket.request.max_new_tokens - len(turn.reply) - 1
        left = min(left, self.engine.window - len(turn.slot.tokens) - 1, self.speculate, room)
        return turn.text.next(left) if left > 0 else []

    def _choose(self, decoded: Decoded, turns: list[Turn]) -> None:
        """Sample the next tokens of each turn whose prompt is read."""
        ready = [turn for turn in turns if not turn.pending]
        if not ready:
            return
        starts = list(itertools.accumulate((1 + len(turn.draft) for turn in ready), initial=0))
        if any(turn.draft for turn in ready):
            for turn in ready:
                turn.slot.unsure = len(turn.draft)
            likeliest = iter(self._on_host(decoded.likeliest))  # one wait for the device, where all are plain
            chosen = [
                turn.sampler.accept(
                    decoded.logits[start:end], turn.draft, list(itertools.islice(likeliest, end - start))
                )
                for turn, (start, end) in zip(ready, itertools.pairwise(starts))
            ]
        else:
            drawn = decoded.likeliest
            if not all(turn.sampler.plain for turn in ready):
                drawn = choose([turn.sampler for turn in ready], decoded.logits)
            row = self._on_host.begin(drawn)
            if self.speculate == 0 and len(ready) == sum(turn.why is None for turn in self.turns.values()):
                self.ahead.begin(ready, drawn)  # nobody else waits for rows
            chosen = [[token] for token in self._on_host.wait(row)]  # one wait for the device
            for turn, (token,) in zip(ready, chosen):
                turn.sampler.follow(token)
        for turn, start, tokens in zip(ready, starts, chosen):
            self._take(turn, decoded.logits, start, tokens)
        self.ahead.told()

    def _take(self, turn: Turn, logits: torch.Tensor, start: int, tokens: list[int]) -> None:
        """Append tokens, chosen by logits [n, V] from row `start` on, to a turn's reply until it ends; rows of guesses
        that were wrong are taken back."""
        if turn.sampler.failure:
            self._fail([turn], turn.sampler.failure, refused=True)
            return
        turn.slot.state, request = State.DECODING, turn.ticket.request
        ends = turn.sampler.done  # by its grammar, with the last of these tokens
        for taken, token in enumerate(tokens, 1):
            turn.ticket.put(turn.sampler.report(logits, start + taken - 1, token))
            if turn.text is not None:
                turn.text.add(token)
            if token in request.stop_ids or turn.ticket.stopped or (ends and taken == len(tokens)):
                turn.why = "stop"
            elif len(turn.reply) >= request.max_new_tokens or len(turn.prompt) + len(turn.reply) > self.engine.window:
                turn.why = "length"
            if turn.why is not None:
                break
        if turn.draft:
            turn.drafted += len(turn.draft)
            turn.accepted += min(taken, len(tokens) - 1)  # what stands behind a stop was not used
            self.engine.cut(turn.slot.id, len(turn.prompt) + len(turn.reply) - 1)  # the newest token is not read yet
            turn.draft = []

    def _finish(self) -> None:
        """End the turns that are done; those that teach hold their slot until their lesson's time has come, and until
        the disk has it."""
        for turn in [t for t in self.turns.values() if t.why is not None]:
            self._finish_one(turn)

    def _finish_one(self, turn: Turn) -> None:
        teach = turn.ticket.request.teach
        if teach is not None:
            turn.slot.state = State.LEARNING
            try:
                if not self._taught(turn, teach):
                    return
            except Exception as why:  # taken back; the turn was served
                log.exception("a learn on slot %d failed", turn.slot.id)
                turn.learn = LearnOutcome(False, f"{type(why).__name__}: {why}", adapter=teach.adapter)
        assert turn.why is not None
        finished = Finished(
            turn.why, turn.slot.id, turn.cached, len(turn.prompt), turn.learn, None, turn.drafted, turn.accepted
        )
        self._end(turn, finished)

    def _taught(self, turn: Turn, teach: Teach) -> bool:
        """Whether a turn's lesson is over; it begins once no other is on its way to the disk."""
        if turn.learn is None:
            before = self.engine.writing
            if (self._busy() and self.duty.debt > 0) or (before is not None and not before.done):
                return False
            turn.learn = self._teach(turn, teach)
            turn.writing = self.engine.writing if turn.learn.success else None
        if turn.writing is not None and not turn.writing.done:
            return False
        self._over(turn.learn, turn.writing)
        return True

    def _teach(self, turn: Turn, teach: Teach) -> LearnOutcome:
        reply = turn.reply if teach.reply is None else teach.reply
        if teach.reply is None and teach.refuse is not None and (why_not := teach.refuse(reply)):
            return LearnOutcome(False, why_not, adapter=teach.adapter)
        return self._learn(turn.slot.id, turn.prompt, reply, teach.adapter, teach.lr, teach.note, {})

    def _end(self, turn: Turn, finished: Finished) -> None:
        totals = self.totals
        totals.prompt += len(turn.prompt)
        totals.cached += turn.cached
        totals.predicted += len(turn.reply)
        totals.drafted += turn.drafted
        totals.accepted += turn.accepted
        turn.slot.state = State.IDLE
        del self.turns[turn.slot.id]
        turn.ticket.put(finished)
