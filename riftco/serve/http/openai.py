"""OpenAI's chat completions and completions, plain and streaming."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..calls import Call, Reader
from ..conversation import plain_messages
from ..requests import Ticket
from ..sampling import Chosen
from ..thoughts import Thoughts
from .asked import Asked, of_openai, of_schema
from .errors import ApiError
from .generation import Called, End, Piece, Thought, generation
from .models import ChatRequest, CompletionRequest, stops_of
from .readers import every, together
from .service import Service, outcome_json

DONE = "[DONE]"
Made = Piece | Thought | Called | End | str  # of a stream; a text is an error that ends it


def chat_asked(body: ChatRequest) -> Asked:
    lark = of_schema(body.response_format, "response_format")
    return of_openai(body.tools, body.tool_choice, body.parallel_tool_calls, lark, nested=True)


async def chat_tickets(service: Service, body: ChatRequest, caller: str) -> list[Ticket]:
    """One for each of the `n` choices."""
    _check_turns(service, body.n)
    asked = chat_asked(body)
    asked.check_learn(body.learn)
    grammar = await asked.grammar(service)
    options = asked.options(body.chat_template_kwargs)
    prompt = await service.away(service.prompt_of, body.messages, options, body.continue_final_message)
    most = body.max_completion_tokens or body.max_tokens
    return _submitted(
        service, [prompt], body, body.top_logprobs if body.logprobs else None, most, caller, grammar=grammar,
        refuse=asked.refuse(service),
    )  # fmt: skip


async def completion_tickets(service: Service, body: CompletionRequest, caller: str) -> list[Ticket]:
    """`n` for each prompt."""
    given = body.prompts()
    _check_turns(service, len(given) * body.n)  # before a text is read
    prompts = [await service.away(service.tokens_of, prompt) for prompt in given]
    return _submitted(service, prompts, body, body.logprobs, body.max_tokens, caller)


def _check_turns(service: Service, turns: int) -> None:
    """Refuse more than can ever wait: again later is no remedy."""
    if turns > (most := service.scheduler.limit):
        raise ApiError(400, f"{turns} choices at once; at most {most} turns may wait; send fewer", param="n")


def begun(body: ChatRequest) -> str:
    """The text that the reply goes on with."""
    return plain_messages(body.messages[-1:])[0]["content"] if body.continue_final_message else ""


def _submitted(
    service: Service, prompts: list[list[int]], body: ChatRequest | CompletionRequest, logprobs: int | None,
    most: int | None, caller: str, **more: Any,
) -> list[Ticket]:  # fmt: skip
    """A turn for each choice, or none of them; each draws by a seed of its own."""
    if body.learn is not None and len(prompts) * body.n > 1:
        raise ApiError(400, "a turn that is learned has one prompt, and n of 1", param="learn")
    sampling, tickets = body.sampling(logprobs), list[Ticket]()
    try:
        for prompt in prompts:
            for i in range(body.n):
                own = sampling if sampling.seed is None else replace(sampling, seed=_seed(sampling.seed + i))
                lora = service.lora_of(body.lora, body.model)
                tickets.append(
                    service.submit(
                        prompt, own, most, lora=lora, slot=body.id_slot, learn=body.learn, caller=caller, **more
                    )
                )
    except ApiError:
        for ticket in tickets:
            ticket.cancel()
        raise
    return tickets


def _seed(given: int) -> int:
    """In 64 bits, with a sign."""
    return (given + 2**63) % 2**64 - 2**63


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

    def last(self, ends: Sequence[End]) -> dict[str, Any]:
        """What the last chunk, or the plain answer, has beside its choices; times are one choice's."""
        made: dict[str, Any] = {"timings": timings(ends[0])} if len(ends) == 1 else {}
        if ends[0].learn is not None:
            made["learn"] = outcome_json(ends[0].learn)
        return made


