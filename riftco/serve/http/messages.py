"""Anthropic's messages, plain and streaming."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic import Field

from ..requests import Ticket
from .errors import ApiError
from .generation import End, Piece, generation
from .models import Body, Sampled
from .openai import timings, whole
from .service import Service, outcome_json


class MessagesRequest(Sampled):
    """POST /v1/messages"""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class CountRequest(Body):
    """POST /v1/messages/count_tokens"""

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


def conversation(body: MessagesRequest | CountRequest) -> list[dict[str, Any]]:
    """OpenAI-style messages of a request: its system text first, its blocks joined."""
    made = [] if body.system is None else [{"role": "system", "content": text_of(body.system, "system")}]
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise ApiError(400, f"messages.{i}.role must be user or assistant; got {role!r}", param="messages")
        made.append({"role": role, "content": text_of(message.get("content"), f"messages.{i}.content")})
    return made


def text_of(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where} must be text or a list of blocks", param=where)
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text" or not isinstance(block.get("text"), str):
            raise ApiError(400, f"{where} holds a block of type {kind!r}; this model reads text", param=where)
    return "".join(block["text"] for block in content)


def messages_ticket(service: Service, body: MessagesRequest, caller: str) -> Ticket:
    prompt = service.prompt_of(conversation(body), body.chat_template_kwargs)
    return service.submit(
        prompt, body.sampling(), body.max_tokens, lora=body.lora, slot=body.id_slot, learn=body.learn, caller=caller
    )


def stop_reason(end: End) -> str:
    if end.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if end.why == "length" else "end_turn"


def usage(end: End) -> dict[str, int]:
    return {
        "input_tokens": end.prompt - end.cached, "cache_read_input_tokens": end.cached,
        "cache_creation_input_tokens": 0, "output_tokens": end.tokens,
    }  # fmt: skip


def more(end: End) -> dict[str, Any]:
    return {"timings": timings(end), **({} if end.learn is None else {"learn": outcome_json(end.learn)})}


async def messages_answer(service: Service, body: MessagesRequest, ticket: Ticket) -> dict[str, Any]:
    end, _ = await whole(service, ticket, body.stop_sequences)
    return {
        "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body.model or service.name,
        "content": [{"type": "text", "text": end.text}], "stop_reason": stop_reason(end),
        "stop_sequence": end.stop_string, "usage": usage(end), **more(end),
    }  # fmt: skip


async def messages_stream(service: Service, body: MessagesRequest, ticket: Ticket) -> AsyncIterator[dict[str, str]]:
    def event(kind: str, **fields: Any) -> dict[str, str]:
        return {"event": kind, "data": json.dumps({"type": kind, **fields})}

    started = False

    def start(prompt: int, cached: int) -> Iterator[dict[str, str]]:
        counts = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": 0}
        message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": [],
            "model": body.model or service.name, "stop_reason": None, "stop_sequence": None, "usage": counts,
        }  # fmt: skip
        yield event("message_start", message=message)
        yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    try:
        async for piece in generation(ticket, service.tokenizer, body.stop_sequences):
            if not started:
                started = True
                cached = piece.cached if isinstance(piece, End) else ticket.cached
                for made in start(len(ticket.request.prompt), cached):
                    yield made
            if isinstance(piece, Piece):
                yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
            else:
                yield event("content_block_stop", index=0)
                delta = {"stop_reason": stop_reason(piece), "stop_sequence": piece.stop_string}
                yield event("message_delta", delta=delta, usage=usage(piece), **more(piece))
                yield event("message_stop")
    except ApiError as why:
        if started:
            yield event("content_block_stop", index=0)
        yield {"event": "error", "data": json.dumps(why.anthropic())}
