"""llama.cpp's completion, plain and streaming, and its slots."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field

from ..requests import Ticket
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


def native_ticket(service: Service, body: NativeRequest, caller: str) -> Ticket:
    most = None if body.n_predict in (None, -1) else body.n_predict
    if most == 0:
        raise ApiError(400, "n_predict must be -1 (to the end) or at least 1", param="n_predict")
    return service.submit(
        service.tokens_of(body.prompt), body.sampling(body.n_probs or None, temperature=0.8), most, lora=body.lora,
        slot=body.id_slot, learn=body.learn, caller=caller, ignore_eos=body.ignore_eos,
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
    end, _ = await whole(service, ticket, stops_of(body.stop))
    return {**last(service, end, end.text), "tokens": ticket.tokens}


async def native_stream(service: Service, body: NativeRequest, ticket: Ticket) -> AsyncIterator[str]:
    try:
        async for piece in generation(ticket, service.tokenizer, stops_of(body.stop)):
            if isinstance(piece, Piece):
                tokens = [c.token for c in piece.chosen]
                yield json.dumps({"index": 0, "content": piece.text, "tokens": tokens, "stop": False})
            else:
                yield json.dumps(last(service, piece, ""))
    except ApiError as why:
        yield json.dumps(why.openai())
