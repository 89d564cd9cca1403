"""Who may do what: nobody but callers with a key, and what changes the model only with the admin's."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from starlette.requests import Request

from .errors import ApiError
from .page import ASSETS

OPEN = ("/health", *ASSETS)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Keys:
    """Keys that callers have; None: no key is asked.

    api: for all but /health and the page's static files; admin: for what learns, undoes, promotes, loads or writes.
    """

    api: str | None = None
    admin: str | None = None

    def caller(self, request: Request, admin: bool) -> str:
        """The caller's name for the log (a hash of the key), or an error.

        Without an admin key, what needs one is for callers with the API key; without any key, for everybody.
        """
        if request.url.path in OPEN:
            return ""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        given = given or request.headers.get("x-api-key", "").strip()
        known = [key for key in (self.api, self.admin) if key]
        if not known:
            return "open"
        if not any(hmac.compare_digest(given.encode(), key.encode()) for key in known):
            raise ApiError(401, "a key is needed: Authorization: Bearer KEY, or X-Api-Key", code="invalid_api_key")
        if admin and self.admin and not hmac.compare_digest(given.encode(), self.admin.encode()):
            raise ApiError(403, "this needs the admin's key", code="admin_key_needed")
        return hashlib.sha256(given.encode()).hexdigest()[:12]


def check_bind(host: str, keys: Keys, insecure: bool) -> None:
    """Refuse to listen to other machines without keys."""
    if host not in LOOPBACK and not (keys.api or keys.admin) and not insecure:
        raise ValueError(
            f"--host {host} lets other machines in, and there is no key: give --api-key and --admin-key (or --insecure)"
        )
