"""OpenAI's responses, plain and streaming."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from ..requests import Ticket
from .errors import ApiError
from .generation import End, Piece, generation
from .models import Sampled
from .openai import timings, whole
from .service import Service, outcome_json


class ResponsesRequest(Sampled):
    """POST /v1/responses; nothing is stored: a conversation is sent whole."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    previous_response_id: None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    made = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        if item.get("type", "message") != "message":
            raise ApiError(
                400, f"input.{i}: items of type {item['type']!r} are not supported; send messages", param="input"
            )
        role = "system" if item.get("role") == "developer" else item.get("role")
        if role not in ("system", "user", "assistant"):
            raise ApiError(
                400, f"input.{i}.role must be system, developer, user or assistant; got {role!r}", param="input"
            )
        made.append({"role": role, "content": _text(item.get("content"), i)})
    return made


def _text(content: Any, i: int) -> str:
    if isinstance(content, str):
        return content
    text = ""
    for part in content if isinstance(content, list) else [None]:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in ("input_text", "output_text", "text"):
            raise ApiError(400, f"input.{i}.content holds a part of type {kind!r}, not text", param="input")
        text += str(part["text"])
    return text


def responses_ticket(service: Service, body: ResponsesRequest, caller: str) -> Ticket:
    prompt = service.prompt_of(conversation(body), body.chat_template_kwargs)
    return service.submit(
        prompt, body.sampling(), body.max_output_tokens, lora=body.lora, slot=body.id_slot, learn=body.learn,
        caller=caller,
    )  # fmt: skip


class Frame:
    """One response as it grows."""

    def __init__(self, service: Service, body: ResponsesRequest):
        self.item = f"msg_{uuid.uuid4().hex}"
        self.head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "model": body.model or service.name, "parallel_tool_calls": False, "tool_choice": "none", "tools": [],
            "instructions": body.instructions, "error": None, "incomplete_details": None, "metadata": {},
            "temperature": body.temperature, "top_p": body.top_p, "max_output_tokens": body.max_output_tokens,
        }  # fmt: skip

    def response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.head, "status": status, "output": output, **more}

    def message(self, text: str | None, status: str) -> dict[str, Any]:
        content = [] if text is None else [self.part(text)]
        return {"id": self.item, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def finished(self, end: End) -> dict[str, Any]:
        cut = end.why == "length"
        more: dict[str, Any] = {"usage": usage(end), "timings": timings(end)}
        if cut:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        if end.learn is not None:
            more["learn"] = outcome_json(end.learn)
        status = "incomplete" if cut else "completed"
        return self.response(status, [self.message(end.text, status)], **more)


def usage(end: End) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt, "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": 0},
        "output_tokens": end.tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": end.prompt + end.tokens,
    }  # fmt: skip


async def responses_answer(service: Service, body: ResponsesRequest, ticket: Ticket) -> dict[str, Any]:
    end, _ = await whole(service, ticket, [])
    return Frame(service, body).finished(end)


async def responses_stream(service: Service, body: ResponsesRequest, ticket: Ticket) -> AsyncIterator[dict[str, str]]:
    frame, count = Frame(service, body), 0

    def event(kind: str, **fields: Any) -> dict[str, str]:
        nonlocal count
        data = {"type": kind, "sequence_number": count, **fields}
        count += 1
        return {"event": kind, "data": json.dumps(data)}

    place = {"item_id": frame.item, "output_index": 0, "content_index": 0}
    yield event("response.created", response=frame.response("in_progress", []))
    yield event("response.in_progress", response=frame.response("in_progress", []))
    yield event("response.output_item.added", output_index=0, item=frame.message(None, "in_progress"))
    yield event("response.content_part.added", **place, part=frame.part(""))
    try:
        async for piece in generation(ticket, service.tokenizer, []):
            if isinstance(piece, Piece):
                yield event("response.output_text.delta", **place, delta=piece.text, logprobs=[])
                continue
            yield event("response.output_text.done", **place, text=piece.text, logprobs=[])
            yield event("response.content_part.done", **place, part=frame.part(piece.text))
            done = frame.finished(piece)
            yield event("response.output_item.done", output_index=0, item=done["output"][0])
            learned = {"learn": done["learn"]} if "learn" in done else {}
            yield event(f"response.{done['status']}", response=done, **learned)
    except ApiError as why:
        error = why.openai()["error"]
        yield event("error", code=error["code"], message=error["message"], param=error["param"])
        failed = {"code": "server_error", "message": why.message}
        yield event("response.failed", response={**frame.response("failed", []), "error": failed})
