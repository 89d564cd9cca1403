"""Errors in the shape that each dialect's clients read."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

OPENAI = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "invalid_request_error", 422: "invalid_request_error", 429: "rate_limit_error", 500: "server_error",
    501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip
ANTHROPIC = {**OPENAI, 413: "request_too_large", 500: "api_error", 501: "api_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An answer that is no result.

    Args:
        status: HTTP's.
        message: what is wrong and what to do.
        param: the field of the request that it is about.
        code: a word for programs.
        retry: whether the same request may be sent again by a client on its own; never once a step may have happened.
        more: what else clients read (n_prompt_tokens, n_ctx).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
        **more: Any,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry, self.more = (
            status, message, param, code, retry, more,
        )  # fmt: skip

    def openai(self) -> dict[str, Any]:
        kind = OPENAI.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code or kind, **self.more}
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        return {"type": "error", "error": {"type": ANTHROPIC.get(self.status, "api_error"), "message": self.message}}

    @property
    def headers(self) -> dict[str, str]:
        asks = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return asks if self.retry else {**asks, "x-should-retry": "false"}


def answer(request: Request, why: ApiError) -> JSONResponse:
    """An error as the clients of this path read it."""
    body = why.anthropic() if request.url.path.startswith("/v1/messages") else why.openai()
    return JSONResponse(body, why.status, headers=why.headers)


def unparsed(why: BaseException) -> str:
    """Why a body is no JSON, where that is not the parser's own error."""
    if isinstance(why, UnicodeDecodeError):
        return f"not UTF-8 at byte {why.start}"
    return "nested too deeply" if isinstance(why, RecursionError) else str(why)
