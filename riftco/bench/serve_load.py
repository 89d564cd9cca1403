"""A server in a process of its own under many clients, or under everything at once for a long time.

`python bench/serve_load.py clients --clients 64 --seconds 120` and `python bench/serve_load.py soak --seconds 1200`.
The model is small and random, behind a real tokenizer: what is measured is the server. With `--model` it is a folder or
file of one's own, and `--device auto` takes a GPU where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch

from ..models import Decoder, DecoderConfig, load_tokenizer, save_hf, smollm2_path
from ..models.rotary import Rope
from .machine import machine_columns

WINDOW = 256
ADMIN = "root"


@dataclass
class Server:
    """A running `riftco serve`."""

    url: str
    process: subprocess.Popen
    folder: pathlib.Path

    @property
    def mib(self) -> float:
        """Memory that it holds now."""
        pages = int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def small_model(folder: pathlib.Path) -> pathlib.Path:
    """A random decoder with SmolLM2's tokenizer, as a folder that can be served."""
    tokenizer = load_tokenizer(smollm2_path())
    torch.manual_seed(3)
    config = DecoderConfig("llama", tokenizer.vocabulary_size, 32, 64, 2, 2, 1, 32, 2 * WINDOW, Rope(32, 1e4))
    save_hf(Decoder(config), folder)
    tokenizer.save(folder)
    return folder


@contextlib.contextmanager
def serving(model: pathlib.Path, folder: pathlib.Path, *options: str, device: str = "cpu") -> Iterator[Server]:
    """`riftco serve` until the block ends; its log lies in `folder`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", "--model", model, "--port", port, "--window", WINDOW, "--device", device, "--admin-key", ADMIN,
             "--train-dir", folder / "train", "--slot-save-path", folder / "slots", *options]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "server.log", "ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "riftco", *map(str, words)], stdout=log, stderr=log)
    server = Server(f"http://127.0.0.1:{port}", process, folder)
    try:
        _wait(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: Server) -> None:
    for _ in range(1800):
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended: {(server.folder / 'server.log').read_text()[-2000:]}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health").status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("the server did not answer for three minutes")


@dataclass
class Memory:
    """The server's memory, second by second."""

    mib: list[float] = field(default_factory=list)

    async def watch(self, server: Server) -> None:
        while True:
            self.mib.append(server.mib)
            await asyncio.sleep(1)

    @property
    def growth(self) -> float:
        """MiB by which the last fifth's median is above the second fifth's."""
        n = max(len(self.mib) // 5, 1)
        return statistics.median(self.mib[-n:]) - statistics.median(self.mib[n : 2 * n] or self.mib)


@dataclass
class Turns:
    """What one client saw: seconds to the first token, and to the end, of each turn."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: list[str] = field(default_factory=list)


async def lines(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The objects of an event stream."""
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def stream_turns(client: httpx.AsyncClient, name: int, until: float) -> Turns:
    """One client that asks again as soon as it has its answer."""
    seen, draw = Turns(), random.Random(name)
    while time.perf_counter() < until:
        said = [{"role": "user", "content": f"I am {name}. " + "word " * draw.randrange(1, 40)}]
        ask = {"messages": said, "max_tokens": draw.randrange(8, 25), "stream": True}
        ask["stream_options"] = {"include_usage": True}
        began = time.perf_counter()
        first, usage = None, None
        try:
            async with client.stream("POST", "/v1/chat/completions", json=ask) as answer:
                if answer.status_code != 200:
                    seen.errors.append(f"{answer.status_code}: {(await answer.aread()).decode()[:200]}")
                    continue
                async for chunk in lines(answer):
                    if "error" in chunk:
                        seen.errors.append(str(chunk["error"]))
                    if chunk.get("choices") and chunk["choices"][0]["delta"].get("content") and first is None:
                        first = time.perf_counter() - began
                    usage = chunk.get("usage") or usage
        except httpx.HTTPError as why:
            seen.errors.append(repr(why))
            continue
        if usage is None:
            seen.errors.append("the stream ended without its usage")
            continue
        seen.whole.append(time.perf_counter() - began)
        seen.first.append(seen.whole[-1] if first is None else first)
        seen.tokens += usage["completion_tokens"]
    return seen


def at(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


async def many_clients(server: Server, clients: int, seconds: float) -> dict[str, Any]:
    """So many clients that stream all the time."""
    memory, until = Memory(), time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=clients)
    headers = {"x-api-key": ADMIN}
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits, headers=headers) as client:
        watching = asyncio.create_task(memory.watch(server))
        seen = await asyncio.gather(*(stream_turns(client, i, until) for i in range(clients)))
        watching.cancel()
    first, whole = ([t for turns in seen for t in getattr(turns, name)] for name in ("first", "whole"))
    turns = [len(s.whole) for s in seen]
    medians = [statistics.median(s.first) for s in seen if s.first]
    return {
        "clients": clients, "seconds": seconds, "turns": sum(turns), "errors": [e for s in seen for e in s.errors],
        "tokens_s": sum(s.tokens for s in seen) / seconds, "fewest_turns": min(turns), "most_turns": max(turns),
        "first_p50_s": at(first, 0.5), "first_p95_s": at(first, 0.95), "first_max_s": max(first),
        "whole_p50_s": at(whole, 0.5), "whole_p95_s": at(whole, 0.95), "whole_max_s": max(whole),
        "slowest_client_over_median": max(medians) / statistics.median(medians),
        "rss_mib": [round(memory.mib[0]), round(max(memory.mib)), round(memory.mib[-1])],
        "rss_growth_mib": round(memory.growth, 1),
    }  # fmt: skip


def main(argv: list[str] | None = None, folder: str | pathlib.Path | None = None) -> int:
    from .serve_soak import soaked  # which uses what is here

    parser = argparse.ArgumentParser(prog="riftco bench serve-load", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("clients", "soak"))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--model", type=pathlib.Path, help="of clients: what to serve; default a small random model")
    parser.add_argument("--device", default="cpu", help="of clients: as `riftco serve --device`")
    args = parser.parse_args(argv)
    if args.what == "soak" and (args.model or args.device != "cpu"):
        parser.error("a soak is of the small model on a CPU; --model and --device are options of clients")
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as name:
        here = pathlib.Path(name)
        model = args.model or small_model(here / "model")
        if args.what == "clients":
            with serving(model, here / "run", "--slots", str(args.slots), device=args.device) as server:
                result = asyncio.run(many_clients(server, args.clients, args.seconds))
        else:
            result = soaked(model, here / "run", args.seconds)
    if folder is not None:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        named = f"{time.strftime('%Y-%m-%d')}-serve-{args.what}.json"
        (pathlib.Path(folder) / named).write_text(json.dumps({**machine_columns(device), **result}, indent=1))
    for key, value in result.items():
        print(f"{key}: {value}")
    return 1 if result["errors"] else 0
