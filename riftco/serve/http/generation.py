"""One generation, whatever the dialect: text as it comes, stop strings, counts, and the learn at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from ...models import Text, Tokenizer
from ..learner import LearnOutcome
from ..requests import Finished, Ticket
from ..sampling import Chosen
from .errors import ApiError


@dataclass(frozen=True)
class Piece:
    """Text that can be shown, and the tokens that it came with."""

    text: str
    chosen: tuple[Chosen, ...] = ()


@dataclass
class End:
    """How a generation ended.

    why: "stop", "length" or "cancelled"; stop_string: the string that ended it, if one did.
    """

    why: str
    text: str
    tokens: int
    prompt: int
    cached: int
    slot: int | None
    learn: LearnOutcome | None
    seconds_prompt: float
    seconds_text: float
    stop_string: str | None = None
    drafted: int = 0
    accepted: int = 0


class Stops:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, strings: Sequence[str]):
        self.strings = [s for s in strings if s]
        self.held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What can be shown; sets `found` once a stop string is there, from which on there is nothing more."""
        self.held += text
        at = [(i, s) for s in self.strings if (i := self.held.find(s)) >= 0]
        if at:
            i, self.found = min(at, key=lambda pair: pair[0])
            shown, self.held = self.held[:i], ""
            return shown
        keep = max((n for s in self.strings for n in range(1, len(s)) if self.held.endswith(s[:n])), default=0)
        shown, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return shown


async def events(ticket: Ticket) -> AsyncIterator[Chosen | Finished]:
    """A ticket's events on the event loop; a reader that goes away cancels it."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(ready.set)

    ticket.notify = wake
    try:
        while True:
            ready.clear()
            for event in ticket.waiting():
                yield event
                if isinstance(event, Finished):
                    return
            await ready.wait()
    finally:
        if ticket.finished is None:
            ticket.cancel()


async def generation(ticket: Ticket, tokenizer: Tokenizer, stop: Sequence[str]) -> AsyncIterator[Piece | End]:
    """Pieces of text, then one End.

    Raises:
        ApiError: the turn failed.
    """
    text, stops, shown, pending = Text(tokenizer), Stops(stop), "", list[Chosen]()
    began, first, ended = time.perf_counter(), None, None
    async for event in events(ticket):
        if isinstance(event, Finished):
            ended = event
            break
        first = first or time.perf_counter()
        if stops.found is not None:
            continue
        pending.append(event)
        piece = "" if event.token in tokenizer.stop_ids else stops.add(text.add(event.token))
        if stops.found is not None:
            ticket.stop()
        if piece:
            shown += piece
            yield Piece(piece, tuple(pending))
            pending = []
    assert ended is not None
    if ended.why == "error":
        raise ApiError(500, ended.error or "the turn failed")
    if stops.found is None and (rest := stops.add(text.rest()) + stops.held):
        shown += rest
        yield Piece(rest, tuple(pending))
    now = time.perf_counter()
    first = first or now
    why = "stop" if stops.found is not None else ended.why
    learn = ended.learn or ticket.known
    yield End(
        why=why, text=shown, tokens=len(ticket.tokens), prompt=ended.prompt, cached=ended.cached, slot=ended.slot,
        learn=learn, seconds_prompt=first - began, seconds_text=now - first, stop_string=stops.found,
        drafted=ended.drafted, accepted=ended.accepted,
    )  # fmt: skip
