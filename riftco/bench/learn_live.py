"""Learning beside serving: what neighbours notice, what a learn takes, and that the loss falls. One run, off and on.

`python bench/learn_live.py --size 1b --method nf4 --slots 8 --prompt 2048 --reply 256`. Neighbours decode all the time;
one more slot serves the same turn once a period, and in every second period learns its reply. A period lasts until its
turn has ended, so that every learn falls into it; learning may take a tenth of the time, so give --seconds ten times
what a learn takes. Every period begins with neighbours that have read their prompts and said little yet. Before
anything is timed the neighbours' rows are compared, byte for byte, before and after a learn.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from ..serve import Request, Scheduler, Teach, Ticket
from ..serve.scheduler import LEARN_DUTY
from .engines import (
    ADAPTER,
    LR,
    SEED,
    device_of,
    graph_bytes,
    held_bytes,
    learning_engine,
    milliseconds,
    parser,
    plain_step,
    random_decoder,
    read,
)
from .machine import machine_columns
from .rows import append, file_of, line

OFF, AT_ONCE = "off", "back to back"
COLUMNS = (
    "size", "layers", "method", "cache", "slots", "prompt", "reply", "learning", "tokens", "tokens_s", "p50_ms",
    "p95_ms", "p99_9_ms", "longest_ms", "learns", "first_loss", "last_loss", "learn_ms", "plain_ms",
    "graph_mib", "adjoint_mib", "learn_peak_mib", "reserved_gib", "device", "machine", "date", "commit", "torch",
    "triton", "threads",
)  # fmt: skip


@dataclass
class Period:
    """What neighbours saw while learning was off, or on."""

    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    learn_ms: list[float] = field(default_factory=list)

    def learned(self, turn: Ticket) -> None:
        outcome = None if turn.finished is None else turn.finished.learn
        if outcome is None or outcome.loss_before is None:
            raise RuntimeError(f"a learn failed: {turn.finished}")
        self.losses.append(outcome.loss_before)
        self.learn_ms.append(outcome.ms)

    def row(self) -> dict[str, Any]:
        gaps = sorted(self.gaps)
        if not gaps:
            raise RuntimeError("no neighbour got two tokens in a period; give --seconds more")

        def at(share: float) -> float:
            return 1e3 * gaps[min(int(share * len(gaps)), len(gaps) - 1)]

        return {
            "tokens": len(gaps), "tokens_s": len(gaps) / self.seconds, "p50_ms": at(0.5), "p95_ms": at(0.95),
            "p99_9_ms": at(0.999), "longest_ms": 1e3 * gaps[-1], "learns": len(self.losses),
            "first_loss": self.losses[0] if self.losses else "", "last_loss": self.losses[-1] if self.losses else "",
            "learn_ms": statistics.median(self.learn_ms) if self.learn_ms else "",
        }  # fmt: skip


def build(args: argparse.Namespace):
    """An engine of random weights with an adapter that learns."""
    return learning_engine(
        random_decoder(args),
        slots=args.slots, window=args.prompt + args.reply + args.tokens + 1, cache_dtype=args.cache, chunk=args.chunk,
        recompute=args.recompute, learn_graphs=not args.no_graphs,
    )  # fmt: skip


class Live:
    """A scheduler whose neighbours' tokens are timed, step by step."""

    def __init__(self, engine, args: argparse.Namespace):
        self.engine, self.args = engine, args
        self.scheduler = Scheduler(engine)
        self.generator = torch.Generator().manual_seed(SEED)
        self.prompts = [self._random(args.prompt) for _ in range(1, args.slots)]
        self.prompt, self.reply = self._random(args.prompt), self._random(args.reply)
        self.neighbours: list[Ticket] = []
        self.begin()

    def begin(self) -> None:
        """Neighbours afresh, so that periods have rows of the same number, and no prompt is read in one alone."""
        for ticket in self.neighbours:
            ticket.cancel()
        self.neighbours = [self._ask(slot) for slot in range(1, self.args.slots)]
        while any(not t.tokens for t in self.neighbours):
            self.scheduler.step()
            for t in self.neighbours:
                if t.finished is not None and not t.tokens:
                    raise RuntimeError(f"a neighbour's prompt failed: {t.finished.error}")

    def _random(self, n: int) -> list[int]:
        return torch.randint(self.engine.model.config.vocab_size, (n,), generator=self.generator).tolist()

    def _ask(self, slot: int) -> Ticket:
        return self.scheduler.submit(Request(self.prompts[slot - 1], max_new_tokens=self.args.tokens, slot=slot))

    def run(self, seconds: float, learning: str, into: Period) -> None:
        """One turn, learned or not, while neighbours decode; at least so long, and until the turn has ended. "back to
        back" learns one turn after the other, and the scheduler does not hold them back for others."""
        self.begin()
        self.scheduler.duty.fraction = 1.0 if learning == AT_ONCE else LEARN_DUTY
        self.scheduler.duty.drop()  # of the period before
        began = time.perf_counter()
        ends = began + seconds
        last = {id(t): (began, len(t.tokens)) for t in self.neighbours}
        taught = self._turn(learning)
        while time.perf_counter() < ends or taught.finished is None:
            if taught.finished is not None and learning == AT_ONCE:
                into.learned(taught)
                taught = self._turn(learning)
            self.scheduler.step()
            now = time.perf_counter()
            for i, ticket in enumerate(self.neighbours):
                then, count = last.get(id(ticket), (now, 0))
                if len(ticket.tokens) > count:
                    if count:
                        into.gaps.append(now - then)
                    last[id(ticket)] = now, len(ticket.tokens)
                if ticket.finished is not None:  # its prompt's rows are there
                    self.neighbours[i] = self._ask(i + 1)
        into.seconds += time.perf_counter() - began
        if learning != OFF:
            into.learned(taught)

    def _turn(self, learning: str) -> Ticket:
        teach = None if learning == OFF else Teach(ADAPTER, LR, self.reply)
        return self.scheduler.submit(Request(self.prompt, max_new_tokens=4, slot=0, teach=teach))


