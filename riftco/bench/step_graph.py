"""A training step eager, as a replayed CUDA graph and with compiled blocks: time, host time, launches and memory.

`python bench/step_graph.py` measures a small model's full step and QLoRA steps of the 8B shape. Before anything is
timed, each variant's losses over the same steps are compared with the eager ones. Compiled blocks are slow to compile:
they are measured where `--variants` names them.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ..adapters import LoraSpec, apply_lora
from ..data import TokenArrays, TokenLoader
from ..models import Decoder, DecoderConfig
from ..models.load import quantize_blocks
from ..optim import Adam
from ..train import Schedule, StepGraph, Trainer
from ..train.step_graph import CudaCapture
from . import timing
from .e2e import SIZES, random_model, step_ms
from .machine import machine_columns, reason_of
from .rows import append, file_of

# name -> (shape, method, rows, tokens of a row)
STEPS: dict[str, tuple[dict[str, Any], str, int, int]] = {
    "tiny": (SIZES["tiny"], "full", 2, 32),
    "small": ({**SIZES["smollm2-135m"], "num_hidden_layers": 8}, "full", 4, 128),
    "8b-4-layers": ({**SIZES["8b"], "num_hidden_layers": 4}, "qlora", 2, 2048),
    "8b-1x512": (SIZES["8b"], "qlora", 1, 512),
    "8b-2x4096": (SIZES["8b"], "qlora", 2, 4096),
}
BY_DEFAULT = ("small", "8b-1x512", "8b-2x4096")
VARIANTS = ("eager", "step graph", "compiled blocks")
RATE = 1e-4
CALLS = tuple(f"{api}{call}" for api in ("cuda", "cu") for call in ("Launch", "Memcpy", "Memset", "GraphLaunch"))
SAME = 2e-4  # of a replayed step's loss: outside of deterministic mode attention's backward adds dQ in any order
CHECKED = 6  # steps whose losses are compared; a graph replays from the third on
COLUMNS = (
    "step", "variant", "status", "why", "median_ms", "p10_ms", "p90_ms", "host_ms", "launches", "tokens_s", "steps",
    "peak_gib", "pool_gib", "extra_gib", "capture_s", "off_by", "dtype", "device", "machine", "date", "commit",
    "torch", "triton", "threads",
)  # fmt: skip


class Wrong(Exception):
    """A variant whose losses are not the eager ones is not timed."""


def trainer(step: str, variant: str, dtype: torch.dtype, device: str, steps: int) -> Trainer:
    """The same weights and batches for every variant."""
    shape, method, rows, length = STEPS[step]
    torch.manual_seed(0)
    config = DecoderConfig.from_hf(shape)
    model = random_model(lambda: Decoder(config), dtype, device)
    if method == "qlora":
        quantize_blocks(model)
        apply_lora(model, LoraSpec(rank=16, alpha=32), seed=0)
    if variant == "compiled blocks":
        for block in model.model.layers:
            block.compile()
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=RATE, gradient_clip=1.0)
    corpus = np.random.default_rng(0).integers(0, config.vocab_size, 8 * rows * length, dtype=np.int64)
    source = TokenLoader(TokenArrays(corpus), rows * length, 0, context=length)
    graph = StepGraph(model, optimizer, note=lambda text: None) if variant == "step graph" else None
    schedule = Schedule(RATE, steps, "constant")
    return Trainer(model, optimizer, source, schedule, device=device, step_graph=graph)


def measure(
    step: str, variant: str, options, dtype: torch.dtype, eager: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The row of one variant. Raises Wrong where its losses are not those of the `eager` row."""
    device = options.device
    made = trainer(step, variant, dtype, device, CHECKED + 2 + 2 * options.steps)
    losses, capture_s = checked(made)
    graph = made.step_graph
    if graph is not None and not graph.replayed:
        raise Wrong(graph.summary())
    off_by = max(abs(a - b) / abs(b) for a, b in zip(losses, eager["losses"] if eager else losses, strict=True))
    most = SAME if variant == "step graph" else 2e-2 if dtype == torch.bfloat16 else 1e-4
    if not off_by <= most:
        raise Wrong(f"its losses are off by {off_by:.1e} from the eager ones; {most:g} is accepted")
    pool = 0 if graph is None else graph.pool_bytes  # which the allocator counts as free
    peak = timing.peak_bytes(lambda: made.run(1), device) + timing.allocated(device) + pool  # a step's own is on top
    samples, _ = step_ms(made, options.steps)
    hosts = [host_ms(made, device) for _ in range(options.steps)]
    t, (_, _, rows, length) = timing.summary(samples), STEPS[step]
    return {
        "status": "ok", "median_ms": t.median_ms, "p10_ms": t.p10_ms, "p90_ms": t.p90_ms, "steps": t.launches,
        "host_ms": timing.summary(hosts).median_ms, "launches": launches(made) if device == "cuda" else 0,
        "tokens_s": 1e3 * rows * length / t.median_ms, "peak_gib": peak / 2**30, "pool_gib": pool / 2**30,
        "extra_gib": peak / 2**30 - eager["peak_gib"] if eager else 0.0, "capture_s": capture_s, "off_by": off_by,
        "losses": losses,
    }  # fmt: skip


