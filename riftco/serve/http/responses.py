"""OpenAI's responses, plain and streaming."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic import Field

from ..calls import Call
from ..requests import Ticket
from .asked import Asked, of_openai, of_schema
from .errors import ApiError
from .generation import Called, End, Piece, Thought, generation
from .models import Calls
from .openai import timings
from .service import Service, outcome_json


class ResponsesRequest(Calls):
    """POST /v1/responses; nothing is stored: a conversation is sent whole."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    previous_response_id: None = None
    text: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    thought = ""  # before the message or the calls that it led to
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    for i, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not made or made[-1]["role"] != "assistant" or thought:  # the calls of one turn are one message's
                made.append({"role": "assistant", "content": "", **thought_of(thought)})
                thought = ""
            made[-1].setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "type": "function", "function": call}
            )
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"input.{i}.output")
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            if role not in ("system", "user", "assistant"):
                raise ApiError(
                    400, f"input.{i}.role must be system, developer, user or assistant; got {role!r}", param="input"
                )
            content = _text(item.get("content"), f"input.{i}.content")
            made.append({"role": role, "content": content, **(thought_of(thought) if role == "assistant" else {})})
            thought = ""
        elif kind == "reasoning":
            thought += _text(item.get("content") or [], f"input.{i}.content")
        else:
            raise ApiError(
                400, f"input.{i}: items of type {kind!r} are not supported; accepted: message, reasoning, "
                "function_call, function_call_output", param="input",
            )  # fmt: skip
    return made


def thought_of(text: str) -> dict[str, str]:
    return {"reasoning_content": text} if text else {}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    text = ""
    for part in content if isinstance(content, list) else [None]:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in ("input_text", "output_text", "reasoning_text", "text"):
            raise ApiError(400, f"{where} holds a part of type {kind!r}, not text", param="input")
        if not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where} holds a part without its text", param="input")
        text += part["text"]
    return text


def responses_asked(body: ResponsesRequest) -> Asked:
    lark = of_schema((body.text or {}).get("format"), "text.format")
    return of_openai(body.tools, body.tool_choice, body.parallel_tool_calls, lark, nested=False)


async def responses_ticket(service: Service, body: ResponsesRequest, caller: str) -> Ticket:
    asked = responses_asked(body)
    asked.check_learn(body.learn)
    grammar = await asked.grammar(service)
    prompt = await service.away(service.prompt_of, conversation(body), asked.options(body.chat_template_kwargs))
    return service.submit(
        prompt, body.sampling(), body.max_output_tokens, lora=service.lora_of(body.lora, body.model), slot=body.id_slot,
        learn=body.learn,
        caller=caller, grammar=grammar, refuse=asked.refuse(service),
    )  # fmt: skip


Event = tuple[str, dict[str, Any]]


