"""Anthropic's messages, plain and streaming."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic import Field

from ..calls import Call
from ..requests import Ticket
from ..thoughts import Thoughts
from .asked import Asked, function_of, must, of_schema
from .errors import ApiError
from .generation import Called, End, Piece, Thought, generation
from .models import Body, ReasoningFormat, Sampled
from .openai import timings
from .service import Service, outcome_json


class Asks(Body):
    """What counts as a prompt."""

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class MessagesRequest(Asks, Sampled):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] = Field(default_factory=list)
    reasoning_format: ReasoningFormat | None = None
    stream: bool = False


class CountRequest(Asks):
    """POST /v1/messages/count_tokens"""


def conversation(body: Asks) -> list[dict[str, Any]]:
    """OpenAI-style messages of a request: its system text first, its blocks joined."""
    made = [] if body.system is None else [{"role": "system", "content": text_of(body.system, "system")}]
    for i, message in enumerate(body.messages):
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise ApiError(400, f"messages.{i}.role must be user or assistant; got {role!r}", param="messages")
        made += said(message, f"messages.{i}.content") if role == "assistant" else asked_by(message, i)
    return made


def blocks_of(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def kind_of(block: Any) -> str | None:
    return block.get("type") if isinstance(block, dict) else None


def said(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """An assistant's thoughts, text and calls."""
    blocks = blocks_of(message.get("content"))
    calls = [
        {"id": b.get("id"), "type": "function", "function": {"name": b.get("name"), "arguments": b.get("input")}}
        for b in blocks if kind_of(b) == "tool_use"
    ]  # fmt: skip
    thoughts = [b.get("thinking") for b in blocks if kind_of(b) == "thinking"]
    if not all(isinstance(thought, str) for thought in thoughts):
        raise ApiError(400, f"{where} holds a block of thinking without its text", param=where)
    text = text_of([b for b in blocks if kind_of(b) not in ("tool_use", "thinking")], where)
    more = {"reasoning_content": "".join(thoughts), "tool_calls": calls}
    return [{"role": "assistant", "content": text, **{k: v for k, v in more.items() if v}}]


def asked_by(message: dict[str, Any], i: int) -> list[dict[str, Any]]:
    """A user's turn: what tools gave, each a message, then its text."""
    where, blocks = f"messages.{i}.content", blocks_of(message.get("content"))
    made = [
        {"role": "tool", "tool_call_id": b.get("tool_use_id"), "content": text_of(b.get("content") or "", where)}
        for b in blocks if kind_of(b) == "tool_result"
    ]  # fmt: skip
    others = [b for b in blocks if kind_of(b) != "tool_result"]
    return [*made, {"role": "user", "content": text_of(others, where)}] if others or not made else made


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


def messages_asked(body: Asks) -> Asked:
    made = []
    for i, given in enumerate(body.tools or ()):
        if given.get("type") not in (None, "custom"):
            raise ApiError(400, f"tools.{i}: {given['type']!r} is no tool of the caller's own", param="tools")
        made.append(function_of(given, f"tools.{i}"))
    choice = body.tool_choice or {"type": "auto"}
    lark = of_schema((body.output_config or {}).get("format"), "output_config.format")
    asked = Asked(tuple(made), parallel=not choice.get("disable_parallel_tool_use"), lark=lark)
    kind = choice.get("type")
    if kind == "auto":
        return asked
    if kind == "none":
        return Asked(lark=lark)
    if kind == "any":
        return must(asked)
    if kind == "tool":
        return must(asked.only([str(choice.get("name"))]))
    raise ApiError(400, f"tool_choice.type must be auto, any, tool or none; got {kind!r}", param="tool_choice")


def prompt_asked(body: Asks, asked: Asked) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
    """What Service.prompt_of takes; a conversation that ends with the assistant's text is gone on with from there."""
    turns = conversation(body)
    last = turns[-1]
    go_on = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return turns, asked.options(body.chat_template_kwargs), go_on


def thoughts_asked(service: Service, body: MessagesRequest, ticket: Ticket) -> Thoughts | None:
    turns, _, go_on = prompt_asked(body, Asked())
    return service.thoughts(ticket, body.reasoning_format, turns[-1]["content"] if go_on else "")


async def messages_ticket(service: Service, body: MessagesRequest, caller: str) -> Ticket:
    asked = messages_asked(body)
    asked.check_learn(body.learn)
    grammar = await asked.grammar(service)
    prompt = await service.away(service.prompt_of, *prompt_asked(body, asked))
    return service.submit(
        prompt, body.sampling(), body.max_tokens, lora=service.lora_of(body.lora, body.model), slot=body.id_slot,
        learn=body.learn, caller=caller,
        grammar=grammar, refuse=asked.refuse(service),
    )  # fmt: skip


def stop_reason(end: End) -> str:
    if end.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if end.why == "length" else "tool_use" if end.calls else "end_turn"


