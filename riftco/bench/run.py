"""Times ops against their peers: `riftco bench ops [op ...] [--device cpu|cuda] [--out results.csv]`.

For each case riftco and every peer are first held against the spec in float64, on the case's own options with fewer
rows; who is wrong is refused and not timed, and where riftco is wrong nothing of that op is timed. Emulated devices
report correctness and bytes, never speed.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import datetime
import importlib
import importlib.util
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from riftco.kernels import ROOMS, _check, _contract
from riftco.kernels._cases import Case

from . import timing
from .machine import machine_columns, reason_of
from .peers import Peer, peers_of

# Peers round where they like, and torch's own float32 is up to a hundred budgets off where p - 1 cancels: with these
# multiples of the budget a result that is off by a per mille (float32) or a few per cent (16 bit) is still refused.
PEER_SLACK = {torch.float32: 1000.0, torch.float16: 10.0, torch.bfloat16: 4.0}
# what the spec in float64 may cost on the rows on which a case is checked
CHECK_FLOPS = {"cpu": 5e8, "cuda": 2e11}
CHECK_BYTES = {"cpu": 1e8, "cuda": 2e9}
PASSES = ("forward", "backward", "forward+backward")
ROW_DIMS = ("B", "T", "S", "M")
COLUMNS = (
    "op", "case", "shape", "dtype", "device", "pass", "peer", "status", "why", "median_ms", "p10_ms", "p90_ms",
    "launches", "eager_ms", "tflop_s", "gb_s", "peak_bytes", "grad_bytes", "max_error", "roof_copy_gb_s",
    "roof_matmul_tflop_s", "machine", "date", "commit", "torch", "triton", "threads",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Where the bench runs: the device of the tensors, the implementation asked for, whether times mean anything."""

    name: str
    torch_device: str
    impl: str | None = None
    timed: bool = True


TARGETS = {
    t.name: t
    for t in (
        Target("cpu", "cpu"),
        Target("cuda", "cuda"),
        Target("cpu-triton", "cpu", "triton", timed=False),
        Target("mps-emulated", "cpu", "metal", timed=False),
    )
}


@dataclass
class Entry:
    """One competitor in one case."""

    name: str
    call: Callable | None
    status: str  # "ok", "missing", "wrong" or "failed"
    why: str = ""
    max_error: float | None = None
    overwrites: bool = False


def cases_of(op: str):
    return importlib.import_module(f"riftco.kernels.{op}.cases")


def scaled(cases, case: Case, scale: int) -> Case:
    """The case with its rows divided by `scale`, at least 16 of them. A case whose options hold tuples (documents,
    shapes of masks) keeps its rows, unless its room says how they follow: `resized`."""
    shape = dict(case.shape)
    resized = getattr(cases, "resized", _same_options)
    while scale > 1:
        largest = max((shape[d] for d in ROW_DIMS if d in shape), default=1)
        if largest < 32:
            break
        for d in ROW_DIMS:  # T and S shrink together
            if shape.get(d) == largest:
                shape[d] = largest // 2
        scale //= 2
    return resized(case, shape)


def _same_options(case: Case, shape: dict[str, int]) -> Case:
    fixed = any(isinstance(v, tuple) for v in case.options.values())
    return case if fixed else dataclasses.replace(case, shape=shape)


def small(cases, case: Case, device: str) -> Case:
    """The case with so few rows that the spec in float64 takes no longer than the bench itself."""

    flops = getattr(cases, "spec_flops", cases.flops)

    def heavy(c: Case) -> bool:
        return flops(c) > CHECK_FLOPS[device] or cases.bytes_moved(c, torch.float64) > CHECK_BYTES[device]

    while heavy(case) and (fewer := scaled(cases, case, 2)).shape != case.shape:
        case = fewer
    return case


