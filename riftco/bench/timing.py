"""Launches interleaved in rotating order with cold caches, without the host's own time, peak bytes, roofs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

WARM_UP = 3
CYCLES_PER_MS = 2_000_000  # of a GPU's clock, the fastest
LONGEST_HOLD_MS = 20.0


@dataclass(frozen=True)
class Time:
    median_ms: float
    p10_ms: float
    p90_ms: float
    launches: int


def summary(samples_ms: list[float]) -> Time:
    ordered = sorted(samples_ms)
    last = len(ordered) - 1
    return Time(statistics.median(ordered), ordered[round(last * 0.1)], ordered[round(last * 0.9)], len(ordered))


class Flush:
    """Evicts what an earlier launch left in the caches, by writing more than they hold."""

    def __init__(self, device: str):
        self.buffer = torch.empty((256 if device == "cuda" else 64) << 20, dtype=torch.int8, device=device)

    def __call__(self) -> None:
        self.buffer.zero_()


def wait(device: torch.device | str) -> None:
    """Until the device has done what it was asked for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device | str) -> int:
    """Bytes that torch's allocator has given out; 0 on a CPU."""
    return torch.cuda.memory_allocated() if torch.device(device).type == "cuda" else 0


def interleaved(
    functions: Mapping[str, Callable[[], object]], device: str, seconds: float, least: int = 5, most: int = 100,
    held: Mapping[str, float] | None = None,
) -> dict[str, Time]:  # fmt: skip
    """Each function's times; in every round each one is launched once, the first of the round rotating.

    Args:
        functions: name -> what is timed.
        device: "cpu" or "cuda".
        seconds: about how long all rounds together may take; at least `least` rounds run.
        held: name -> milliseconds for which the GPU waits before each launch, so that the host has queued all of the
            work before the clock starts. A function that itself waits for the GPU is not helped by this.
    """
    names, flush, held = list(functions), Flush(device), held or {}

    def once(name: str) -> float:
        return _once(functions[name], flush, device, held.get(name, 0.0))

    start = time.perf_counter()
    for name in names:
        once(name)
    rounds = max(least, min(most, int(seconds / max(time.perf_counter() - start, 1e-9))))
    for _ in range(min(WARM_UP, rounds) - 1):
        for name in names:
            once(name)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            samples[name].append(once(name))
    return {name: summary(times) for name, times in samples.items()}


def _once(function: Callable[[], object], flush: Flush, device: str, hold_ms: float) -> float:
    """Milliseconds of one launch with cold caches."""
    flush()
    if hold_ms:
        torch.cuda._sleep(int(CYCLES_PER_MS * hold_ms))
    if device != "cuda":
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def host_ms(function: Callable[[], object]) -> float:
    """How long the host takes to launch `function`'s work on an idle GPU; all of the work, where it waits for it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    passed = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    return passed


def held_for(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """`held` of `interleaved`: twice what the host needed to launch each function, at most LONGEST_HOLD_MS."""
    return {n: min(LONGEST_HOLD_MS, 2 * min(host_ms(f) for _ in range(WARM_UP))) for n, f in functions.items()}


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """The most bytes that torch's allocator held at once during a call, above what it held before; on a CPU with one
    thread, as the profiler sees no other."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            function()
    finally:
        torch.set_num_threads(threads)
    events = profile.profiler.kineto_results.events()
    live = most = 0
    for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += size
        most = max(most, live)
    return most


def roofs(device: str, dtype: torch.dtype, seconds: float = 0.5) -> dict[str, float]:
    """What this machine reaches at best: copy_gb_s, read + write of a large copy; matmul_tflop_s, a square matmul."""
    size, side = (1 << 30, 8192) if device == "cuda" else (128 << 20, 1024)
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times = interleaved({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, device, seconds)
    return {
        "copy_gb_s": 2 * size / times["copy"].median_ms / 1e6,
        "matmul_tflop_s": 2 * side**3 / times["matmul"].median_ms / 1e9,
    }
