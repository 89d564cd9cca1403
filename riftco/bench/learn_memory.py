"""What a learn takes beside the server's reservation, and beside a plain forward and backward of the same reply.

`python bench/learn_memory.py --size 4b --method nf4 --windows 8192 32768 --reply 512`. One slot is filled up to its
window, and a reply is learned behind it. A learn's gradients are compared with the plain ones before anything is timed.
What a recorded learn holds for itself (graph_mib) is part of its peak.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import sys
from typing import Any

import torch
from torch import Tensor

from ..serve import Engine
from . import timing
from .engines import (
    ADAPTER,
    LR,
    Wrong,
    device_of,
    graph_bytes,
    held_bytes,
    learning_engine,
    milliseconds,
    parser,
    plain_step,
    random_decoder,
    random_tokens,
    read,
)
from .machine import machine_columns, reason_of
from .rows import append, file_of, line

COLUMNS = (
    "size", "layers", "method", "cache", "slots", "window", "prefix", "reply", "chunk", "recompute", "status",
    "why", "weights_gib", "cache_gib", "reserved_gib", "learner_mib", "graph_mib", "adjoint_mib", "learn_peak_mib",
    "plain_peak_mib", "learn_ms", "gradients_ms", "plain_ms", "ratio", "first_loss", "last_loss", "cosine",
    "norm_ratio", "device", "machine", "date", "commit", "torch", "triton", "threads",
)  # fmt: skip
MIB, GIB = 2.0**20, 2.0**30


class Lesson:
    """A reply behind a prompt that slot 0 serves."""

    def __init__(self, engine: Engine, reply: int):
        self.engine, self.device = engine, engine.model.device
        self.prompt = random_tokens(engine, engine.window - reply, 1)
        self.reply = random_tokens(engine, reply, 2)
        self.prefix = len(self.prompt) - 1
        self.tokens = [self.prompt[-1], *self.reply[:-1]]
        read(engine, 0, self.prompt[: self.prefix])

    def learn(self, dry_run: bool = False):
        outcome = self.engine.learn(
            0, self.prefix, self.tokens, self.reply, adapter=ADAPTER, lr=LR, dry_run=dry_run
        )  # fmt: skip
        if not outcome.success:
            raise Wrong(f"a learn failed: {outcome.reason}")
        return outcome

    def gradients(self) -> float:
        """The learner's walk alone; gradients are left on the shadow."""
        bank, learner = self.engine.bank, self.engine.learner
        lesson = self.engine._lesson(0, self.prefix, self.tokens, self.reply, None)
        assert bank.shadow(ADAPTER)
        return float(learner._gradients([lesson], ADAPTER, len(self.reply)))

    def plain(self) -> float:
        """One graph over the whole reply: what a learn is measured against; gradients are left on the shadow."""
        return plain_step(self.engine, self.prefix, self.tokens, self.reply)

    def taken(self) -> Tensor:
        """The gradients on the shadow, which are taken off it."""
        shadow = self.engine.bank.shadow(ADAPTER).values()
        found = torch.cat([p.grad.flatten().double() for p in shadow if p.grad is not None])
        for p in shadow:
            p.grad = None
        return found


def agreement(lesson: Lesson) -> dict[str, float]:
    """Cosine and norm ratio of a learn's gradients to the plain ones."""
    for _ in range(2):  # the third time they are recorded, where they are at all
        lesson.gradients()
        lesson.taken()
    losses = [lesson.gradients()]
    ours = lesson.taken()
    losses.append(lesson.plain())
    plain = lesson.taken()
    cosine = float(torch.nn.functional.cosine_similarity(ours, plain, dim=0))
    ratio = float(ours.norm() / plain.norm())
    allowed = 1e-4 if lesson.engine.model.dtype == torch.float32 else 1e-2  # 16-bit activations are rounded in both
    if not (cosine > 1 - allowed and abs(ratio - 1) < 5 * allowed and abs(losses[0] / losses[1] - 1) < allowed):
        raise Wrong(f"gradients differ from one graph's: cosine {cosine}, norms {ratio}, losses {losses}")
    return {"cosine": cosine, "norm_ratio": ratio}


