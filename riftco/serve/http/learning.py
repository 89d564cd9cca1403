"""Routes that change what the model knows: learn, undo, promote, roll back, load, and which adapters serve."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import ConfigDict, Field

from ...adapters.peft_config import CONFIG
from ...adapters.peft_files import WEIGHTS, read_adapter
from ...models import ModelError
from ..batch import Refused
from ..conversation import reply_tokens
from ..saved_slots import file_in
from ..store import PERSONAL
from .asked import of_openai
from .errors import ApiError
from .models import Body, LearnOptions, LoraUse
from .service import Service, outcome_json


class LearnRequest(LearnOptions):
    """POST /learn: behind the first `n_prefix` tokens that a slot served, or behind the conversation that it served."""

    model_config = ConfigDict(extra="allow")

    id_slot: int | None = Field(default=None, ge=0)
    n_prefix: int | None = Field(default=None, ge=1)
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class UndoRequest(Body):
    lora_id: str
    n: int = Field(default=1, ge=1)


class RollbackRequest(Body):
    version: int = Field(ge=1)


class LoadRequest(Body):
    id: str
    path: str


def routes(service: Service, admin, folder: pathlib.Path | None) -> APIRouter:
    """`admin(request)` gives the caller or raises."""
    router = APIRouter()

    @router.post("/learn")
    async def learn(body: LearnRequest, request: Request) -> dict[str, Any]:
        caller = admin(request)
        service.needs_learning()
        slot, prompt = await service.away(lesson, service, body)
        outcome = await service.learned(slot, prompt, body, caller)
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

    @router.post("/adapters/{id}/rollback")
    async def rollback(id: str, body: RollbackRequest, request: Request) -> dict[str, Any]:
        admin(request)
        service.needs_learning()
        version = await asyncio.to_thread(service.change, lambda: service.engine.rollback(id, body.version))
        return {"lora_id": id, "version": version, "digest": service.engine.bank.of(id).digests[-1]}

    @router.get("/learn/log")
    async def newest(request: Request, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> dict[str, Any]:
        """The log's last lines, without what could be traced to a text."""
        admin(request)
        service.needs_learning()
        store = service.engine.store
        lines = [] if store is None else await asyncio.to_thread(store.audit.newest, limit)
        return {"data": [{k: v for k, v in line.items() if k not in PERSONAL} for line in lines]}

    @router.delete("/learn/log/{learn_id}")
    async def forget(learn_id: str, request: Request) -> dict[str, Any]:
        """Take what could be traced to a text out of the log, for good."""
        admin(request)
        service.needs_learning()
        store = service.engine.store
        if store is None:
            raise ApiError(404, "this server keeps no log")
        lines = await asyncio.to_thread(service.change, lambda: store.audit.forget(learn_id))
        return {"learn_id": learn_id, "lines": lines}

    @router.get("/lora-adapters")
    async def scales() -> list[dict[str, Any]]:
        lasting = service.engine.store is not None
        return [
            {"id": card["id"], "path": f"adapters/{card['id']}/versions/{card['version']}" if lasting else "",
             "scale": card["scale"], "version": card["version"], "digest": card["digest"]}
            for card in service.adapter_cards()
        ]  # fmt: skip

    @router.post("/lora-adapters")
    async def set_scales(body: list[LoraUse], request: Request) -> dict[str, bool]:
        """Which adapters serve a request that names none; those that are left out do not."""
        admin(request)
        scales = {use.id: use.scale for use in body}
        await asyncio.to_thread(service.change, lambda: service.engine.bank.ready(service.engine.bank.set_of(scales)))
        service.scales = {id: scale for id, scale in scales.items() if scale}
        return {"success": True}

    @router.post("/adapters/load")
    async def load(body: LoadRequest, request: Request) -> dict[str, Any]:
        admin(request)
        service.needs_learning()
        if folder is None:
            raise ApiError(404, "this server loads no adapters: start it with --train-dir")
        try:
            where = file_in(folder / "incoming", body.path)
        except Refused as why:
            raise ApiError(400, str(why), param="path") from None

        def load_it() -> None:
            spec, state = read_adapter(where, service.engine.model)
            service.engine.create(body.id, spec, state=state)

        links = any(part.is_symlink() for part in (where, where / WEIGHTS, where / CONFIG))
        if links or not (where / WEIGHTS).is_file():
            raise ApiError(404, f"no adapter folder {body.path!r} in the server's incoming folder")
        await asyncio.to_thread(service.change, load_it)
        return {"data": service.adapter_cards()}

    return router


def lesson(service: Service, body: LearnRequest) -> tuple[int, list[int]]:
    """(slot, prompt) that a learn stands behind; a conversation's last message becomes the reply."""
    if body.messages:
        try:
            body.reply_tokens = reply_tokens(service.tokenizer, body.messages[-1])
        except (Refused, ModelError) as why:
            raise ApiError(400, str(why), param="messages") from None
        asked = of_openai(body.tools, None, None, "", nested=True)
        prompt = service.prompt_of(body.messages[:-1], asked.options(body.chat_template_kwargs))
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
