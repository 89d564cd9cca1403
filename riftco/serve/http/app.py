"""The application: routes, keys, and errors in each dialect's shape."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator, Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ... import __version__
from ..jobs import Jobs
from ..saved_slots import SlotFiles
from . import embeddings, learning, messages, metrics, native, openai, page, responses, state, text, training
from .auth import Keys
from .errors import ApiError, answer, unparsed
from .guard import Guard
from .models import ChatRequest, CompletionRequest
from .readers import answered, streamed
from .service import Service

LARGEST = 32 << 20  # bytes of a request


def create_app(
    service: Service,
    *,
    keys: Keys | None = None,
    train_dir: pathlib.Path | None = None,
    slot_files: SlotFiles | None = None,
    largest: int = LARGEST,
    hosts: Collection[str] | None = None,
    origins: Collection[str] = (),
) -> FastAPI:
    """The HTTP application over a service, whose scheduler runs while the application does.

    Args:
        train_dir: its folder `incoming` has the adapters and files that requests may name.
        slot_files: where slots are saved; None: they are not.
        largest, hosts, origins: of the Guard; pages of `origins` may also read the answers (CORS).
    """
    allowed = keys or Keys()
    jobs = Jobs(service.scheduler)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        jobs.close()
        service.scheduler.close()

    app = FastAPI(title="riftco", version=__version__, lifespan=lifespan)
    app.add_middleware(Guard, keys=allowed, largest=largest, hosts=hosts, origins=origins)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
            expose_headers=["x-should-retry"],
        )  # fmt: skip

    @app.exception_handler(ApiError)
    async def on_error(request: Request, why: ApiError) -> JSONResponse:
        return answer(request, why)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, why: RequestValidationError) -> JSONResponse:
        first = why.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        what = first["msg"].removeprefix("Value error, ")  # pydantic's words before ours
        if first["type"] == "json_invalid":  # its place is a position in the text, and no field
            where, what = "", f"not JSON at character {first['loc'][-1]}: {first['ctx']['error']}"
        elif not where and "json" not in request.headers.get("content-type", ""):
            what = "send JSON, with the header content-type: application/json"
        return answer(request, ApiError(400, f"{where or 'body'}: {what}", param=where or None))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, why: HTTPException) -> JSONResponse:
        if isinstance(why.__cause__, (ValueError, RecursionError)):  # of the body's parser, beside its own error
            return answer(request, ApiError(400, f"body: {unparsed(why.__cause__)}"))
        return answer(request, ApiError(why.status_code, f"{why.detail}: {request.method} {request.url.path}"))

    @app.exception_handler(RecursionError)
    async def on_depth(request: Request, why: RecursionError) -> JSONResponse:
        """Of what is read before anything runs: messages and schemas have no depth of their own."""
        return answer(request, ApiError(400, "the request is nested too deeply"))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, why: Exception) -> JSONResponse:
        """The log has the traceback; a step may have been made."""
        return answer(request, ApiError(500, f"the server failed: {type(why).__name__}"))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    def model_cards() -> list[dict[str, Any]]:
        """The base, and each adapter as what a request's `model` may name."""
        card, adapters = {"object": "model", "created": service.created, "owned_by": "riftco"}, service.adapter_cards()
        return [
            {"id": service.name, **card, "adapters": adapters},
            *({"id": adapter["id"], **card, "parent": service.name} for adapter in adapters),
        ]

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": model_cards()}

    @app.get("/v1/models/{id:path}")
    async def model(id: str) -> dict[str, Any]:
        for card in model_cards():
            if card["id"] == id:
                return card
        raise ApiError(404, f"no model {id!r}; GET /v1/models lists those that are here", code="model_not_found")

    def admin(request: Request) -> str:
        return allowed.caller(request, admin=True)

    def caller_of(request: Request, body: Any) -> str:
        return admin(request) if body.learn is not None else request.state.caller

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        tickets = await openai.chat_tickets(service, body, caller_of(request, body))
        if body.stream:
            return streamed(openai.chat_stream(service, body, tickets), *tickets)
        return await answered(request, openai.chat_answer(service, body, tickets))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        tickets = await openai.completion_tickets(service, body, caller_of(request, body))
        if body.stream:
            return streamed(openai.completion_stream(service, body, tickets), *tickets)
        return await answered(request, openai.completion_answer(service, body, tickets))

    @app.post("/completion", response_model=None)
    async def completion(body: native.NativeRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        ticket = await native.native_ticket(service, body, caller_of(request, body))
        if body.stream:
            return streamed(native.native_stream(service, body, ticket), ticket)
        return await answered(request, native.native_answer(service, body, ticket))

    @app.get("/metrics")
    async def totals() -> Response:
        return Response(metrics.exposition(service), media_type="text/plain; version=0.0.4")

    @app.post("/v1/messages", response_model=None)
    async def anthropic(body: messages.MessagesRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        ticket = await messages.messages_ticket(service, body, caller_of(request, body))
        if body.stream:
            return streamed(messages.messages_stream(service, body, ticket), ticket)
        return await answered(request, messages.messages_answer(service, body, ticket))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: messages.CountRequest) -> dict[str, int]:
        asked = messages.messages_asked(body)
        prompt = await service.away(service.prompt_of, *messages.prompt_asked(body, asked))
        return {"input_tokens": len(prompt)}

    @app.post("/v1/responses", response_model=None)
    async def respond(body: responses.ResponsesRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        ticket = await responses.responses_ticket(service, body, caller_of(request, body))
        if body.stream:
            return streamed(responses.responses_stream(service, body, ticket), ticket)
        return await answered(request, responses.responses_answer(service, body, ticket))

    app.include_router(page.routes())
    app.include_router(text.routes(service))
    app.include_router(embeddings.routes(service))
    app.include_router(state.routes(service, admin, slot_files))
    app.include_router(learning.routes(service, admin, train_dir))
    app.include_router(training.routes(service, jobs, admin, train_dir))
    return app