def measure(engine: Engine, reply: int, repeats: int) -> dict[str, Any]:
    """A row of one window."""
    device, kind = engine.model.device, engine.model.device.type
    lesson = Lesson(engine, reply)
    reserved = timing.allocated(kind)  # what serving alone holds
    right = agreement(lesson)
    first = lesson.learn().loss_before  # the shadow, its optimizer and its journal are there from now on
    assert first is not None

    def plain() -> None:
        lesson.plain()
        lesson.taken()

    def gradients() -> None:
        lesson.gradients()
        lesson.taken()

    losses, learner = [first], timing.allocated(kind) - reserved
    peak = timing.peak_bytes(lambda: losses.append(lesson.learn().loss_before), kind) + graph_bytes(engine)
    plain_peak = timing.peak_bytes(plain, kind)
    times = {
        "learn_ms": milliseconds(lambda: losses.append(lesson.learn().loss_before), device, repeats),
        "gradients_ms": milliseconds(gradients, device, repeats), "plain_ms": milliseconds(plain, device, repeats),
    }  # fmt: skip
    if not losses[-1] < first:
        raise Wrong(f"the loss does not fall over learns of one reply: {losses}")
    return {
        "status": "ok", "prefix": lesson.prefix, "reserved_gib": reserved / GIB, "learner_mib": learner / MIB,
        "graph_mib": graph_bytes(engine) / MIB,
        "adjoint_mib": held_bytes(engine, reply) / MIB, "learn_peak_mib": peak / MIB,
        "plain_peak_mib": plain_peak / MIB, "ratio": times["learn_ms"] / times["plain_ms"],
        "first_loss": first, "last_loss": losses[-1], **times, **right,
    }  # fmt: skip


def run(args: argparse.Namespace, out: pathlib.Path) -> int:
    """All windows; returns the exit status."""
    device, model = device_of(args), random_decoder(args)
    weights, status = timing.allocated(device), 0
    for window in args.windows:
        engine = learning_engine(
            model,
            slots=args.slots,
            window=window,
            cache_dtype=args.cache,
            chunk=args.chunk,
            learn_chunk=args.chunk,
            recompute=args.recompute,
            learn_graphs=not args.no_graphs,
        )
        try:
            measured = measure(engine, args.reply, args.repeats)
        except Wrong as wrong:
            measured = {"status": "wrong", "why": str(wrong)}
        except Exception as failed:  # out of memory, for one; reported with its reason
            measured = {"status": "failed", "why": reason_of(failed)}
        row = dict.fromkeys(COLUMNS, "") | {
            "size": args.size, "layers": model.config.num_layers, "method": args.method, "cache": args.cache,
            "slots": args.slots, "window": window, "reply": args.reply, "chunk": args.chunk,
            "recompute": args.recompute, "weights_gib": weights / GIB, "cache_gib": engine.cache.nbytes / GIB,
            "device": device, **machine_columns(device), **measured,
        }  # fmt: skip
        print(line(row, COLUMNS[:28]), flush=True)
        append(out, COLUMNS, [row])
        status |= int(row["status"] != "ok")
        del engine
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return status


def main(arguments: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    options = parser("learn-memory", __doc__, cache="float16")
    options.add_argument("--slots", type=int, default=1)
    options.add_argument("--windows", type=int, nargs="+", default=[96], help="rows of a slot, the reply's among them")
    options.add_argument("--reply", type=int, default=16)
    options.add_argument("--chunk", type=int, default=512)
    options.add_argument("--recompute", action="store_true", help="run each block again in a learn's backward")
    options.add_argument("--no-graphs", action="store_true", help="compute learns as they come")
    options.add_argument("--repeats", type=int, default=3, help="of what is timed")
    args = options.parse_args(arguments)
    if min(args.slots, args.reply, args.chunk, args.repeats) < 1 or min(args.windows) <= args.reply:
        options.error("sizes are 1 or more, and a window is larger than the reply")
    out = file_of(args.out, folder, f"learn-memory-{device_of(args)}")
    status = run(args, out)
    print(f"written to {out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