def checked(made: Trainer) -> tuple[list[float], float]:
    """The losses that are compared, and the seconds that capturing took."""
    if made.step_graph is None:
        return [m.loss for m in made.run(CHECKED).metrics], 0.0
    seconds, real = 0.0, made.step_graph._begin

    def timed(*args):
        nonlocal seconds
        start = time.perf_counter()
        why = real(*args)
        seconds += time.perf_counter() - start
        return why

    with unittest.mock.patch.object(made.step_graph, "_begin", timed):
        return [m.loss for m in made.run(CHECKED).metrics], seconds


def launches(made: Trainer) -> int:
    """How often a step's host asks the GPU for something: a kernel, a copy, a whole graph."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        made.run(1)
        torch.cuda.synchronize()
    return count_launches(event.name() for event in profiled.profiler.kineto_results.events())


def count_launches(names: Iterable[str]) -> int:
    return sum(name.startswith(CALLS) for name in names)


def host_ms(made: Trainer, device: str) -> float:
    """What the host takes to queue forward and backward: a graph's is one launch and its key."""
    seconds = 0.0
    real = made._micro_batch

    def timed(*args):
        nonlocal seconds
        timing.wait(device)
        start = time.perf_counter()
        loss = real(*args)
        seconds += time.perf_counter() - start
        return loss

    with unittest.mock.patch.object(made, "_micro_batch", timed):
        made.run(1)
    return 1e3 * seconds


def run(options, write: Callable[[dict], None]) -> int:
    """All steps and variants; returns the exit status."""
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    common = {"dtype": str(dtype).removeprefix("torch."), "device": device, **machine_columns(device)}
    print(", ".join(f"{k} {v}" for k, v in common.items()))
    status = 0
    for step in options.only or BY_DEFAULT:
        eager: dict[str, Any] | None = None
        for variant in options.variants or VARIANTS[:2]:
            row: dict[str, Any]
            try:
                if variant == "step graph" and (why := CudaCapture().why_not(torch.device(device))):
                    row = {"status": "missing", "why": why}
                elif variant != "eager" and eager is None:
                    row = {"status": "missing", "why": "there are no eager losses to compare with"}
                else:
                    row = measure(step, variant, options, dtype, eager)
                    eager = eager or row
            except Wrong as wrong:
                row = {"status": "wrong", "why": str(wrong)}
            except Exception as failed:  # out of memory, for one; reported with its reason
                row = {"status": "failed", "why": reason_of(failed)}
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            print(show(step, variant, row), flush=True)
            write({**common, "step": step, "variant": variant, **row})
            expected = variant == "eager" or (variant == "step graph" and device == "cuda")
            status |= int(expected and row["status"] != "ok")
    return status


def show(step: str, variant: str, row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"  {step:12s} {variant:16s} {row['status']:>8s}  {row['why']}"
    return (
        f"  {step:12s} {variant:16s} step {row['median_ms']:.2f} ms ({row['p10_ms']:.2f}-{row['p90_ms']:.2f})  "
        f"host {row['host_ms']:.2f} ms  {row['launches']} launches  {row['tokens_s']:.0f} tokens/s  "
        f"peak {row['peak_gib']:.2f} GiB, {row['extra_gib']:+.2f} (pool {row['pool_gib']:.2f})  "
        f"captured in {row['capture_s']:.1f} s  losses off by {row['off_by']:.1e}"
    )


def main(argv: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    """The command; returns the exit status, 1 where a step of riftco is wrong or fails."""
    p = argparse.ArgumentParser(
        prog="riftco bench step-graph", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--only", nargs="*", choices=list(STEPS), help="these steps")
    p.add_argument("--variants", nargs="*", choices=VARIANTS, help="these variants, eager first")
    p.add_argument("--steps", type=int, default=20, help="timed steps")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", type=pathlib.Path, help="CSV, appended to; default <folder>/<date>-step_graph-<device>.csv")
    options = p.parse_args(argv)
    out = file_of(options.out, folder, f"step_graph-{options.device}")
    status = run(options, lambda row: append(out, COLUMNS, [row]))
    print(f"written to {out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
