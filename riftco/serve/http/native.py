"""llama.cpp's completion, plain and streaming, and its slots."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from ..batch import Refused
from ..grammar import from_gbnf, schema
from ..requests import Ticket
from .asked import Asked
from .errors import ApiError
from .generation import End, Piece, generation
from .models import Sampled, stops_of
from .openai import timings, whole
from .service import Service, outcome_json


class NativeRequest(Sampled):
    """POST /completion"""

    prompt: str | list[int]
    n_predict: int | None = Field(default=None, ge=-1)
    stop: str | list[str] | None = None
    stream: bool = False
    n_probs: int | None = Field(default=None, ge=0, le=20)
    ignore_eos: bool = False
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None


def native_lark(body: NativeRequest) -> str:
    """llama.cpp's json_schema and grammar (GBNF), of which a request has one."""
    if body.json_schema is not None and body.grammar:
        raise ApiError(400, "json_schema and grammar are one or the other", param="grammar")
    try:
        if body.json_schema is not None:
            return f"start: {schema(body.json_schema)}"
        return from_gbnf(body.grammar) if body.grammar else ""
    except Refused as why:
        raise ApiError(400, str(why), param="grammar") from None


async def native_ticket(service: Service, body: NativeRequest, caller: str) -> Ticket:
    most = None if body.n_predict in (None, -1) else body.n_predict
    if most == 0:
        raise ApiError(400, "n_predict must be -1 (to the end) or at least 1", param="n_predict")
    grammar = await Asked(lark=native_lark(body)).grammar(service)
    prompt = await service.away(service.tokens_of, body.prompt)
    return service.submit(
        prompt, body.sampling(body.n_probs or None, temperature=0.8), most, lora=body.lora,
        slot=body.id_slot, learn=body.learn, caller=caller, ignore_eos=body.ignore_eos,
        grammar=grammar,
    )  # fmt: skip


def last(service: Service, end: End, content: str) -> dict[str, Any]:
    kind = "word" if end.stop_string is not None else "limit" if end.why == "length" else "eos"
    made = {
        "index": 0, "content": content, "stop": True, "id_slot": end.slot, "model": service.name, "stop_type": kind,
        "stopping_word": end.stop_string or "", "tokens_predicted": end.tokens, "tokens_evaluated": end.prompt,
        "tokens_cached": end.cached, "truncated": False, "timings": timings(end),
    }  # fmt: skip
    return made if end.learn is None else {**made, "learn": outcome_json(end.learn)}


async def native_answer(service: Service, body: NativeRequest, ticket: Ticket) -> dict[str, Any]:
    end = (await whole(service, ticket, stops_of(body.stop))).end
    return {**last(service, end, end.text), "tokens": ticket.tokens}


async def native_stream(service: Service, body: NativeRequest, ticket: Ticket) -> AsyncIterator[str]:
    try:
        async for piece in generation(ticket, service.tokenizer, stops_of(body.stop)):
            if isinstance(piece, Piece):
                tokens = [c.token for c in piece.chosen]
                yield json.dumps({"index": 0, "content": piece.text, "tokens": tokens, "stop": False})
            elif isinstance(piece, End):
                yield json.dumps(last(service, piece, ""))
    except ApiError as why:
        yield json.dumps(why.openai())
