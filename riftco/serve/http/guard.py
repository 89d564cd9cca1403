"""What every request passes before a route sees it: who asks, from where, and how much."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import Keys
from .errors import ApiError, answer

SAFE = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Refuses callers without a key, pages of other sites, and bodies that are too large, by their length or as they
    come.

    Args:
        largest: bytes of a body.
        hosts: names that this server answers to; None: any. Without keys it keeps a page that resolves its own name to
            this machine from reaching a server that trusts whoever is here.
        origins: sites whose pages may change something, beside the server's own; "*": all.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Keys, largest: int, hosts: Collection[str] | None, origins: Collection[str]
    ):
        self.app, self.keys, self.largest, self.hosts, self.origins = app, keys, largest, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        try:
            self._check(request)
            request.state.caller = self.keys.caller(request, admin=False)
        except ApiError as why:
            await answer(request, why)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.largest:  # sent in chunks, without its length
                raise HTTPException(413, self._too_large)
            return message

        await self.app(scope, counted, send)

    @property
    def _too_large(self) -> str:
        return f"a request has at most {self.largest} bytes"

    def _check(self, request: Request) -> None:
        length = request.headers.get("content-length", "0")
        if not length.isdecimal():
            raise ApiError(400, f"content-length is no number: {length!r:.40}")
        if int(length) > self.largest:
            raise ApiError(413, self._too_large)
        host = request.headers.get("host", "")
        if self.hosts is not None and _name(host) not in self.hosts:
            raise ApiError(403, f"this server does not go by the name of {host!r:.120}; give it keys", code="host")
        origin = request.headers.get("origin")
        if origin is None or request.method in SAFE or "*" in self.origins or origin in self.origins:
            return
        if origin.partition("://")[2] != host:
            raise ApiError(403, f"pages of {origin!r:.120} may not do this; start with --cors-origin", code="origin")


def _name(host: str) -> str | None:
    """A Host header without its port."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # half of an IPv6 address
        return None
