"""Who reads an answer may go away: then there is nothing left to make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from sse_starlette import EventSourceResponse
from starlette.requests import Request

from ..requests import Ticket
from .errors import ApiError


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


def streamed(events: AsyncIterator[Any], ticket: Ticket) -> EventSourceResponse:
    """A stream of a turn's events, whose reader's going away cancels the turn, even before the first event."""

    async def gone(_: Any) -> None:
        ticket.cancel()

    return EventSourceResponse(events, client_close_handler_callable=gone)
