"""Text to tokens and back, and conversations to prompts: llama.cpp's three small routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import Field

from ...models import ModelError
from .asked import of_openai
from .errors import ApiError
from .models import Body
from .service import Service


class Tokenize(Body):
    content: str
    add_special: bool = False
    with_pieces: bool = False


class Detokenize(Body):
    tokens: list[int]


class Template(Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


def routes(service: Service) -> APIRouter:
    router, tokenizer = APIRouter(), service.tokenizer

    @router.post("/tokenize")
    async def tokenize(body: Tokenize) -> dict[str, Any]:
        try:
            ids = await service.away(encoded, body)
        except ModelError as why:
            raise ApiError(400, str(why), param="content") from None
        if not body.with_pieces:
            return {"tokens": ids}
        return {"tokens": await service.away(lambda: [{"id": id, "piece": piece(id)} for id in ids])}

    def encoded(body: Tokenize) -> list[int]:
        return tokenizer.encode(body.content, add_special_tokens=body.add_special)

    def piece(id: int) -> str | list[int]:
        """The token's text; its bytes where they are no whole characters."""
        text = tokenizer.decode([id])
        return text if "\ufffd" not in text else list(tokenizer.bytes_of(id))

    @router.post("/detokenize")
    async def detokenize(body: Detokenize) -> dict[str, Any]:
        vocab = service.engine.model.config.vocab_size
        bad = [t for t in body.tokens if not 0 <= t < vocab]
        if bad:
            raise ApiError(400, f"token {bad[0]} is outside the vocabulary of {vocab}", param="tokens")
        return {"content": await service.away(tokenizer.decode, body.tokens)}

    @router.post("/apply-template")
    async def apply_template(body: Template) -> dict[str, Any]:
        asked = of_openai(body.tools, None, None, "", nested=True)
        prompt = await service.away(service.prompt_of, body.messages, asked.options(body.chat_template_kwargs))
        return {"prompt": await service.away(tokenizer.decode, prompt), "tokens": prompt}

    return router
