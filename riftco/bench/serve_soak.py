"""Everything at once, for a long time: turns in every dialect, learns, promotions, undos, jobs, slots saved and put
back, clients that hang up, and requests that are wrong. Nothing may be lost, and an idle slot may not change."""

from __future__ import annotations

import asyncio
import json
import pathlib
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from .serve_load import ADMIN, Memory, Server, lines, serving

SLOTS = 4  # slot 0 is served once, and left alone
BUSY = (429, 503)  # "try again": of learns a minute, and of a queue that is full
WORDS = ["where", "is", "the", "key", "to", "a", "blue", "box", "in", "hall", "who", "waters", "plants", "in", "May"]


@dataclass
class Soak:
    """What was done, what went wrong, and which learns the server said it made."""

    client: httpx.AsyncClient
    until: float
    done: Counter = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    learned: set[str] = field(default_factory=set)
    unsure: set[str] = field(default_factory=set)  # learns whose answer nobody waited for

    def wrong(self, what: str, answer: httpx.Response) -> None:
        self.errors.append(f"{what}: {answer.status_code} {answer.text[:300]}")

    def told(self, outcome: dict[str, Any] | None, id: str) -> None:
        """A turn that was to learn has said what became of it."""
        if outcome is None:
            self.errors.append(f"learn {id}: the answer does not say what became of it")
        elif outcome["success"]:
            self.learned.add(id)
            self.done["learned"] += 1
        else:
            self.errors.append(f"learn {id}: {outcome['reason']}")


def question(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randrange(3, 30))) + "?"


def request(draw: random.Random, learn: dict[str, Any] | None, stream: bool) -> tuple[str, dict[str, Any]]:
    """A turn in one of the dialects."""
    more: dict[str, Any] = {"stream": stream, "id_slot": draw.randrange(1, SLOTS)}
    if learn is not None:
        more["learn"] = learn
    if draw.random() < 0.3:
        more["lora"] = [{"id": "live", "scale": draw.choice([0.5, 1.0])}]
    text, n = question(draw), draw.randrange(1, 20)
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": n}
    return draw.choice([
        ("/v1/chat/completions", {**chat, **more}),
        ("/v1/messages", {**chat, **more}),
        ("/v1/completions", {"prompt": text, "max_tokens": n, **more}),
        ("/v1/responses", {"input": text, "max_output_tokens": n, **more}),
        ("/completion", {"prompt": text, "n_predict": n, **more}),
    ])  # fmt: skip


async def talk(soak: Soak, draw: random.Random) -> None:
    """A turn, plain or streaming, that may carry a lesson."""
    id = uuid.uuid4().hex if draw.random() < 0.3 else None
    learn = None if id is None else {"lora_id": "live", "lr": 1e-3, "id": id, "reply": question(draw)}
    stream = draw.random() < 0.5
    path, body = request(draw, learn, stream)
    outcomes = []
    async with soak.client.stream("POST", path, json=body) as answer:
        if answer.status_code in BUSY:
            soak.done["busy"] += 1
            return
        if answer.status_code != 200:
            await answer.aread()
            soak.wrong(path, answer)
            return
        if stream:
            async for chunk in lines(answer):
                if chunk.get("error"):
                    soak.errors.append(f"{path}: {chunk}")
                outcomes += [chunk["learn"]] if chunk.get("learn") else []
        else:
            outcomes = [found] if (found := json.loads(await answer.aread()).get("learn")) else []
    soak.done[f"{path}{' stream' if stream else ''}"] += 1
    if id is not None:
        soak.told(outcomes[0] if len(outcomes) == 1 else None, id)


async def hang_up(soak: Soak, draw: random.Random) -> None:
    """Go away in the middle of a stream, or of a plain request; sometimes of one that was to learn."""
    id = uuid.uuid4().hex if draw.random() < 0.3 else None
    path, body = request(draw, None if id is None else {"lora_id": "live", "lr": 1e-3, "id": id, "reply": "x"}, True)
    soak.unsure |= {id} if id is not None else set()
    try:
        async with soak.client.stream("POST", path, json={**body, "max_tokens": 100, "n_predict": 100}) as answer:
            if answer.status_code == 200:
                async for _ in answer.aiter_lines():
                    if draw.random() < 0.3:
                        break
            elif answer.status_code not in BUSY:
                await answer.aread()
                soak.wrong(path, answer)
    except httpx.RemoteProtocolError:
        soak.errors.append("a stream broke off")
    soak.done["hung up"] += 1
    await asyncio.sleep(draw.random())