def usage(end: End) -> dict[str, int]:
    return {
        "input_tokens": end.prompt - end.cached, "cache_read_input_tokens": end.cached,
        "cache_creation_input_tokens": 0, "output_tokens": end.tokens,
    }  # fmt: skip


def more(end: End) -> dict[str, Any]:
    return {"timings": timings(end), **({} if end.learn is None else {"learn": outcome_json(end.learn)})}


def tool_use(call: Call) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name, "input": {}}


async def messages_answer(service: Service, body: MessagesRequest, ticket: Ticket) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    reader, thoughts = messages_asked(body).reader(service), thoughts_asked(service, body, ticket)
    async for piece in generation(ticket, service.tokenizer, body.stop_sequences, reader, thoughts):
        if isinstance(piece, End):
            end = piece
        elif isinstance(piece, Thought):
            if not content:
                content.append({"type": "thinking", "thinking": "", "signature": ""})
            content[-1]["thinking"] += piece.text
        elif isinstance(piece, Called):
            content.append({**tool_use(piece.call), "input": json.loads(piece.call.arguments)})
        elif content and content[-1]["type"] == "text":
            content[-1]["text"] += piece.text
        else:
            content.append({"type": "text", "text": piece.text})
    return {
        "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body.model or service.name,
        "content": content if content or reader is not None else [{"type": "text", "text": ""}],
        "stop_reason": stop_reason(end), "stop_sequence": end.stop_string, "usage": usage(end), **more(end),
    }  # fmt: skip


class Blocks:
    """The content of a streamed message: one block after another."""

    def __init__(self) -> None:
        self.index, self.open = -1, ""  # of the last block; its kind while it is written: text, or thinking

    def begin(self, block: dict[str, Any]) -> Iterator[dict[str, str]]:
        yield from self.end()
        self.index, self.open = self.index + 1, "" if block["type"] == "tool_use" else block["type"]
        yield event("content_block_start", index=self.index, content_block=block)

    def write(self, text: str) -> Iterator[dict[str, str]]:
        if self.open != "text":
            yield from self.begin({"type": "text", "text": ""})
        if text:
            yield event("content_block_delta", index=self.index, delta={"type": "text_delta", "text": text})

    def think(self, text: str) -> Iterator[dict[str, str]]:
        if self.open != "thinking":
            yield from self.begin({"type": "thinking", "thinking": "", "signature": ""})
        yield event("content_block_delta", index=self.index, delta={"type": "thinking_delta", "thinking": text})

    def call(self, call: Call) -> Iterator[dict[str, str]]:
        yield from self.begin(tool_use(call))
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        yield event("content_block_delta", index=self.index, delta=delta)
        yield event("content_block_stop", index=self.index)

    def end(self) -> Iterator[dict[str, str]]:
        """The block that is still written ends."""
        if self.open == "thinking":
            yield event("content_block_delta", index=self.index, delta={"type": "signature_delta", "signature": ""})
        if self.open:
            self.open = ""
            yield event("content_block_stop", index=self.index)


def event(kind: str, **fields: Any) -> dict[str, str]:
    return {"event": kind, "data": json.dumps({"type": kind, **fields})}


async def messages_stream(service: Service, body: MessagesRequest, ticket: Ticket) -> AsyncIterator[dict[str, str]]:
    blocks, reader, started = Blocks(), messages_asked(body).reader(service), False
    thoughts = thoughts_asked(service, body, ticket)
    waits = reader is not None or thoughts is not None  # where calls or thoughts may come, a block waits for its text

    def start(prompt: int, cached: int) -> dict[str, str]:
        counts = {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": 0}
        return event("message_start", message={
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "content": [],
            "model": body.model or service.name, "stop_reason": None, "stop_sequence": None, "usage": counts,
        })  # fmt: skip

    def made(piece: Piece | Thought | Called | End) -> Iterator[dict[str, str]]:
        if isinstance(piece, Piece):
            yield from blocks.write(piece.text)
        elif isinstance(piece, Thought):
            yield from blocks.think(piece.text)
        elif isinstance(piece, Called):
            yield from blocks.call(piece.call)
        else:
            yield from blocks.end()
            delta = {"stop_reason": stop_reason(piece), "stop_sequence": piece.stop_string}
            yield event("message_delta", delta=delta, usage=usage(piece), **more(piece))
            yield event("message_stop")

    try:
        async for piece in generation(ticket, service.tokenizer, body.stop_sequences, reader, thoughts):
            if not started:
                started = True
                yield start(len(ticket.request.prompt), piece.cached if isinstance(piece, End) else ticket.cached)
                for sent in () if waits else blocks.write(""):
                    yield sent
            for sent in made(piece):
                yield sent
    except ApiError as why:
        for sent in blocks.end():
            yield sent
        yield {"event": "error", "data": json.dumps(why.anthropic())}
