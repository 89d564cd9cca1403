"""Files of chats and texts, learned in the background."""

from __future__ import annotations

import asyncio
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from ...data import DataError, Example
from ...data.chat import example_of
from ..batch import Refused
from ..jobs import Job, Jobs, steps_of
from ..saved_slots import open_inside
from .errors import ApiError
from .models import Body
from .service import Service

EXAMPLES = 1_000_000  # of a job


class TrainRequest(Body):
    """POST /train: lines of a JSONL file in the server's incoming folder, or records as they stand here."""

    lora_id: str
    lr: float = Field(gt=0, allow_inf_nan=False)
    file: str | None = None
    records: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    epochs: int = Field(default=1, ge=1, le=1000)
    batch_size: int = Field(default=1, ge=1, le=1024)
    seed: int = 0


def routes(
    service: Service, jobs: Jobs, admin: Callable[[Request], str], folder: pathlib.Path | None
) -> APIRouter:  # fmt: skip
    """`folder`: of what is learned; its folder `incoming` holds the files that can be named."""
    router = APIRouter()

    def allowed(request: Request) -> str:
        caller = admin(request)
        service.needs_learning()
        return caller

    @router.post("/train", status_code=202)
    async def train(body: TrainRequest, request: Request) -> dict[str, Any]:
        caller = allowed(request)
        if (body.file is None) == (body.records is None):
            raise ApiError(400, "a job needs file or records, one of them", param="file")
        try:
            examples = await asyncio.to_thread(examples_of, service, body, folder)
            job = Job(examples, body.lora_id, body.lr, body.epochs, body.batch_size, body.seed, caller)
            return steps_of(jobs.submit(job))
        except FileNotFoundError as why:
            raise ApiError(404, str(why), param="file") from None
        except (Refused, DataError) as why:
            busy = "wait already" in str(why)
            raise ApiError(503 if busy else 400, str(why), retry=busy) from None

    @router.get("/train")
    async def all_jobs(request: Request) -> dict[str, Any]:
        allowed(request)
        return {"object": "list", "data": [steps_of(job) for job in jobs.all()]}

    @router.get("/train/{id}")
    async def one(id: str, request: Request) -> dict[str, Any]:
        allowed(request)
        return steps_of(found(id))

    @router.post("/train/{id}/cancel")
    async def cancel(id: str, request: Request) -> dict[str, Any]:
        allowed(request)
        found(id)
        return steps_of(jobs.cancel(id))

    def found(id: str) -> Job:
        try:
            return jobs.of(id)
        except Refused as why:
            raise ApiError(404, str(why), param="id") from None

    return router


def examples_of(service: Service, body: TrainRequest, folder: pathlib.Path | None) -> list[Example]:
    """Everything is read and checked before the first step."""
    if body.records is not None:
        return _tokenised(service, (json.dumps(record) for record in body.records), "record")
    if folder is None:
        raise ApiError(404, "this server reads no files: start it with --train-dir")
    assert body.file is not None
    with open_inside(folder / "incoming", body.file) as file:
        try:
            return _tokenised(service, (line.decode().removeprefix("\ufeff") for line in file), body.file)
        except UnicodeDecodeError:
            raise DataError(f"{body.file} is not UTF-8 text; is this a JSONL file?") from None


def _tokenised(service: Service, lines: Iterable[str], what: str) -> list[Example]:
    longest = min(service.engine.model.config.max_position_embeddings, service.limits.train_tokens)
    made: list[Example] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            made.append(example_of(line, service.tokenizer, number, max_length=longest, truncate=False)[0])
        except ValueError as bad:  # DataError, and what the tokenizer or the template refuses
            why = str(bad).removesuffix(", or cut the ends of long examples off with --truncate")
            raise DataError(f"{what}:{number}: {why}") from None
        if len(made) > EXAMPLES:
            raise DataError(f"{what} has more than {EXAMPLES} examples; send it in parts")
    if not made:
        raise DataError(f"{what}: no examples")
    return made
