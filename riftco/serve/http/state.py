"""What the server is and does now: its properties, and its slots, which can be kept as files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

from fastapi import APIRouter, Request

from ... import __version__
from ...models import ModelError
from ..batch import Refused
from ..sampling import Sampling
from ..saved_slots import SlotFiles, put, take
from ..slots import Slot, State
from .errors import ApiError
from .models import Body
from .service import Service


class SlotFile(Body):
    filename: str = ""


def routes(service: Service, admin: Callable[[Request], str], files: SlotFiles | None) -> APIRouter:
    """`files`: where slots are saved; None: they are not."""
    router, scheduler = APIRouter(), service.scheduler

    @router.get("/props")
    async def props() -> dict[str, Any]:
        return properties(service)

    @router.get("/slots")
    async def slots(fail_on_no_slot: bool = False) -> list[dict[str, Any]]:
        made = [card(service, slot) for slot in service.engine.slots]
        if fail_on_no_slot and all(slot["is_processing"] for slot in made):
            raise ApiError(503, "no slot is free; try again later", retry=True)
        return made

    @router.post("/slots/{id}")
    async def act(
        id: int, action: Literal["save", "restore", "erase"], request: Request, body: SlotFile | None = None
    ) -> dict[str, Any]:
        admin(request)
        if not 0 <= id < len(service.engine.slots):
            raise ApiError(404, f"no slot {id}; there are {len(service.engine.slots)}", param="id")
        try:
            if action == "erase":
                return {"id_slot": id, "n_erased": await between_turns(id, lambda: erase(id))}
            if files is None:
                raise ApiError(501, "this server saves no slots: start it with --slot-save-path", param="action")
            name = "" if body is None else body.filename
            return await (save if action == "save" else restore)(files, id, name)
        except FileNotFoundError as why:
            raise ApiError(404, str(why), param="filename") from None
        except (Refused, ModelError) as why:
            raise ApiError(400, str(why), param="filename") from None
        except OSError as why:
            raise ApiError(500, f"the file was not written: {why.strerror}") from None

    async def between_turns(id: int, task: Callable[[], Any]) -> Any:
        """Wait for the slot's turn to end, without holding anything up."""
        return await asyncio.wrap_future(scheduler.between_turns(id, task))

    def erase(id: int) -> int:
        held = len(service.engine.slots[id].tokens)
        service.engine.cut(id, 0)
        return held

    async def save(files: SlotFiles, id: int, name: str) -> dict[str, Any]:
        files.check(name)
        began = time.perf_counter()
        saved = await between_turns(id, lambda: take(service.engine, id))
        size = await asyncio.to_thread(files.write, name, saved)
        took = {"save_ms": 1e3 * (time.perf_counter() - began)}
        return {
            "id_slot": id, "filename": name, "n_saved": len(saved.tokens), "n_written": size, "timings": took
        }  # fmt: skip

    async def restore(files: SlotFiles, id: int, name: str) -> dict[str, Any]:
        began = time.perf_counter()
        saved, size = await asyncio.to_thread(files.read, name)
        await between_turns(id, lambda: put(service.engine, id, saved))
        took = {"restore_ms": 1e3 * (time.perf_counter() - began)}
        return {
            "id_slot": id, "filename": name, "n_restored": len(saved.tokens), "n_read": size, "timings": took
        }  # fmt: skip

    return router


def card(service: Service, slot: Slot) -> dict[str, Any]:
    """A slot in llama.cpp's words and ours."""
    turn = service.scheduler.turns.get(slot.id)
    made = {
        "id": slot.id, "n_ctx": service.engine.window, "speculative": service.scheduler.speculate > 0,
        "is_processing": slot.state is not State.IDLE, "state": slot.state.value, "n_tokens": len(slot.tokens),
        "lora": [{"id": use.id, "version": use.version, "scale": use.scale} for use in slot.key],
    }  # fmt: skip
    if turn is not None:
        said = len(turn.reply)
        left = turn.ticket.request.max_new_tokens - said
        made |= {"n_prompt_tokens": len(turn.prompt), "n_prompt_tokens_cache": turn.cached}
        made["next_token"] = [{"has_next_token": turn.why is None, "n_decoded": said, "n_remain": left}]
    return made


def properties(service: Service) -> dict[str, Any]:
    engine, tokenizer, totals = service.engine, service.tokenizer.hf, service.scheduler.totals
    said = sum(len(turn.reply) for turn in list(service.scheduler.turns.values()))
    plain = Sampling()
    defaults = {name: getattr(plain, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
    return {
        "model": service.name, "model_alias": service.name, "model_path": service.name, "version": __version__,
        "build_info": f"riftco-{__version__}", "total_slots": len(engine.slots), "n_ctx": engine.window,
        "default_generation_settings": {"n_ctx": engine.window, "params": {"temperature": 1.0, **defaults}},
        "chat_template": tokenizer.chat_template or "", "bos_token": tokenizer.bos_token or "",
        "eos_token": tokenizer.eos_token or "", "modalities": {"vision": False, "audio": False},
        "cache_dtype": engine.cache.dtype, "learns": service.learns, "adapters": service.adapter_cards(),
        "totals": {
            "requests": service.requests, "prompt_tokens": totals.prompt, "prompt_tokens_cached": totals.cached,
            "tokens_predicted": totals.predicted + said, "learned": totals.learned, "refused": totals.refused,
            "learn_seconds": totals.learn_seconds, "waiting": len(service.scheduler.waiting),
        },
    }  # fmt: skip
