"""OpenAI's embeddings, over the model's hidden states."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from torch import Tensor

from ..batch import Refused
from ..embed import embed, unit
from .errors import ApiError
from .models import Body, LoraUse
from .readers import answered
from .service import Service

MOST = 2048  # inputs of a request, as OpenAI has it


class EmbeddingsRequest(Body):
    """POST /v1/embeddings; `pooling` and `lora` are riftco's own."""

    input: str | list[str] | list[int] | list[list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    pooling: Literal["mean", "last"] = "mean"
    lora: list[LoraUse] | None = None


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", response_model=None)
    async def embeddings(body: EmbeddingsRequest, request: Request) -> dict[str, Any]:
        return await answered(request, embedded(service, body))

    return router


def inputs_of(service: Service, body: EmbeddingsRequest) -> list[list[int]]:
    """The inputs' tokens; refused where one is empty, too long, or no text of this vocabulary."""
    given: list[Any] = [body.input] if isinstance(body.input, str) or _tokens(body.input) else list(body.input)
    if not 0 < len(given) <= MOST:
        raise ApiError(400, f"input must hold between 1 and {MOST} texts; got {len(given)}", param="input")
    window, vocab = service.engine.window, service.engine.model.config.vocab_size
    made = []
    for i, one in enumerate(given):
        try:
            tokens = service.tokens_of(one)
        except ApiError as why:
            raise ApiError(400, f"input {i}: {why}", param="input") from None
        bad = [t for t in tokens if not 0 <= t < vocab]
        if not one or not tokens or bad:
            why_not = f"token {bad[0]} is outside the vocabulary of {vocab}" if bad else "it is empty"
            raise ApiError(400, f"input {i}: {why_not}", param="input")
        if len(tokens) > window:
            raise ApiError(
                400, f"input {i} has {len(tokens)} tokens; the context holds {window}", param="input",
                code="context_length_exceeded", n_prompt_tokens=len(tokens), n_ctx=window,
            )  # fmt: skip
        made.append(tokens)
    return made


def _tokens(given: Any) -> bool:
    return bool(given) and isinstance(given[0], int)


async def embedded(service: Service, body: EmbeddingsRequest) -> dict[str, Any]:
    size = service.engine.model.config.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise ApiError(400, f"dimensions must be at most {size}; got {body.dimensions}", param="dimensions")
    if len(service.scheduler.tasks) >= service.limits.queue:
        raise ApiError(503, f"{service.limits.queue} requests wait already; try again later", retry=True)
    inputs, found = await service.away(inputs_of, service, body), dict[int, Tensor]()
    service.requests += 1
    try:
        bank = service.engine.bank
        key = bank.set_of(service.adapters_of(service.lora_of(body.lora, body.model)))
        bank.ready(key)
        work = embed(service.engine, inputs, body.pooling, key)
        while (made := await asyncio.wrap_future(service.scheduler.between(lambda: next(work, None)))) is not None:
            found |= made
    except Refused as why:
        raise ApiError(400, str(why)) from None
    vectors = [unit(found[i][: body.dimensions]).cpu() for i in range(len(inputs))]
    count = sum(map(len, inputs))
    return {
        "object": "list", "model": body.model or service.name,
        "data": [{"object": "embedding", "index": i, "embedding": coded(v, body)} for i, v in enumerate(vectors)],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }  # fmt: skip


def coded(vector: Tensor, body: EmbeddingsRequest) -> list[float] | str:
    """Numbers, or the bytes of float32 numbers, least significant first."""
    if body.encoding_format == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
