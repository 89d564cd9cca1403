"""The status page: static files that hold nothing; what they show is asked of the routes, with the reader's key."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from fastapi.responses import Response

ASSETS = {"/": "index.html", "/ui/page.css": "page.css", "/ui/page.js": "page.js", "/ui/icon.svg": "icon.svg"}
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def routes() -> APIRouter:
    router, folder = APIRouter(include_in_schema=False), resources.files(__package__) / "assets"

    def serve(path: str, name: str) -> None:
        body, kind = (folder / name).read_bytes(), KINDS[name.rpartition(".")[2]]

        @router.get(path)
        async def asset() -> Response:
            return Response(body, media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    for path, name in ASSETS.items():
        serve(path, name)
    return router