def usage(ends: Sequence[End], n: int = 1) -> dict[str, Any]:
    """Of all choices, `n` a prompt, whose tokens count once."""
    prompts, tokens = ends[::n], sum(end.tokens for end in ends)
    prompt = sum(end.prompt for end in prompts)
    return {
        "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached for end in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(end.thought_tokens for end in ends)},
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


def completion_logprobs(service: Service, chosen: tuple[Chosen, ...], offset: int = 0) -> dict[str, Any] | None:
    """`offset`: how many characters of the reply come before."""
    if not chosen or chosen[0].logprob is None:
        return None
    decode = service.tokenizer.decode
    tokens = [decode([c.token]) for c in chosen]
    return {
        "tokens": tokens,
        "token_logprobs": [c.logprob for c in chosen],
        "top_logprobs": [{decode([t]): v for t, v in c.top} for c in chosen],
        "text_offset": [offset + len("".join(tokens[:i])) for i in range(len(tokens))],
    }


def finish_reason(end: End) -> str:
    return "length" if end.why == "length" else "tool_calls" if end.calls else "stop"


def function_call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


async def chat_stream(service: Service, body: ChatRequest, tickets: list[Ticket]) -> AsyncIterator[str]:
    shape, ends = Shape(service, "chat.completion", body.model), dict[int, End]()

    def chunk(i: int, change: dict[str, Any], finish: str | None = None, logprobs: Any = None, **more: Any) -> str:
        choice = {"index": i, "delta": change, "finish_reason": finish, "logprobs": logprobs}
        return json.dumps(shape.chunk([choice], **more))

    def pieces(ticket: Ticket) -> AsyncIterator[Made]:
        thoughts = service.thoughts(ticket, body.reasoning_format, begun(body))
        return _pieces(service, ticket, stops_of(body.stop), chat_asked(body).reader(service), thoughts)

    for i in range(len(tickets)):
        yield chunk(i, {"role": "assistant", "content": ""})
    async for i, text in together([pieces(ticket) for ticket in tickets]):
        if isinstance(text, Piece):
            yield chunk(i, {"content": text.text}, None, chat_logprobs(service, text.chosen))
        elif isinstance(text, Thought):
            yield chunk(i, {"reasoning_content": text.text}, None, chat_logprobs(service, text.chosen))
        elif isinstance(text, Called):
            for change in call_deltas(text):
                yield chunk(i, change)
        elif isinstance(text, End):
            ends[i] = text
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            whole = len(ends) == len(tickets)
            more = shape.last([ends[n] for n in sorted(ends)]) if whole else {}
            yield chunk(i, {}, finish_reason(text), **({} if with_usage else more))
            if with_usage and whole:
                counted = usage([ends[n] for n in sorted(ends)], body.n)
                yield json.dumps(shape.chunk([], usage=counted, **more))
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


async def completion_stream(service: Service, body: CompletionRequest, tickets: list[Ticket]) -> AsyncIterator[str]:
    shape, ends, shown = Shape(service, "text_completion", body.model), dict[int, End](), [0] * len(tickets)

    def choice(i: int, text: str, finish: str | None = None, logprobs: Any = None) -> list[dict[str, Any]]:
        return [{"index": i, "text": text, "finish_reason": finish, "logprobs": logprobs}]

    async for i, text in together([_pieces(service, ticket, stops_of(body.stop)) for ticket in tickets]):
        if isinstance(text, Piece):
            logprobs = completion_logprobs(service, text.chosen, shown[i])
            yield json.dumps(shape.chunk(choice(i, text.text, None, logprobs)))
            shown[i] += len(text.text)
        elif isinstance(text, End):
            ends[i] = text
            more: dict[str, Any] = {}
            if len(ends) == len(tickets):
                ordered = [ends[n] for n in sorted(ends)]
                more = {"usage": usage(ordered, body.n), **shape.last(ordered)}
            yield json.dumps(shape.chunk(choice(i, "", "length" if text.why == "length" else "stop"), **more))
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
) -> AsyncIterator[Made]:
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


async def chat_answer(service: Service, body: ChatRequest, tickets: list[Ticket]) -> dict[str, Any]:
    def read(ticket: Ticket) -> Coroutine[Any, Any, Whole]:
        thoughts = service.thoughts(ticket, body.reasoning_format, begun(body))
        return whole(service, ticket, stops_of(body.stop), chat_asked(body).reader(service), thoughts)

    shape, made = Shape(service, "chat.completion", body.model), await every([read(t) for t in tickets])
    choices = []
    for i, one in enumerate(made):
        message: dict[str, Any] = {"role": "assistant", "content": one.end.text, "refusal": None}
        if one.end.thought:
            message["reasoning_content"] = one.end.thought
        if one.calls:
            message |= {"content": one.end.text or None, "tool_calls": [function_call(call) for call in one.calls]}
        choices.append({
            "index": i, "message": message, "finish_reason": finish_reason(one.end),
            "logprobs": chat_logprobs(service, one.chosen),
        })  # fmt: skip
    ends = [one.end for one in made]
    return {**shape.chunk(choices, usage=usage(ends, body.n), **shape.last(ends)), "object": "chat.completion"}


async def completion_answer(service: Service, body: CompletionRequest, tickets: list[Ticket]) -> dict[str, Any]:
    made = await every([whole(service, ticket, stops_of(body.stop)) for ticket in tickets])
    choices = [
        {
            "index": i, "text": one.end.text, "finish_reason": "length" if one.end.why == "length" else "stop",
            "logprobs": completion_logprobs(service, one.chosen),
        }
        for i, one in enumerate(made)
    ]  # fmt: skip
    ends, shape = [one.end for one in made], Shape(service, "text_completion", body.model)
    return shape.chunk(choices, usage=usage(ends, body.n), **shape.last(ends))
