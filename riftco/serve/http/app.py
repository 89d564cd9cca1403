"""The application: routes, keys, and errors in each dialect's shape."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException

from ... import __version__
from . import learning, messages, metrics, native, openai, responses
from .auth import Keys
from .errors import ApiError
from .models import Body, ChatRequest, CompletionRequest
from .readers import answered, streamed
from .service import Service

LARGEST = 32 << 20  # bytes of a request


class Tokenize(Body):
    content: str
    add_special: bool = False


class Detokenize(Body):
    tokens: list[int]


class Template(Body):
    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


def create_app(
    service: Service, *, keys: Keys | None = None, train_dir: pathlib.Path | None = None, largest: int = LARGEST
) -> FastAPI:
    """The HTTP application over a service, whose scheduler runs while the application does."""
    allowed = keys or Keys()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        service.scheduler.close()

    app = FastAPI(title="riftco", version=__version__, lifespan=lifespan)

    def fail(request: Request, why: ApiError) -> JSONResponse:
        anthropic = request.url.path.startswith("/v1/messages")
        body = why.anthropic() if anthropic else why.openai()
        return JSONResponse(body, why.status, headers=why.headers)

    @app.middleware("http")
    async def guard(request: Request, call_next) -> Response:
        try:
            request.state.caller = allowed.caller(request, admin=False)
            if int(request.headers.get("content-length") or 0) > largest:
                raise ApiError(413, f"a request has at most {largest} bytes")
        except ApiError as why:
            return fail(request, why)
        return await call_next(request)

    @app.exception_handler(ApiError)
    async def on_error(request: Request, why: ApiError) -> JSONResponse:
        return fail(request, why)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, why: RequestValidationError) -> JSONResponse:
        first = why.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return fail(request, ApiError(400, f"{where or 'body'}: {first['msg']}", param=where or None))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, why: HTTPException) -> JSONResponse:
        return fail(request, ApiError(why.status_code, f"{why.detail}: {request.method} {request.url.path}"))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/props")
    async def props() -> dict[str, Any]:
        engine = service.engine
        return {
            "model": service.name, "version": __version__, "total_slots": len(engine.slots), "n_ctx": engine.window,
            "cache_dtype": engine.cache.dtype, "learns": service.learns, "adapters": service.adapter_cards(),
        }  # fmt: skip

    @app.get("/slots")
    async def slots() -> list[dict[str, Any]]:
        return [
            {"id": s.id, "state": s.state.value, "n_tokens": len(s.tokens),
             "lora": [{"id": u.id, "version": u.version, "scale": u.scale} for u in s.key]}
            for s in service.engine.slots
        ]  # fmt: skip

    @app.post("/tokenize")
    async def tokenize(body: Tokenize) -> dict[str, Any]:
        return {"tokens": service.tokenizer.encode(body.content, add_special_tokens=body.add_special)}

    @app.post("/detokenize")
    async def detokenize(body: Detokenize) -> dict[str, Any]:
        vocab = service.engine.model.config.vocab_size
        bad = [t for t in body.tokens if not 0 <= t < vocab]
        if bad:
            raise ApiError(400, f"token {bad[0]} is outside the vocabulary of {vocab}", param="tokens")
        return {"content": service.tokenizer.decode(body.tokens)}

    @app.post("/apply-template")
    async def apply_template(body: Template) -> dict[str, Any]:
        prompt = service.prompt_of(body.messages, body.chat_template_kwargs)
        return {"prompt": service.tokenizer.decode(prompt), "tokens": prompt}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": service.name, "object": "model", "created": service.created, "owned_by": "riftco"}
        return {"object": "list", "data": [{**card, "adapters": service.adapter_cards()}]}

    def admin(request: Request) -> str:
        return allowed.caller(request, admin=True)

    def caller_of(request: Request, body: Any) -> str:
        return admin(request) if body.learn is not None else request.state.caller

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        ticket = openai.chat_ticket(service, body, caller_of(request, body))
        if body.stream:
            return streamed(openai.chat_stream(service, body, ticket), ticket)
        return await answered(request, openai.chat_answer(service, body, ticket))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        ticket = openai.completion_ticket(service, body, caller_of(request, body))
        if body.stream:
            return streamed(openai.completion_stream(service, body, ticket), ticket)
        return await answered(request, openai.completion_answer(service, body, ticket))

    @app.post("/completion", response_model=None)
    async def completion(body: native.NativeRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        ticket = native.native_ticket(service, body, caller_of(request, body))
        if body.stream:
            return streamed(native.native_stream(service, body, ticket), ticket)
        return await answered(request, native.native_answer(service, body, ticket))

    @app.get("/metrics")
    async def totals() -> Response:
        return Response(metrics.exposition(service), media_type="text/plain; version=0.0.4")

    @app.post("/v1/messages", response_model=None)
    async def anthropic(body: messages.MessagesRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        ticket = messages.messages_ticket(service, body, caller_of(request, body))
        if body.stream:
            return streamed(messages.messages_stream(service, body, ticket), ticket)
        return await answered(request, messages.messages_answer(service, body, ticket))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: messages.CountRequest) -> dict[str, int]:
        prompt = service.prompt_of(messages.conversation(body), body.chat_template_kwargs)
        return {"input_tokens": len(prompt)}

    @app.post("/v1/responses", response_model=None)
    async def respond(body: responses.ResponsesRequest, request: Request) -> EventSourceResponse | dict[str, Any]:
        ticket = responses.responses_ticket(service, body, caller_of(request, body))
        if body.stream:
            return streamed(responses.responses_stream(service, body, ticket), ticket)
        return await answered(request, responses.responses_answer(service, body, ticket))

    app.include_router(learning.routes(service, admin, train_dir))
    return app