class Truth:
    """What one case must give: its results in float64 and float32."""

    def __init__(self, cases, case: Case, dtype: torch.dtype, device: str):
        self.cases, self.case, self.dtype, self.device = cases, case, dtype, device
        self.loss = _check.loss_on(device)
        self.inputs = _check.inputs_of(cases, case, dtype, 0, device)
        self.oracle, self.near = (self._run(cases.reference, d) for d in (torch.float64, torch.float32))

    def _run(self, call: Callable, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = _check.to(self.inputs, dtype, self.device)
        trained = getattr(self.cases, "TRAINED", None)  # peers' other outputs have no gradient
        return _check.outputs_and_grads(call, self.cases, self.case, inputs, trained, self.device)

    def error_of(self, call: Callable, slack: float = 1.0) -> float:
        """The largest error of a call over the largest value; it may leave outputs out. Raises OutOfBudget."""
        got = self._run(call, self.dtype)
        if unknown := got.keys() - self.oracle.keys():
            raise _check.OutOfBudget(f"unknown outputs {sorted(unknown)}")
        if not any(t.is_floating_point() for t in got.values()):
            raise _check.OutOfBudget("no outputs")
        roundings = self.cases.ROUNDINGS
        return max(
            _check.within_budget(n, t, self.oracle[n], self.near[n], self.dtype, roundings.get(n, 0), slack, self.loss)
            for n, t in got.items()
        )


def entries(cases, case: Case, peers: tuple[Peer, ...], dtype: torch.dtype, target: Target) -> Iterator[Entry]:
    """riftco, then its peers, each checked."""
    device = target.torch_device
    truth = Truth(cases, small(cases, case, device), dtype, device)
    for peer in (None, *peers):
        name = "riftco" if peer is None else peer.name
        if peer is not None and (reason := peer.missing(device, case)):
            yield Entry(name, None, "missing", reason)
            continue
        try:
            call = cases.call if peer is None else peer.make(cases)
            with _contract.implementation(target.impl if peer is None else None):
                error = truth.error_of(call, 1.0 if peer is None else PEER_SLACK[dtype])
            yield Entry(name, call, "ok", max_error=error, overwrites=peer is not None and peer.overwrites)
        except _check.OutOfBudget as wrong:
            yield Entry(name, None, "wrong", str(wrong))
        except Exception as failed:  # a peer may fail in any way; it is reported with its reason
            yield Entry(name, None, "failed", reason_of(failed))


def red_cases(cases, target: Target, dtype: torch.dtype) -> list[str]:
    """The conformance check of the room on its own cases: what fails, with the reason."""
    red = []
    for case in cases.CASES:
        try:
            truth = Truth(cases, case, dtype, target.torch_device)
            with _contract.implementation(target.impl):
                truth.error_of(cases.call)
        except Exception as failed:  # whatever it is, the op is red
            red.append(f"{case.name}: {reason_of(failed)}")
    return red


def passes_of(cases, call: Callable, case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed: the forward without gradients and, where the op has gradients, forward + backward; where the room
    says what part of its work the forward is, also the backward alone, of one forward again and again."""

    def forward() -> object:
        with torch.no_grad():
            return call(inputs, case)

    leaves = [inputs[k] for k in _check.leaves_of(cases, inputs)]
    if not leaves:
        return {"forward": forward}
    upstream: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}

    def run() -> dict[str, Tensor]:
        found = call(inputs, case)
        out = {k: v for k, v in found.items() if k in getattr(cases, "TRAINED", found) and v.requires_grad}
        for k, v in out.items():
            if k not in upstream:  # a loss gets 1, as from .backward(); all else random numbers
                upstream[k] = torch.randn_like(v) if v.dim() else torch.ones_like(v)
        return out

    def gradients(out: dict[str, Tensor], **how) -> object:
        return torch.autograd.grad(list(out.values()), leaves, [upstream[k] for k in out], **how)

    def backward() -> object:
        if not kept:
            kept.update(run())
        return gradients(kept, retain_graph=True)

    alone = {"backward": backward} if hasattr(cases, "forward_flops") else {}
    return {"forward": forward, **alone, "forward+backward": lambda: gradients(run())}


def bench_case(
    cases, case: Case, peers: tuple[Peer, ...], dtype: torch.dtype, target: Target, seconds: float,
    only: list[str] | None = None,
):  # fmt: skip
    """Rows (dicts without the columns of the machine) of one case, of the passes named in `only`, by default all."""
    device = target.torch_device
    found = list(entries(cases, case, peers, dtype, target))
    ready = [e for e in found if e.status == "ok"]

    def fresh() -> dict[str, Tensor]:
        made = _check.to(_check.inputs_of(cases, case, dtype, 0, device), dtype, device)
        return {k: v.requires_grad_() if k in cases.GRADS else v for k, v in made.items()}

    shared = fresh()
    grad_bytes = sum(shared[k].nbytes for k in _check.leaves_of(cases, shared))
    calls = {e.name: passes_of(cases, e.call, case, fresh() if e.overwrites else shared) for e in ready if e.call}
    red = found[0].status != "ok"
    passes = list(next(iter(calls.values()), {"forward": None}))
    wanted = [p for p in passes if only is None or p in only]
    for which in wanted[-1:] if red else wanted:
        runnable: dict[str, Callable[[], object]] = {}
        peaks: dict[str, int] = {}
        broken: dict[str, str] = {}
        for e in ready:
            with _contract.implementation(target.impl if e.name == "riftco" else None):
                try:
                    calls[e.name][which]()  # compiles, tunes
                    peaks[e.name] = timing.peak_bytes(calls[e.name][which], device)
                    runnable[e.name] = calls[e.name][which]
                except Exception as failed:  # out of memory at the full size, for one
                    broken[e.name] = reason_of(failed)
        times: dict[str, timing.Time] = {}
        eager: dict[str, timing.Time] = {}
        if target.timed and not red:
            eager = timing.interleaved(runnable, device, seconds)
            times = eager
            if device == "cuda":
                times = timing.interleaved(runnable, device, seconds, held=timing.held_for(runnable))
        for e in found:
            row: dict[str, Any] = {"pass": which, "peer": e.name, "status": e.status, "why": e.why}
            row["max_error"] = e.max_error
            if e.name in broken:
                row.update(status="failed", why=broken[e.name])
            elif e.name in runnable:
                row["peak_bytes"] = peaks[e.name]
                row["grad_bytes"] = 0 if which == "forward" else grad_bytes
                row.update(_times(e.name, eager, times))
                row.update(_rates(cases, case, dtype, which, which == passes[-1], row.get("median_ms")))
                if red:
                    row["why"] = "not timed: riftco is wrong here"
                elif not target.timed:
                    row["why"] = "not timed: emulated"
            yield row


def _times(name: str, eager, times) -> dict[str, Any]:
    """Of the GPU's work, and `eager_ms` of a launch on an idle GPU, which waits for the host besides."""
    if name not in times:
        return {}
    t = times[name]
    return {
        "median_ms": t.median_ms, "p10_ms": t.p10_ms, "p90_ms": t.p90_ms, "launches": t.launches,
        "eager_ms": eager[name].median_ms,
    }  # fmt: skip


def _rates(cases, case: Case, dtype: torch.dtype, which: str, whole: bool, ms: float | None) -> dict[str, float]:
    """flops and bytes_moved count all that the op does, forward_flops the forward's share."""
    if ms is None:
        return {}
    if whole:
        return {"tflop_s": cases.flops(case) / ms / 1e9, "gb_s": cases.bytes_moved(case, dtype) / ms / 1e6}
    if not hasattr(cases, "forward_flops"):
        return {}
    forward = cases.forward_flops(case)
    return {"tflop_s": (forward if which == "forward" else cases.flops(case) - forward) / ms / 1e9}


def show(row: dict[str, Any]) -> str:
    ms = f"{row['median_ms']:10.3f} ms" if row.get("median_ms") is not None else f"{row['status']:>13s}"
    timed = row.get("median_ms") is not None
    between = f"({row['p10_ms']:.3f}-{row['p90_ms']:.3f})" if timed else ""
    spread = f" {between:18s}" if timed else ""
    rates = (("tflop_s", "TFLOP/s"), ("gb_s", "GB/s"))
    said = (f"{row[n]:9.4g} {unit}" if row.get(n) is not None else "" for n, unit in rates)
    rate = "".join(f" {text:{10 + len(unit)}s}" for text, (_, unit) in zip(said, rates)) if timed else ""
    peak = f" peak {row['peak_bytes'] / 2**20:9.1f} MiB" if row.get("peak_bytes") is not None else ""
    why = f"  {row['why']}" if row.get("why") else ""
    return f"  {row['pass']:17s} {row['peer']:14s} {ms}{spread}{rate}{peak}{why}"


def bench(ops, target: Target, dtype: torch.dtype, options, write: Callable[[dict], None]) -> int:
    """Run the ops; returns how many of them are red."""
    roofs = timing.roofs(target.torch_device, dtype) if target.timed else {}
    common = {
        **machine_columns(target.torch_device),
        "dtype": str(dtype).removeprefix("torch."),
        "device": target.name,
        "roof_copy_gb_s": roofs.get("copy_gb_s"),
        "roof_matmul_tflop_s": roofs.get("matmul_tflop_s"),
    }
    print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in common.items() if v))
    red = 0
    for op in ops:
        cases = cases_of(op)
        if failures := red_cases(cases, target, dtype):
            red += 1
            print(f"{op}: RED, nothing is timed")
            for text in failures:
                print(f"  {text}")
            write({**common, "op": op, "peer": "riftco", "status": "red", "why": "; ".join(failures)})
            continue
        peers = tuple(p for p in peers_of(op) if options.peers is None or p.name in options.peers)
        for full in selected(cases, options):
            case = scaled(cases, full, options.scale)
            shape = " ".join(f"{k}{v}" for k, v in case.shape.items())
            print(f"{op}: {case.name}, {shape}, {common['dtype']}")
            named = {"op": op, "case": case.name, "shape": shape}
            size = cases.bytes_moved(case, torch.float64)
            if cases.flops(case) > options.max_gflop * 1e9 or size > options.max_gb * 1e9:
                why = f"{cases.flops(case) / 1e9:.0f} GFLOP, {size / 1e9:.1f} GB in float64: above the limits"
                print(f"  skipped: {why}")
                write({**common, **named, "peer": "riftco", "status": "skipped", "why": why})
                continue
            wrong = False
            for row in bench_case(cases, case, peers, dtype, target, options.seconds, options.passes):
                wrong |= row["peer"] == "riftco" and row["status"] != "ok"
                print(show(row), flush=True)
                write({**common, **named, **row})
            red += wrong
    return red