WRONG: list[tuple[str, str, dict[str, Any], int]] = [
    ("POST", "/v1/chat/completions", {"content": b"{"}, 400),
    ("POST", "/v1/chat/completions", {"json": {"messages": []}}, 400),
    ("POST", "/v1/messages", {"json": {"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}}, 400),
    ("POST", "/v1/messages", {"json": {}, "headers": {"x-api-key": "wrong"}}, 401),
    ("GET", "/props", {"headers": {"x-api-key": ""}}, 401),
    ("POST", "/v1/responses", {"json": {"input": 7}}, 400),
    ("POST", "/completion", {"json": {"prompt": [10**9]}}, 400),
    ("POST", "/v1/completions", {"json": {"prompt": "x", "lora": [{"id": "none"}]}}, 400),
    ("POST", "/v1/completions", {"json": {"prompt": "word " * 2000}}, 400),
    ("POST", "/tokenize", {"content": b"x" * 40_000_000}, 413),
    ("POST", "/slots/1?action=restore", {"json": {"filename": "../../etc/passwd"}}, 400),
    ("POST", "/slots/9?action=erase", {}, 404),
    ("POST", "/adapters/load", {"json": {"id": "a", "path": "../.."}}, 400),
    ("POST", "/learn", {"json": {"lora_id": "live", "lr": 1e9, "id_slot": 1, "n_prefix": 1, "reply": "x"}}, 400),
    ("POST", "/train", {"json": {"lora_id": "live", "lr": 1e-3, "file": "/etc/passwd"}}, 400),
    ("GET", "/../../etc/passwd", {}, 404),
    ("DELETE", "/v1/models", {}, 405),
]


async def misbehave(soak: Soak, draw: random.Random) -> None:
    """Send what must be refused, and see that it is."""
    method, path, options, status = draw.choice(WRONG)
    try:
        answer = await soak.client.request(method, path, **options)
    except httpx.WriteError:  # refused before all of the body was sent
        answer = None
    if answer is not None and answer.status_code not in (status, 429):
        soak.wrong(f"{method} {path}, which is wrong,", answer)
    elif answer is not None and "error" not in answer.json():
        soak.wrong("an error without its shape", answer)
    soak.done["refused"] += 1
    await asyncio.sleep(0.3 * draw.random())


async def steer(soak: Soak, draw: random.Random) -> None:
    """Promote, undo, roll back, train, and look."""
    what = draw.choice(["promote", "undo", "rollback", "train", "look", "look"])
    cards = (await soak.client.get("/adapters")).json()["data"]
    version = cards[0]["version"]
    path, body = {
        "promote": ("/adapters/live/promote", {}),
        "undo": ("/learn/undo", {"lora_id": "live", "n": 1}),
        "rollback": ("/adapters/live/rollback", {"version": max(1, version - 1)}),
        "train": ("/train", {"lora_id": "live", "lr": 1e-3, "records": [{"text": question(draw)} for _ in range(5)]}),
        "look": ("", {}),
    }[what]
    if what == "look":
        for path in ("/props", "/slots", "/metrics", "/learn/log", "/train", "/v1/models", "/"):
            answer = await soak.client.get(path)
            if answer.status_code != 200:
                soak.wrong(path, answer)
    else:
        answer = await soak.client.post(path, json=body)
        nothing = answer.status_code == 400 and ("nothing since" in answer.text or "cannot be undone" in answer.text)
        if answer.status_code not in (200, 202, *BUSY) and not nothing:
            soak.wrong(what, answer)
    soak.done[what] += 1
    await asyncio.sleep(1 + 2 * draw.random())


async def move_slots(soak: Soak, draw: random.Random) -> None:
    """Save a slot, and put it back where it still means the same."""
    slot = draw.randrange(1, SLOTS)
    name = {"filename": f"soak-{slot}"}
    saved = await soak.client.post(f"/slots/{slot}?action=save", json=name)
    back = await soak.client.post(f"/slots/{slot}?action=restore", json=name)
    moved_on = back.status_code == 400 and "was saved under version" in back.text
    if saved.status_code != 200 or (back.status_code != 200 and not moved_on):
        soak.wrong("save and restore", back if saved.status_code == 200 else saved)
    soak.done["saved and restored"] += 1
    await asyncio.sleep(2 * draw.random())


Actor = Callable[[Soak, random.Random], Awaitable[None]]
ACTORS: tuple[Actor, ...] = (talk, talk, talk, talk, hang_up, misbehave, steer, move_slots)


async def act(soak: Soak, actor: Actor, seed: int) -> None:
    draw = random.Random(seed)
    while time.perf_counter() < soak.until:
        try:
            await actor(soak, draw)
        except httpx.HTTPError as why:
            soak.errors.append(f"{actor.__name__}: {why!r}")


async def _soak(server: Server, seconds: float) -> tuple[Soak, Memory, bool]:
    memory = Memory()
    async with httpx.AsyncClient(base_url=server.url, timeout=120, headers={"x-api-key": ADMIN}) as client:
        ask = {"messages": [{"role": "user", "content": "Where is the key?"}], "max_tokens": 8, "id_slot": 0}
        (await client.post("/v1/chat/completions", json=ask)).raise_for_status()
        before = await _bytes_of_slot_0(client, server, "before")
        soak = Soak(client, time.perf_counter() + seconds)
        watching = asyncio.create_task(memory.watch(server))
        await asyncio.gather(*(act(soak, actor, seed) for seed, actor in enumerate(ACTORS)))
        watching.cancel()
        while any(job["status"] in ("queued", "running") for job in (await client.get("/train")).json()["data"]):
            await asyncio.sleep(0.1)
        for _ in range(100):
            if not any(slot["is_processing"] for slot in (await client.get("/slots")).json()):
                break
            await asyncio.sleep(0.1)
        else:
            soak.errors.append("slots are at work, and nobody asks anything")
        return soak, memory, await _bytes_of_slot_0(client, server, "after") == before


async def _bytes_of_slot_0(client: httpx.AsyncClient, server: Server, name: str) -> bytes:
    (await client.post("/slots/0?action=save", json={"filename": name})).raise_for_status()
    return (server.folder / "slots" / name).read_bytes()


def soaked(model: pathlib.Path, folder: pathlib.Path, seconds: float) -> dict[str, Any]:
    """A soak, a kill, and what a server that starts again has of it."""
    options = ("--slots", str(SLOTS), "--cache", "q8_0")
    with serving(model, folder, *options) as server:
        soak, memory, same = asyncio.run(_soak(server, seconds))
        before = httpx.get(f"{server.url}/adapters", headers={"x-api-key": ADMIN}).json()
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serving(model, folder, *options) as server:
        after = httpx.get(f"{server.url}/adapters", headers={"x-api-key": ADMIN}).json()
    log = [json.loads(line) for line in (folder / "train" / "audit.jsonl").read_text().splitlines()]
    ids = Counter(line["learn_id"] for line in log if "learn_id" in line and "job" not in line)
    errors = list(soak.errors)
    errors += [] if same else ["the bytes of the idle slot have changed"]
    errors += [f"learn {id} was told, and is not in the log" for id in soak.learned - ids.keys()]
    errors += [f"learn {id} is in the log {n} times" for id, n in ids.items() if n > 1]
    errors += [f"learn {id} was made, and nobody was told" for id in ids.keys() - soak.learned - soak.unsure]
    errors += [f"event {i}: numbers have gaps" for i, line in enumerate(log, 1) if line["event"] != i]
    strip = [{k: v for k, v in card.items() if k != "scale"} for card in after["data"]]
    if strip != [{k: v for k, v in card.items() if k != "scale"} for card in before["data"]]:
        errors.append(f"a restart has {after}, not {before}")
    tracebacks = (folder / "server.log").read_text().count("Traceback")
    errors += [f"{tracebacks} tracebacks in the server's log"] if tracebacks else []
    events = Counter(line["kind"] for line in log)
    return {
        "seconds": seconds, "done": dict(sorted(soak.done.items())), "events": dict(events),
        "adapter": after["data"], "idle_slot_unchanged": same, "errors": errors,
        "rss_mib": [round(memory.mib[0]), round(max(memory.mib)), round(memory.mib[-1])],
        "rss_growth_mib": round(memory.growth, 1),
    }  # fmt: skip
