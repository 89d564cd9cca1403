"""Lessons beside serving: each has the engine for its step, and the disk while others are served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..train.duty import DutyCycle
from .batch import Refused, ids_of
from .engine import Engine
from .learner import LearnOutcome
from .turns import Totals
from .writing import Writing


class Lessons:
    """What learns on a scheduler's engine, on the scheduler's thread or another.

    Attributes:
        lock: held for an iteration: between two of them others may use the engine.
    """

    def __init__(self, engine: Engine, duty: DutyCycle, clock: Callable[[], float]):
        self.engine, self.duty, self.clock = engine, duty, clock
        self.lock, self.totals = threading.RLock(), Totals()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """The engine for who changes adapters: `lock`, once the last learn is on the disk. It serves until then."""
        while True:
            with self.lock:
                writing = self.engine.writing
                if writing is None or writing.done:
                    self.engine.settle()
                    yield
                    return
            writing.wait()

    def learn(
        self, slot: int, prompt: Sequence[int], reply: Sequence[int], adapter: str, lr: float,
        *, note: Mapping[str, Any] | None = None, **options,
    ) -> LearnOutcome:  # fmt: skip
        """Learn a reply behind the prompt that a slot served; the one learner of every route.

        The slot must hold the prompt as it was served, all but its last token perhaps: it is compared token by token.
        """
        return self.apart(lambda: self._learn(slot, prompt, reply, adapter, lr, note, options))

    def apart(self, learn: Callable[[], LearnOutcome]) -> LearnOutcome:
        """A learn (by the engine, with wait=False) on the caller's thread, on the disk when this returns. It has the
        engine for the step alone; serving goes on while it is written."""
        with self.settled():
            outcome = learn()
            writing = self.engine.writing if outcome.success else None
        if writing is not None:
            writing.wait()
        with self.lock:
            self._over(outcome, writing)
        return outcome

    def worked(self, seconds: float) -> None:
        """Somebody has learned for so long: the duty cycle owes it."""
        self.duty.worked(seconds)
        self.totals.learn_seconds += seconds

    def _learn(self, slot, prompt, reply, adapter, lr, note, options) -> LearnOutcome:
        began = self.clock()
        try:
            held = self.engine.slot(slot).tokens
            prompt, reply = ids_of(prompt, "the prompt"), ids_of(reply, "the reply to learn")
            if not prompt or not reply:
                raise Refused(f"the {'reply to learn' if prompt else 'prompt'} is empty")
            n = len(prompt) - 1
            for i, (mine, asked) in enumerate(zip(held, prompt[:n])):
                if mine != asked:
                    where = f"it differs at token {i} of {n}"
                    raise Refused(f"slot {slot} served another prompt: {where}; serve this one, then learn")
        except Refused as why:
            return LearnOutcome(False, str(why), adapter=adapter)
        tokens = [prompt[-1], *reply[:-1]]
        outcome = self.engine.learn(
            slot, n, tokens, reply, adapter=adapter, lr=lr, note=note, wait=False, **options
        )  # fmt: skip
        self.worked(self.clock() - began)
        return outcome

    def _over(self, outcome: LearnOutcome, writing: Writing | None) -> None:
        """A learn was refused, or the disk has said yes or no to it; raises what the disk says."""
        if writing is not None:
            if self.engine.writing is writing:
                self.engine.settle()
            writing.check()
        self.totals.learned += outcome.success
        self.totals.refused += not outcome.success
