"""One generation, whatever the dialect: text as it comes, stop strings, counts, and the learn at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from ...models import Text, Tokenizer
from ..calls import Call, Reader
from ..learner import LearnOutcome
from ..requests import Finished, Ticket
from ..sampling import Chosen
from ..thoughts import MARKS, Thoughts
from .errors import ApiError


@dataclass(frozen=True)
class Piece:
    """Text that can be shown, and the tokens that it came with."""

    text: str
    chosen: tuple[Chosen, ...] = ()


@dataclass(frozen=True)
class Thought:
    """What is thought before the answer, and the tokens that it came with."""

    text: str
    chosen: tuple[Chosen, ...] = ()


@dataclass(frozen=True)
class Called:
    """A whole call, the `index`-th of the reply, and the tokens that it came with."""

    index: int
    call: Call
    chosen: tuple[Chosen, ...] = ()


@dataclass
class End:
    """How a generation ended.

    why: "stop", "length" or "cancelled"; stop_string: the string that ended it, if one did; calls: how many were made;
    thought: what was thought before the text, and in how many tokens.
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
    calls: int = 0
    thought: str = ""
    thought_tokens: int = 0


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


async def generation(
    ticket: Ticket,
    tokenizer: Tokenizer,
    stop: Sequence[str],
    reader: Reader | None = None,
    thoughts: Thoughts | None = None,
) -> AsyncIterator[Piece | Thought | Called | End]:
    """Pieces of text and calls, then one End. Calls are what `reader` finds in what `thoughts` leaves.

    Raises:
        ApiError: the turn failed.
    """
    text, stops, shown, pending = Text(tokenizer), Stops(stop), "", list[Chosen]()
    special = (*(() if reader is None else reader.format.tokens), *(() if thoughts is None else MARKS))
    marks = tokenizer.ids_of(special)
    began, first, last, ended = time.perf_counter(), None, None, None
    thought, thought_tokens = "", 0

    def split(more: str, final: bool) -> Iterator[str | Thought | Call]:
        pieces = [(False, more)] if more else []
        if thoughts is not None:
            pieces = [*thoughts.add(more), *(thoughts.rest() if final else [])]
        for thinks, piece in pieces:
            if thinks:
                yield Thought(piece)
            elif reader is None:
                yield piece
            else:
                yield from reader.add(piece)
        if final and reader is not None:
            yield from reader.rest()

    def parts(more: str, final: bool = False) -> Iterator[Piece | Thought | Called]:
        """What can be given now, of which the first comes with the tokens so far."""
        nonlocal shown, thought, pending
        for part in split(more, final):
            if isinstance(part, Call):
                calls.append(part)
                yield Called(len(calls) - 1, part, tuple(pending))
            elif isinstance(part, Thought):
                thought += part.text
                yield Thought(part.text, tuple(pending))
            else:
                shown += part
                yield Piece(part, tuple(pending))
            pending = []

    calls: list[Call] = []
    async for event in events(ticket):
        if isinstance(event, Finished):
            ended = event
            break
        last = time.perf_counter()  # what is learned before the turn ends is no part of the reply's time
        first = first or last
        if stops.found is not None or (reader is not None and reader.done):
            continue
        pending.append(event)
        if event.token in marks:
            more = text.rest() + marks[event.token]
            text = Text(tokenizer)
        else:
            more = "" if event.token in tokenizer.stop_ids else text.add(event.token)
        thinking = thoughts is not None and thoughts.inside
        for part in parts(stops.add(more)):
            yield part
        thought_tokens += thoughts is not None and (thinking or thoughts.inside)
        if stops.found is not None or (reader is not None and reader.done):
            ticket.stop()
    assert ended is not None
    if ended.why == "error":
        raise ApiError(400 if ended.refused else 500, ended.error or "the turn failed")
    rest = "" if stops.found is not None else stops.add(text.rest()) + stops.held
    for part in parts(rest, final=True):
        yield part
    now = time.perf_counter()
    first, last = first or now, last or now
    why = "stop" if stops.found is not None else ended.why
    learn = ended.learn or ticket.known
    yield End(
        why=why, text=shown, tokens=len(ticket.tokens), prompt=ended.prompt, cached=ended.cached, slot=ended.slot,
        learn=learn, seconds_prompt=first - began, seconds_text=last - first, stop_string=stops.found,
        drafted=ended.drafted, accepted=ended.accepted, calls=len(calls),
        thought=thought, thought_tokens=thought_tokens,
    )  # fmt: skip
