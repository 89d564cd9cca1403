"""What is asked of the scheduler, and what comes back."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .grammar import Grammar
from .learner import LearnOutcome
from .sampling import Chosen, Sampling


@dataclass(frozen=True)
class Teach:
    """Learn this turn's reply, or `reply` in its place, on its slot before it is released.

    refuse: why a reply that was served is not to be learned, if it is not.
    """

    adapter: str
    lr: float
    reply: Sequence[int] | None = None  # with its end-of-turn token; None: the reply that was served
    note: Mapping[str, Any] = field(default_factory=dict)
    refuse: Callable[[Sequence[int]], str | None] | None = None


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: at most so many; the window ends it too.
        stop_ids: a reply ends with one of these, which is part of the reply's tokens and of what is learned.
        adapters: id -> scale; the newest versions at the time the request begins.
        slot: the slot that it must run on, or None.
        teach: learn on the slot when the turn is done.
        grammar: what the reply keeps to; it ends where the grammar does.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: Collection[int] = ()
    adapters: Mapping[str, float] = field(default_factory=dict)
    slot: int | None = None
    teach: Teach | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True)
class Finished:
    """The end of a reply.

    Attributes:
        why: "stop" (a stop token, or stop() on the ticket), "length", "cancelled" or "error".
        slot: where it ran.
        cached, prompt: how many tokens of the prompt were there already, of how many.
        learn: the outcome where the request was to teach; a turn that failed or was cancelled has none.
        error: what went wrong; refused: it was what the request asks for, not the server.
        drafted, accepted: tokens that were guessed, and of these how many were right.
    """

    why: str
    slot: int | None = None
    cached: int = 0
    prompt: int = 0
    learn: LearnOutcome | None = None
    error: str | None = None
    drafted: int = 0
    accepted: int = 0
    refused: bool = False


class Ticket:
    """A request on its way: iterate over its tokens; afterwards `finished` says how it ended."""

    def __init__(self, request: Request, on_end: Callable[[Finished], None] | None = None):
        self.request, self._on_end = request, on_end
        self.tokens: list[int] = []
        self.finished: Finished | None = None
        self.cancelled = self.stopped = False
        self.known: LearnOutcome | None = None  # of a learn that was asked for before, under the same id
        self.cached = 0  # tokens of the prompt that were there already, once it has begun
        self.notify: Callable[[], None] | None = None  # called after each event, on the thread that puts it
        self._queue: queue.SimpleQueue[Chosen | Finished] = queue.SimpleQueue()

    def cancel(self) -> None:
        """Nobody reads any more: end it, and learn nothing."""
        self.cancelled = True

    def stop(self) -> None:
        """End the reply after the tokens so far (a stop string was seen); it may still teach."""
        self.stopped = True

    def put(self, event: Chosen | Finished) -> None:
        if isinstance(event, Finished):
            self.finished = event
            if self._on_end is not None:
                self._on_end(event)
        else:
            self.tokens.append(event.token)
        self._queue.put(event)
        if self.notify is not None:
            self.notify()

    def waiting(self) -> Iterator[Chosen | Finished]:
        """The events that are there, without waiting for more."""
        while not self._queue.empty():
            yield self._queue.get()

    def next(self, timeout: float | None = None) -> Chosen | Finished:
        """The next event, the end again and again once it is there; raises queue.Empty after `timeout` seconds without
        one."""
        event = self._queue.get(timeout=timeout)
        if isinstance(event, Finished):
            self._queue.put(event)
        return event

    def __iter__(self) -> Iterator[Chosen]:
        while not isinstance(event := self.next(), Finished):
            yield event
