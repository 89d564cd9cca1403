"""Who reads an answer may go away: then there is nothing left to make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import Request

from ..requests import Ticket
from .errors import ApiError

T = TypeVar("T")


async def answered(request: Request, answer: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """The answer, unless the client hangs up before it is there: that cancels it, and the turn with it."""
    making = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((making, watching), return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise ApiError(499, "the client closed the request", code="client_closed_request")
        return making.result()
    finally:
        for task in (making, watching):
            task.cancel()
        await asyncio.gather(making, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def streamed(events: AsyncIterator[Any], *tickets: Ticket) -> EventSourceResponse:
    """A stream of turns' events, whose reader's going away cancels the turns, even before the first event."""

    async def gone(_: Any) -> None:
        for ticket in tickets:
            ticket.cancel()

    return EventSourceResponse(events, client_close_handler_callable=gone)


async def every(makers: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; where one fails, or nobody waits any more, the others end, too."""
    making = [asyncio.ensure_future(maker) for maker in makers]
    try:
        return list(await asyncio.gather(*making))
    finally:
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)


async def together(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Whatever comes next of any stream, with the stream's number."""
    ready: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()

    async def read(i: int, stream: AsyncIterator[T]) -> None:
        try:
            async for piece in stream:
                ready.put_nowait((i, piece))
        finally:
            ready.put_nowait(None)

    reading = [asyncio.ensure_future(read(i, stream)) for i, stream in enumerate(streams)]
    try:
        for _ in reading:
            while (found := await ready.get()) is not None:
                yield found
        for task in reading:
            await task
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
