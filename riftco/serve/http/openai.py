"""OpenAI's chat completions and completions, plain and streaming."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from ..calls import Call, Reader
from ..requests import Ticket
from ..sampling import Chosen
from ..thoughts import Thoughts
from .asked import Asked, of_openai, of_schema
from .errors import ApiError
from .generation import Called, End, Piece, Thought, generation
from .models import ChatRequest, CompletionRequest, stops_of
from .service import Service, outcome_json

DONE = "[DONE]"


def chat_asked(body: ChatRequest) -> Asked:
    lark = of_schema(body.response_format, "response_format")
    return of_openai(body.tools, body.tool_choice, body.parallel_tool_calls, lark, nested=True)


async def chat_ticket(service: Service, body: ChatRequest, caller: str) -> Ticket:
    asked = chat_asked(body)
    asked.check_learn(body.learn)
    grammar = await asked.grammar(service)
    prompt = await service.away(service.prompt_of, body.messages, asked.options(body.chat_template_kwargs))
    sampling = body.sampling(body.top_logprobs if body.logprobs else None)
    most = body.max_completion_tokens or body.max_tokens
    return service.submit(
        prompt, sampling, most, lora=body.lora, slot=body.id_slot, learn=body.learn, caller=caller, grammar=grammar,
        refuse=asked.refuse(service),
    )  # fmt: skip


async def completion_ticket(service: Service, body: CompletionRequest, caller: str) -> Ticket:
    prompt = await service.away(service.tokens_of, body.prompt)
    return service.submit(
        prompt, body.sampling(body.logprobs), body.max_tokens, lora=body.lora, slot=body.id_slot, learn=body.learn,
        caller=caller,
    )  # fmt: skip


class Shape:
    """One answer's frame: what all of its chunks have in common."""

    def __init__(self, service: Service, kind: str, model: str | None):
        self.service, self.kind = service, kind
        prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
        self.head: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model or service.name,
        }  # fmt: skip

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.head, "object": f"{self.kind}.chunk" if self.kind.startswith("chat") else self.kind,
                "choices": choices, **more}  # fmt: skip

    def last(self, end: End) -> dict[str, Any]:
        """What the last chunk, or the plain answer, has beside its choices."""
        made: dict[str, Any] = {"timings": timings(end)}
        if end.learn is not None:
            made["learn"] = outcome_json(end.learn)
        return made


def usage(end: End) -> dict[str, Any]:
    return {
        "prompt_tokens": end.prompt, "completion_tokens": end.tokens, "total_tokens": end.prompt + end.tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached},
        "completion_tokens_details": {"reasoning_tokens": end.thought_tokens},
    }  # fmt: skip


def timings(end: End) -> dict[str, Any]:
    """llama.cpp's names."""
    made = end.prompt - end.cached
    return {
        "cache_n": end.cached, "prompt_n": made, "prompt_ms": 1e3 * end.seconds_prompt,
        "predicted_n": end.tokens, "predicted_ms": 1e3 * end.seconds_text,
        "predicted_per_second": end.tokens / end.seconds_text if end.seconds_text else 0.0,
        "draft_n": end.drafted, "draft_n_accepted": end.accepted,
    }  # fmt: skip


def chat_logprobs(service: Service, chosen: tuple[Chosen, ...]) -> dict[str, Any] | None:
    if not chosen or chosen[0].logprob is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = service.tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(service.tokenizer.bytes_of(token))}

    content = [
        {**entry(c.token, c.logprob or 0.0), "top_logprobs": [entry(t, v) for t, v in c.top]} for c in chosen
    ]  # fmt: skip
    return {"content": content, "refusal": None}


def completion_logprobs(service: Service, chosen: tuple[Chosen, ...]) -> dict[str, Any] | None:
    if not chosen or chosen[0].logprob is None:
        return None
    decode = service.tokenizer.decode
    return {
        "tokens": [decode([c.token]) for c in chosen],
        "token_logprobs": [c.logprob for c in chosen],
        "top_logprobs": [{decode([t]): v for t, v in c.top} for c in chosen],
        "text_offset": [],
    }


def finish_reason(end: End) -> str:
    return "length" if end.why == "length" else "tool_calls" if end.calls else "stop"


def function_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


