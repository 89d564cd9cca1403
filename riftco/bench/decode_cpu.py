"""Decode tokens/s of the scheduler on a CPU, compiled and in Python, on a real model as its file packs it.

`python bench/decode_cpu.py --weights packed bf16 --slots 1 8`. The replies of both are compared before anything is
reported. Where others use the machine, `best_tokens_s`, of the fastest window of steps, is what it can do.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import sys
from typing import Any

from ..models import Decoder, load_model, smollm2_path
from ..models.held import all_held
from ..serve import Engine
from . import timing
from .decode import decode, fill
from .engines import Wrong
from .machine import machine_columns
from .rows import append, file_of, line

COLUMNS = (
    "model", "weights", "cache", "slots", "context", "path", "tokens", "tokens_s", "best_tokens_s", "median_ms",
    "p10_ms", "p90_ms", "read_mib", "best_gb_s", "apart", "device", "machine", "date", "commit", "torch", "threads",
)  # fmt: skip
WINDOW = 8  # steps
PATHS = {"python": False, "compiled": True}


def same(replies: list[list[int]], want: list[list[int]]) -> str:
    """How many replies are token for token those of the other path, and where the first that is not parts."""
    where = [next((i for i, (a, b) in enumerate(zip(r, w)) if a != b), None) for r, w in zip(replies, want)]
    parted = [i for i in where if i is not None]
    return f"{len(parted)} of {len(want)} from token {min(parted)}" if parted else "0"


def read_bytes(model: Decoder, engine: Engine, context: int) -> int:
    """What a step must read: every weight but an embedding's other rows, and each slot's rows."""
    held = {t.data_ptr(): t.nbytes for t in all_held(model)}
    if not model.config.tie_word_embeddings:
        for t in all_held(model.model.embed_tokens):
            del held[t.data_ptr()]
    return sum(held.values()) + engine.cache.nbytes * context // engine.window


def run(args: argparse.Namespace, out: pathlib.Path) -> None:
    path = args.model or str(smollm2_path())
    for weights in args.weights:
        model, _ = load_model(path, weights=weights, with_tokenizer=False)
        for slots in args.slots:
            want: list[list[int]] | None = None
            for name in args.paths:
                engine = Engine(
                    model, slots=slots, window=args.context + args.tokens + 16, cache_dtype=args.cache,
                    compiled=PATHS[name],
                )  # fmt: skip
                replies, times = decode(fill(engine, args.context), args.context, args.tokens)
                apart = "" if want is None else same(replies, want)
                if apart not in ("", "0") and weights != "bf16":  # whose roundings make ties
                    raise Wrong(f"{weights}, {slots} slots: replies differ: {apart}")
                want = replies
                step, read = timing.summary([1e3 * t for t in times]), read_bytes(model, engine, args.context)
                best = min(sum(times[i : i + WINDOW]) / WINDOW for i in range(len(times) - WINDOW + 1))
                row: dict[str, Any] = {
                    "model": pathlib.Path(path).name, "weights": weights, "cache": args.cache, "slots": slots,
                    "context": args.context, "path": name, "tokens": slots * len(times),
                    "tokens_s": slots * len(times) / sum(times), "best_tokens_s": slots / best,
                    "median_ms": step.median_ms, "p10_ms": step.p10_ms, "p90_ms": step.p90_ms, "read_mib": read / 2**20,
                    "best_gb_s": read / best / 1e9, "apart": apart, "device": "cpu", **machine_columns("cpu"),
                }  # fmt: skip
                print(line(row, COLUMNS[1:15]), flush=True)
                append(out, COLUMNS, [row])
                del engine
                gc.collect()


def main(arguments: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    parser = argparse.ArgumentParser(
        prog="riftco bench decode-cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a GGUF file or a folder; default: the quickstart's SmolLM2-135M-Instruct")
    parser.add_argument("--weights", nargs="+", default=["packed"], help="packed, bf16, fp32")
    parser.add_argument("--cache", default="float16", help="float32, float16, bfloat16 or q8_0")
    parser.add_argument("--slots", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, default=64, help="tokens before the first that is timed")
    parser.add_argument("--tokens", type=int, default=64, help="timed steps")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--out", type=pathlib.Path, help="CSV; default <folder>/<date>-decode-smollm2-cpu.csv")
    args = parser.parse_args(arguments)
    if min(*args.slots, args.context) < 1 or args.tokens < WINDOW:
        parser.error(f"sizes are 1 or more, and {WINDOW} steps are timed at least")
    out = file_of(args.out, folder, "decode-smollm2-cpu")
    run(args, out)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
