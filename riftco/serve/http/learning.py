"""Routes that change what the model knows: learn, undo, promote, load; and the slots' rows on disk."""

from __future__ import annotations

import asyncio
import pathlib
import re
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field

from ...adapters.peft_config import read_spec
from ...adapters.peft_files import PREFIX, WEIGHTS
from ..batch import Refused
from ..conversation import reply_tokens
from .errors import ApiError
from .models import Body, LearnOptions
from .service import Service, outcome_json

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class LearnRequest(LearnOptions):
    """POST /learn: behind the first `n_prefix` tokens that a slot served, or behind the conversation that it served."""

    model_config = ConfigDict(extra="allow")

    id_slot: int | None = Field(default=None, ge=0)
    n_prefix: int | None = Field(default=None, ge=1)
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class UndoRequest(Body):
    lora_id: str
    n: int = Field(default=1, ge=1)


class LoadRequest(Body):
    id: str
    path: str


def file_in(folder: pathlib.Path, name: str) -> pathlib.Path:
    """A file or folder of a request inside `folder`; anything that could lead out of it is refused."""
    if not NAME.fullmatch(name):
        raise ApiError(400, f"a name has letters, digits, '.', '_' and '-'; got {name!r}", param="path")
    return folder / name


def routes(service: Service, admin, folder: pathlib.Path | None) -> APIRouter:
    """`admin(request)` gives the caller or raises."""
    router = APIRouter()

    @router.post("/learn")
    async def learn(body: LearnRequest, request: Request) -> dict[str, Any]:
        caller = admin(request)
        service.needs_learning()
        slot, prompt = lesson(service, body)
        outcome = await asyncio.to_thread(service.learn, slot, prompt, body, caller)
        if not outcome.success:
            raise ApiError(400, str(outcome.reason), code="learn_refused")
        return {"learn": outcome_json(outcome)}

    @router.post("/learn/undo")
    async def undo(body: UndoRequest, request: Request) -> dict[str, Any]:
        admin(request)
        service.needs_learning()
        step = await asyncio.to_thread(service.change, lambda: service.engine.undo(body.lora_id, body.n))
        return {"lora_id": body.lora_id, "step": step}

    @router.get("/adapters")
    async def adapters() -> dict[str, Any]:
        return {"data": service.adapter_cards()}

    @router.post("/adapters/{id}/promote")
    async def promote(id: str, request: Request) -> dict[str, Any]:
        admin(request)
        service.needs_learning()
        version = await asyncio.to_thread(service.change, lambda: service.engine.promote(id))
        return {"lora_id": id, "version": version, "digest": service.engine.bank.of(id).digests[-1]}

    @router.post("/adapters/load")
    async def load(body: LoadRequest, request: Request) -> dict[str, Any]:
        admin(request)
        service.needs_learning()
        if folder is None:
            raise ApiError(404, "this server loads no adapters: start it with --train-dir")
        where = file_in(folder / "incoming", body.path)

        def load_it() -> None:
            from safetensors.torch import load_file

            state = {k.removeprefix(PREFIX): t for k, t in load_file(where / WEIGHTS).items()}
            service.engine.create(body.id, read_spec(where), state=state)

        if not (where / WEIGHTS).is_file():
            raise ApiError(404, f"no adapter folder {body.path!r} in the server's incoming folder")
        await asyncio.to_thread(service.change, load_it)
        return {"data": service.adapter_cards()}

    return router


def lesson(service: Service, body: LearnRequest) -> tuple[int, list[int]]:
    """(slot, prompt) that a learn stands behind; a conversation's last message becomes the reply."""
    if body.messages:
        try:
            body.reply_tokens = reply_tokens(service.tokenizer, body.messages[-1])
        except Refused as why:
            raise ApiError(400, str(why), param="messages") from None
        prompt = service.prompt_of(body.messages[:-1], body.chat_template_kwargs)
        slot = service.slot_of(prompt) if body.id_slot is None else body.id_slot
        return slot, prompt
    if body.id_slot is None or body.n_prefix is None:
        raise ApiError(400, "a learn needs messages, or id_slot and n_prefix", param="n_prefix")
    if body.id_slot >= len(service.engine.slots):
        raise ApiError(404, f"no slot {body.id_slot}; there are {len(service.engine.slots)}", param="id_slot")
    held = service.engine.slots[body.id_slot].tokens
    if body.n_prefix > len(held):
        raise ApiError(400, f"slot {body.id_slot} holds {len(held)} rows, not {body.n_prefix}", param="n_prefix")
    return body.id_slot, held[: body.n_prefix]