def check(live: Live) -> None:
    """The neighbours' rows are the same bytes before and after a learn."""
    cache = live.engine.cache
    before = [cache.snapshot(slot) for slot in range(1, live.args.slots)]
    learn_once(live)
    for slot, saved in enumerate(before, 1):
        for (_, a), (_, b) in zip(saved.rows, cache.snapshot(slot).rows):
            if not all(torch.equal(s, t) for s, t in zip(a, b)):
                raise RuntimeError(f"a learn changed rows of slot {slot}")


def learn_once(live: Live) -> None:
    read(live.engine, 0, live.prompt)
    outcome = live.scheduler.learn(0, live.prompt, live.reply, ADAPTER, LR, dry_run=True)
    if not outcome.success:
        raise RuntimeError(f"a learn failed: {outcome.reason}")


def plain_ms(live: Live) -> float:
    """One forward and backward of the reply over the same cached rows: what a learn is measured against."""
    engine, n, fed = live.engine, len(live.prompt) - 1, [live.prompt[-1], *live.reply[:-1]]
    read(engine, 0, live.prompt)
    median = milliseconds(lambda: plain_step(engine, n, fed, live.reply), engine.model.device, repeats=3)
    for p in engine.bank.shadow(ADAPTER).values():
        p.grad = None
    return median


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    device, engine = device_of(args), build(args)
    live = Live(engine, args)
    check(live)
    common: dict[str, Any] = {
        "size": args.size, "layers": engine.model.config.num_layers, "method": args.method, "cache": args.cache,
        "device": device, "slots": args.slots, "prompt": args.prompt, "reply": args.reply,
        "adjoint_mib": held_bytes(engine, args.reply) / 2**20, "plain_ms": plain_ms(live),
        "graph_mib": "", "learn_peak_mib": "", "reserved_gib": "", **machine_columns(device),
    }  # fmt: skip
    if device == "cuda":
        learn_once(live)  # recorded from here on
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        learn_once(live)
        common["graph_mib"] = graph_bytes(engine) / 2**20
        common["learn_peak_mib"] = (torch.cuda.max_memory_allocated() - held + graph_bytes(engine)) / 2**20
        common["reserved_gib"] = held / 2**30
    periods = {learning: Period() for learning in (OFF, "on", *([AT_ONCE] if args.back_to_back else []))}
    for learning in periods:  # what both compile and record
        live.run(args.seconds / 4, learning, Period())
    for _ in range(args.periods):
        for learning, period in periods.items():
            live.run(args.seconds, learning, period)
    return [{**common, "learning": learning, **period.row()} for learning, period in periods.items()]


def main(arguments: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    options = parser("learn-live", __doc__, cache="float16")
    options.add_argument("--slots", type=int, default=4, help="the first one learns, the others are the neighbours")
    options.add_argument("--prompt", type=int, default=64)
    options.add_argument("--reply", type=int, default=16)
    options.add_argument("--tokens", type=int, default=128, help="of a neighbour's answer")
    options.add_argument("--chunk", type=int, default=512)
    options.add_argument("--recompute", action="store_true")
    options.add_argument("--back-to-back", action="store_true", help="periods of learn after learn, too")
    options.add_argument("--no-graphs", action="store_true", help="compute learns as they come")
    options.add_argument("--seconds", type=float, default=2.0, help="of a period, at least")
    options.add_argument("--periods", type=int, default=3, help="of each kind, taken in turns")
    args = options.parse_args(arguments)
    if args.slots < 2 or min(args.prompt, args.reply, args.tokens, args.periods) < 1:
        options.error("there are 2 slots or more, and sizes of 1 or more")
    rows = measure(args)
    for row in rows:
        print(line(row, COLUMNS[7:19]))
    out = file_of(args.out, folder, f"learn-live-{device_of(args)}")
    append(out, COLUMNS, rows)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
