"""Decode tokens/s of the scheduler, with CUDA graphs and without, beside what reading weights and rows once allows.

`python bench/decode.py --size 8b --slots 1 8 32 --contexts 512 8192`. The replies of both are compared before anything
is timed.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import sys
import time
from typing import Any

import torch

from ..models import Decoder
from ..nn import Embedding, NF4Linear
from ..serve import Engine, Request, Scheduler
from . import timing
from .engines import Wrong, device_of, parser, random_decoder, random_tokens
from .machine import machine_columns, reason_of
from .rows import append, file_of, line

COLUMNS = (
    "size", "layers", "method", "cache", "slots", "context", "graphs", "status", "why", "tokens", "tokens_s",
    "median_ms", "p10_ms", "p90_ms", "kernels", "kernels_a_layer", "kernels_ms", "read_gib", "bound_tokens_s",
    "of_bound", "device", "machine", "date", "commit", "torch", "triton", "threads",
)  # fmt: skip
PROFILE = (*COLUMNS[:7], "kernel", "us", "launches", *COLUMNS[-7:])
WARM_UP = 8  # steps before anything is timed; within them graphs are captured
GRAPHS = {"off": False, "on": True}


def fill(engine: Engine, context: int) -> Scheduler:
    """A scheduler whose slots have all read one prompt of `context` tokens; all but the first borrow its rows."""
    scheduler, prompt = Scheduler(engine), random_tokens(engine, context)
    for slot in engine.slots:
        scheduler.submit(Request(prompt, max_new_tokens=1, slot=slot.id))
        scheduler.run()
    return scheduler


def decode(scheduler: Scheduler, context: int, tokens: int) -> tuple[list[list[int]], list[float]]:
    """(each slot's reply, seconds of each step after the warm-up)."""
    engine, times = scheduler.engine, []
    prompt = random_tokens(engine, context)
    # a last token of its own, so that replies differ
    own = [[*prompt[:-1], (prompt[-1] + slot.id) % engine.model.config.vocab_size] for slot in engine.slots]
    tickets = [scheduler.submit(Request(p, max_new_tokens=tokens + WARM_UP, slot=i)) for i, p in enumerate(own)]
    for _ in range(WARM_UP):
        scheduler.step()
    while scheduler.turns:
        began = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - began)
    return [t.tokens for t in tickets], times


def kernels(scheduler: Scheduler, context: int) -> dict[str, tuple[float, int]]:
    """Kernels, copies and fills of one decode step, replayed ones too: name -> (microseconds, launches)."""
    prompt = random_tokens(scheduler.engine, context)
    for slot in scheduler.engine.slots:
        scheduler.submit(Request(prompt, max_new_tokens=WARM_UP, slot=slot.id))
    scheduler.step()
    scheduler.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        scheduler.step()
        torch.cuda.synchronize()
    scheduler.run()
    found: dict[str, tuple[float, int]] = {}
    for event in profile.events():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            us, launches = found.get(event.name, (0.0, 0))
            found[event.name] = us + event.device_time, launches + 1
    return found


def recorded(engine: Engine) -> str:
    """Whether steps were replayed; where not, why."""
    if engine.decoding is None:
        return "off: no GPU"
    return f"off: {engine.decoding.off}" if engine.decoding.off else "on"


def read_bytes(model: Decoder, engine: Engine, context: int) -> int:
    """What a step must read: every weight, as kernels read it, but the embedding's other rows; and each slot's rows."""
    held: dict[int, int] = {}
    for module in model.modules():
        tensors: list[torch.Tensor] = list(module.parameters(recurse=False))
        if isinstance(module, NF4Linear):
            tensors += [module.weight.codes, module.weight.scale]
        if not isinstance(module, Embedding) or model.config.tie_word_embeddings:
            held |= {t.data_ptr(): t.nbytes for t in tensors}
    return sum(held.values()) + engine.cache.nbytes * context // engine.window


def measure(engine: Engine, args: argparse.Namespace, context: int, bandwidth: float, want: list) -> dict[str, Any]:
    """A row; `want` holds the replies of the run before it, if there was one, and then this one's."""
    scheduler = fill(engine, context)
    replies, times = decode(scheduler, context, args.tokens)
    if want and replies != want:
        different = sum(a != b for a, b in zip(replies, want))
        raise Wrong(f"{different} of {len(want)} replies differ from the steps before")
    want[:] = replies
    step, slots = timing.summary([1e3 * t for t in times]), len(engine.slots)
    read = read_bytes(engine.model, engine, context)
    row: dict[str, Any] = {
        "status": "ok", "tokens": slots * len(times), "tokens_s": slots * len(times) / sum(times),
        "median_ms": step.median_ms, "p10_ms": step.p10_ms, "p90_ms": step.p90_ms, "read_gib": read / 2**30,
        "bound_tokens_s": slots * bandwidth / read,
    }  # fmt: skip
    row["of_bound"] = row["tokens_s"] / row["bound_tokens_s"]
    if engine.model.device.type == "cuda":
        found = kernels(scheduler, context)
        row["kernels"] = sum(launches for _, launches in found.values())
        row["kernels_a_layer"] = row["kernels"] / engine.model.config.num_layers
        row["kernels_ms"] = sum(us for us, _ in found.values()) / 1e3
        row["profile"] = found
    return row


def run(args: argparse.Namespace, out: pathlib.Path) -> int:
    """All rows; returns the exit status."""
    device, model = device_of(args), random_decoder(args)
    bandwidth = 1e9 * timing.roofs(device, torch.bfloat16 if device == "cuda" else torch.float32)["copy_gb_s"]
    common = {
        "size": args.size, "layers": model.config.num_layers, "method": args.method, "cache": args.cache,
        "device": device, **machine_columns(device),
    }  # fmt: skip
    status = 0
    for context in args.contexts:
        for slots in args.slots:
            want: list[list[int]] = []
            for graphs in args.graphs:
                engine = Engine(
                    model, slots=slots, window=context + args.tokens + WARM_UP + 1, cache_dtype=args.cache,
                    cuda_graphs=GRAPHS[graphs],
                )  # fmt: skip
                try:
                    row = measure(engine, args, context, bandwidth, want)
                except Wrong as wrong:
                    row = {"status": "wrong", "why": str(wrong)}
                except Exception as failed:  # out of memory, for one; reported with its reason
                    row = {"status": "failed", "why": reason_of(failed)}
                row = dict.fromkeys(COLUMNS, "") | common | row
                row |= {"slots": slots, "context": context, "graphs": recorded(engine)}
                print(line(row, COLUMNS[:20]), flush=True)
                append(out, COLUMNS, [row])
                if args.profile:
                    each = sorted(row.get("profile", {}).items(), key=lambda item: -item[1][0])
                    named = [row | {"kernel": name, "us": us, "launches": n} for name, (us, n) in each]
                    append(args.profile, PROFILE, named)
                status |= int(row["status"] != "ok")
                del engine
                gc.collect()
    return status


def main(arguments: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    options = parser("decode", __doc__, cache="bfloat16")
    options.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    options.add_argument("--contexts", type=int, nargs="+", default=[64])
    options.add_argument("--tokens", type=int, default=64, help="timed steps")
    options.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    options.add_argument("--profile", type=pathlib.Path, help="CSV of the kernels of one step of each row, on a GPU")
    args = options.parse_args(arguments)
    if min(*args.slots, *args.contexts, args.tokens) < 1:
        options.error("sizes are 1 or more")
    out = file_of(args.out, folder, f"decode-{device_of(args)}")
    status = run(args, out)
    print(f"written to {out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