def selected(cases, options) -> list[Case]:
    """The cases asked for."""
    every = cases.CASES if options.cases == "tests" else cases.BENCH
    named = [c for c in every if options.only is None or any(o in c.name for o in options.only)]
    return [c for c in named if not any(o in c.name for o in options.without)]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="riftco bench ops", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("ops", nargs="*", help=f"of {', '.join(ROOMS)}; none: all")
    p.add_argument("--device", choices=list(TARGETS), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on cuda, else float32"
    )
    p.add_argument("--cases", choices=["bench", "tests"], default="bench", help="which of the room's cases")
    p.add_argument("--only", nargs="*", help="only cases whose name holds one of these")
    p.add_argument("--without", nargs="*", default=[], help="no case whose name holds one of these")
    p.add_argument("--passes", nargs="*", choices=PASSES, help="only these passes")
    p.add_argument("--scale", type=int, help="divide the rows of each case; default 1 on cuda, else 32")
    p.add_argument("--peers", nargs="*", help="only these peers")
    p.add_argument("--seconds", type=float, default=2.0, help="about how long one case and pass is timed")
    p.add_argument("--max-gflop", type=float, help="skip larger cases; default 100 but on cuda")
    p.add_argument("--max-gb", type=float, help="skip cases that move more in float64; default 1 but on cuda")
    p.add_argument(
        "--out", type=pathlib.Path, help="CSV file; default <folder>/<date>-<device>.csv, numbered after the first"
    )
    p.add_argument("--plot", action="store_true", help="write PNGs beside the CSV")
    return p