class Frame:
    """One response as it grows: its items, of which the last may be a message that is still written."""

    def __init__(self, service: Service, body: ResponsesRequest):
        parallel = bool(body.tools) and body.parallel_tool_calls is not False
        tools = [{"strict": None, "parameters": None, **tool} for tool in body.tools or ()]
        self.head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "model": body.model or service.name, "parallel_tool_calls": parallel,
            "tool_choice": body.tool_choice or ("auto" if tools else "none"), "tools": tools,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "instructions": body.instructions, "error": None, "incomplete_details": None, "metadata": {},
            "temperature": body.temperature, "top_p": body.top_p, "max_output_tokens": body.max_output_tokens,
        }  # fmt: skip
        self.output: list[dict[str, Any]] = []
        self.writing: str | None = None  # the text so far of what is being written
        self.thinks = False  # whether that is a thought

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        return {**self.head, "status": status, "output": list(self.output), **more}

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}

    def begin(self) -> Iterator[Event]:
        """A message begins, unless one is being written."""
        if self.thinks:
            yield from self.end()
        if self.writing is not None:
            return
        self.writing, id = "", f"msg_{uuid.uuid4().hex}"
        item = {"id": id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        self.output.append(item)
        yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": item}
        yield "response.content_part.added", {**self.place, "content_index": 0, "part": part("")}

    def write(self, text: str) -> Iterator[Event]:
        yield from self.begin()
        assert self.writing is not None
        self.writing += text
        yield "response.output_text.delta", {**self.place, "content_index": 0, "delta": text, "logprobs": []}

    def think(self, text: str) -> Iterator[Event]:
        if not self.thinks:
            yield from self.end()
            self.writing, self.thinks, id = "", True, f"rs_{uuid.uuid4().hex}"
            item = {"id": id, "type": "reasoning", "summary": [], "status": "in_progress", "content": []}
            self.output.append(item)
            yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": item}
        self.writing = (self.writing or "") + text
        yield "response.reasoning_text.delta", {**self.place, "content_index": 0, "delta": text}

    def end(self, status: str = "completed") -> Iterator[Event]:
        """The message, or the thought, that is being written ends."""
        if self.writing is None:
            return
        text, self.writing = self.writing, None
        place = {**self.place, "content_index": 0}
        if self.thinks:
            self.thinks = False
            yield "response.reasoning_text.done", {**place, "text": text}
            content = [{"type": "reasoning_text", "text": text}]
            self.output[-1] = {**self.output[-1], "status": status, "content": content}
            yield "response.output_item.done", {"output_index": len(self.output) - 1, "item": self.output[-1]}
            return
        yield "response.output_text.done", {**place, "text": text, "logprobs": []}
        yield "response.content_part.done", {**place, "part": part(text)}
        self.output[-1] = {**self.output[-1], "status": status, "content": [part(text)]}
        yield "response.output_item.done", {"output_index": len(self.output) - 1, "item": self.output[-1]}

    def call(self, call: Call) -> Iterator[Event]:
        yield from self.end()
        item = {
            "id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": f"call_{uuid.uuid4().hex}",
            "name": call.name, "arguments": "", "status": "in_progress",
        }  # fmt: skip
        self.output.append(item)
        yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": item}
        yield "response.function_call_arguments.delta", {**self.place, "delta": call.arguments}
        done = {**self.place, "name": call.name, "arguments": call.arguments}
        yield "response.function_call_arguments.done", done
        self.output[-1] = {**item, "arguments": call.arguments, "status": "completed"}
        yield "response.output_item.done", {"output_index": len(self.output) - 1, "item": self.output[-1]}

    def finish(self, end: End) -> Iterator[Event]:
        status = "incomplete" if end.why == "length" else "completed"
        yield from self.end(status)
        more: dict[str, Any] = {"usage": usage(end), "timings": timings(end)}
        if end.why == "length":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        learned = {} if end.learn is None else {"learn": outcome_json(end.learn)}
        yield f"response.{status}", {"response": self.response(status, **more, **learned), **learned}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage(end: End) -> dict[str, Any]:
    return {
        "input_tokens": end.prompt, "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": 0},
        "output_tokens": end.tokens, "output_tokens_details": {"reasoning_tokens": end.thought_tokens},
        "total_tokens": end.prompt + end.tokens,
    }  # fmt: skip


async def grown(service: Service, body: ResponsesRequest, ticket: Ticket, frame: Frame) -> AsyncIterator[Event]:
    """The events of a response from its beginning to its end."""
    reader, thoughts = responses_asked(body).reader(service), service.thoughts(ticket, body.reasoning_format)
    waits = reader is not None or thoughts is not None  # where calls or thoughts may come, a message waits for text
    yield "response.created", {"response": frame.response("in_progress")}
    yield "response.in_progress", {"response": frame.response("in_progress")}
    for event in () if waits else frame.begin():
        yield event
    async for piece in generation(ticket, service.tokenizer, [], reader, thoughts):
        if isinstance(piece, Piece):
            made = frame.write(piece.text)
        elif isinstance(piece, Thought):
            made = frame.think(piece.text)
        else:
            made = frame.call(piece.call) if isinstance(piece, Called) else frame.finish(piece)
        for event in made:
            yield event


async def responses_answer(service: Service, body: ResponsesRequest, ticket: Ticket) -> dict[str, Any]:
    async for _, fields in grown(service, body, ticket, Frame(service, body)):
        last = fields
    return last["response"]


async def responses_stream(service: Service, body: ResponsesRequest, ticket: Ticket) -> AsyncIterator[dict[str, str]]:
    frame, count = Frame(service, body), 0

    def event(kind: str, fields: dict[str, Any]) -> dict[str, str]:
        nonlocal count
        data = {"type": kind, "sequence_number": count, **fields}
        count += 1
        return {"event": kind, "data": json.dumps(data)}

    try:
        async for kind, fields in grown(service, body, ticket, frame):
            yield event(kind, fields)
    except ApiError as why:
        error = why.openai()["error"]
        yield event("error", {"code": error["code"], "message": error["message"], "param": error["param"]})
        failed = {"code": "invalid_prompt" if why.status == 400 else "server_error", "message": why.message}
        yield event("response.failed", {"response": frame.response("failed", error=failed)})