async def chat_stream(service: Service, body: ChatRequest, ticket: Ticket) -> AsyncIterator[str]:
    shape, reader = Shape(service, "chat.completion", body.model), chat_asked(body).reader(service)

    def delta(change: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": change, "finish_reason": finish, "logprobs": logprobs}]

    thoughts = service.thoughts(ticket, body.reasoning_format)
    yield json.dumps(shape.chunk(delta({"role": "assistant", "content": ""})))
    async for text in _pieces(service, ticket, stops_of(body.stop), reader, thoughts):
        if isinstance(text, Piece):
            made = delta({"content": text.text}, None, chat_logprobs(service, text.chosen))
            yield json.dumps(shape.chunk(made))
        elif isinstance(text, Thought):
            made = delta({"reasoning_content": text.text}, None, chat_logprobs(service, text.chosen))
            yield json.dumps(shape.chunk(made))
        elif isinstance(text, Called):
            for change in call_deltas(text):
                yield json.dumps(shape.chunk(delta(change)))
        elif isinstance(text, End):
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            more = shape.last(text)
            finish = delta({}, finish_reason(text))
            yield json.dumps(shape.chunk(finish, **({} if with_usage else more)))
            if with_usage:
                yield json.dumps(shape.chunk([], usage=usage(text), **more))
        else:
            yield text
            return
    yield DONE


def call_deltas(called: Called) -> Iterator[dict[str, Any]]:
    """A call's name, then its arguments."""
    made = function_call(called.call)
    arguments = made["function"].pop("arguments")
    yield {"tool_calls": [{"index": called.index, **made, "function": {**made["function"], "arguments": ""}}]}
    yield {"tool_calls": [{"index": called.index, "function": {"arguments": arguments}}]}


async def completion_stream(service: Service, body: CompletionRequest, ticket: Ticket) -> AsyncIterator[str]:
    shape = Shape(service, "text_completion", body.model)

    def choice(text: str, finish: str | None = None, logprobs: Any = None) -> list[dict[str, Any]]:
        return [{"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}]

    async for text in _pieces(service, ticket, stops_of(body.stop)):
        if isinstance(text, Piece):
            yield json.dumps(shape.chunk(choice(text.text, None, completion_logprobs(service, text.chosen))))
        elif isinstance(text, End):
            finish = choice("", "length" if text.why == "length" else "stop")
            yield json.dumps(shape.chunk(finish, usage=usage(text), **shape.last(text)))
        elif isinstance(text, str):
            yield text
            return
    yield DONE


async def _pieces(
    service: Service,
    ticket: Ticket,
    stop: list[str],
    reader: Reader | None = None,
    thoughts: Thoughts | None = None,
) -> AsyncIterator[Piece | Thought | Called | End | str]:
    """What a generation gives; or, where the turn failed on the way, an error that clients raise."""
    try:
        async for piece in generation(ticket, service.tokenizer, stop, reader, thoughts):
            yield piece
    except ApiError as why:
        yield json.dumps(why.openai())


@dataclass
class Whole:
    """A generation read to its end."""

    end: End
    chosen: tuple[Chosen, ...]
    calls: list[Call]


async def whole(
    service: Service,
    ticket: Ticket,
    stop: list[str],
    reader: Reader | None = None,
    thoughts: Thoughts | None = None,
) -> Whole:
    chosen, calls = list[Chosen](), list[Call]()
    async for piece in generation(ticket, service.tokenizer, stop, reader, thoughts):
        if isinstance(piece, End):
            return Whole(piece, tuple(chosen), calls)
        chosen += piece.chosen
        if isinstance(piece, Called):
            calls.append(piece.call)
    raise AssertionError("a generation ends with an End")


async def chat_answer(service: Service, body: ChatRequest, ticket: Ticket) -> dict[str, Any]:
    thoughts = service.thoughts(ticket, body.reasoning_format)
    read = await whole(service, ticket, stops_of(body.stop), chat_asked(body).reader(service), thoughts)
    shape, end = Shape(service, "chat.completion", body.model), read.end
    message: dict[str, Any] = {"role": "assistant", "content": end.text, "refusal": None}
    if end.thought:
        message["reasoning_content"] = end.thought
    if read.calls:
        message |= {"content": end.text or None, "tool_calls": [function_call(call) for call in read.calls]}
    choice = {
        "index": 0, "message": message, "finish_reason": finish_reason(end),
        "logprobs": chat_logprobs(service, read.chosen),
    }  # fmt: skip
    return {**shape.chunk([choice], usage=usage(end), **shape.last(end)), "object": "chat.completion"}


async def completion_answer(service: Service, body: CompletionRequest, ticket: Ticket) -> dict[str, Any]:
    read = await whole(service, ticket, stops_of(body.stop))
    shape, end, chosen = Shape(service, "text_completion", body.model), read.end, read.chosen
    finish = "length" if end.why == "length" else "stop"
    choice = {"index": 0, "text": end.text, "finish_reason": finish, "logprobs": completion_logprobs(service, chosen)}
    return shape.chunk([choice], usage=usage(end), **shape.last(end))