def unused(path: pathlib.Path) -> pathlib.Path:
    """This path, or the first of path-2, path-3, .. where nothing lies: the day's first rows are kept."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{n}") for n in itertools.count(2)))
    return next(p for p in names if not p.exists())


def main(argv: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    """The command; returns the exit status, 1 where an op is red."""
    p = parser()
    options = p.parse_args(argv)
    if unknown := [o for o in options.ops if o not in ROOMS]:
        p.error(f"unknown ops {', '.join(unknown)}; known: {', '.join(ROOMS)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        p.error("--plot needs matplotlib: pip install 'riftco[bench]'")  # said before the hours, not after them
    target = TARGETS[options.device]
    if target.torch_device == "cuda" and not torch.cuda.is_available():
        p.error("no CUDA device here")
    if target.impl == "metal":
        if importlib.util.find_spec("metal_emulator") is None:
            p.error("mps-emulated needs tests/ on PYTHONPATH: the emulator lives there")
        importlib.import_module("metal_emulator").install()
    gpu = target.torch_device == "cuda"
    options.scale = options.scale or (1 if gpu else 32)
    options.max_gflop = options.max_gflop or (float("inf") if gpu else 100.0)
    options.max_gb = options.max_gb or (float("inf") if gpu else 1.0)
    dtype = getattr(torch, options.dtype or ("bfloat16" if gpu else "float32"))
    out = options.out or unused(pathlib.Path(folder) / f"{datetime.date.today()}-{target.name}.csv")
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()

        def write(row: dict) -> None:
            writer.writerow(row)
            file.flush()  # what is measured survives a crash

        red = bench(options.ops or ROOMS, target, dtype, options, write)
    print(f"written to {out}")
    if options.plot:
        from .plot import plot, plot_memory

        for image in (*plot(out), *plot_memory(out)):
            print(f"written to {image}")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
