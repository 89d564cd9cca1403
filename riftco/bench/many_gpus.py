"""What more GPUs give: tokens/s of adapters trained side by side, and a full fine-tune that one GPU has no room for.

`torchrun --nproc-per-node 2 bench/many_gpus.py speed --size 8b` trains QLoRA in the first process alone, then in all,
each with a micro-batch of the same size (one sum of the adapters' gradients a step), then with the 4-bit base cut over
them. `torchrun --nproc-per-node N bench/many_gpus.py full --size 3b --cap-gib 40` trains all weights, each process held
to so much memory: with one process whole, with more cut over them. The first loss must be ln V, what random weights
give, and the last one below it.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast: not every host allows it

import torch

from ..data import Batch, Geometry
from ..models import Decoder, DecoderConfig
from ..optim import Adam
from ..train import Ranks, Schedule, Trainer, TrainingMetric
from ..train.failures import out_of_memory
from ..train.sharding import Sharded
from .e2e import LLAMA, SIZES, random_model, riftco_model
from .machine import machine_columns, reason_of
from .rows import append, file_of

SHAPES: dict[str, dict[str, Any]] = {
    **SIZES,
    "3b": dict(
        **LLAMA, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
    ),
}  # fmt: skip
WARM_UP = 2
COLUMNS = (
    "case", "size", "layers", "processes", "batch", "seq", "checkpointing", "status", "why", "tokens_s", "median_ms",
    "steps", "times_one", "peak_gib", "first_loss", "last_loss", "cap_gib", "dtype", "device", "machine", "date",
    "commit", "torch", "triton", "threads",
)  # fmt: skip
LEARNING_RATE = 1e-4


class Repeated:
    """A source of micro-batches [batch, seq], each process's share a batch of its own, the same in every step."""

    def __init__(self, vocabulary: int, batch: int, seq: int, count: int):
        drawn = torch.Generator().manual_seed(0)
        self.batches, self.position = [], 0
        for _ in range(count):
            ids = torch.randint(0, vocabulary, (batch, seq + 1), generator=drawn)
            self.batches.append(
                Batch(
                    input_ids=ids[:, :-1].reshape(-1),
                    target=ids[:, 1:].reshape(-1),
                    geometry=Geometry.of([seq] * batch),
                    row_weight=None,
                    n_labelled=batch * seq,
                )
            )

    def next(self) -> Batch:
        self.position += 1
        return self.batches[(self.position - 1) % len(self.batches)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def train(model, form: str, ranks: Ranks, options, vocabulary: int) -> dict[str, Any]:
    """The row of a few steps with a micro-batch a process, in every process of `ranks`."""
    device = ranks.device
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], gradient_clip=1.0, state=form)
    steps = WARM_UP + options.steps
    trainer = Trainer(
        model,
        optimizer,
        Repeated(vocabulary, options.batch, options.seq, ranks.world),
        Schedule(LEARNING_RATE, steps, "constant"),
        accumulate=ranks.world,
        device=device,
        ranks=ranks,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    metrics: tuple[TrainingMetric, ...] = trainer.run().metrics
    first, last = metrics[0].loss, metrics[-1].loss
    expected = math.log(vocabulary)
    median_ms = statistics.median(1e3 * m.physical_tokens / m.tokens_per_s for m in metrics[WARM_UP:])
    row = {
        "processes": ranks.world,
        "status": "ok",
        "tokens_s": 1e3 * metrics[0].physical_tokens / median_ms,
        "median_ms": median_ms,
        "steps": options.steps,
        "peak_gib": metrics[-1].peak_bytes / 2**30,
        "first_loss": first,
        "last_loss": last,
    }
    if not abs(first - expected) < 0.1 * expected or not last < first:
        row |= {"status": "wrong", "why": f"the loss goes from {first:.3f} to {last:.3f}; ln V is {expected:.3f}"}
    return row


def speed(options, shape: dict, dtype: torch.dtype, ranks: Ranks, write: Callable[[dict], None]) -> None:
    """One process, all of them, and all of them over a base that is cut."""
    device = ranks.device.type
    model, _ = riftco_model(shape, "qlora", options.checkpointing, dtype, device)
    ranks.copy_of_first([p for p in model.parameters() if p.requires_grad])
    alone: dict[str, Any] = {}
    start = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def again() -> None:
        with torch.no_grad():
            for p, value in zip((p for p in model.parameters() if p.requires_grad), start):
                p.copy_(value)

    if ranks.main:
        alone = train(model, "paged", Ranks(ranks.device), options, shape["vocab_size"])
        write({"case": "qlora", **alone, "times_one": 1.0})
    ranks.wait()
    if ranks.alone:
        return
    again()
    row = train(model, "paged", ranks, options, shape["vocab_size"])
    write({"case": "qlora ddp", **row, "times_one": row["tokens_s"] / alone["tokens_s"] if alone else None})
    again()
    row = train(Sharded(model, ranks), "paged", ranks, options, shape["vocab_size"])
    write({"case": "qlora fsdp", **row, "times_one": row["tokens_s"] / alone["tokens_s"] if alone else None})


def full(options, shape: dict, dtype: torch.dtype, ranks: Ranks, write: Callable[[dict], None]) -> None:
    """All weights; the same on every process, whole where there is one."""
    if options.cap_gib and ranks.device.type == "cuda":
        total = torch.cuda.get_device_properties(ranks.device).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap_gib * 2**30 / total, ranks.device)
    torch.manual_seed(0)
    kind = "block" if options.checkpointing else "disabled"
    case = "full" if ranks.alone else "full fsdp"
    try:
        model: Any = random_model(
            lambda: Decoder(DecoderConfig.from_hf(shape), activation_checkpointing=kind), dtype, ranks.device.type
        )
        if not ranks.alone:
            model = Sharded(model, ranks)
        write({"case": case, **train(model, "contiguous", ranks, options, shape["vocab_size"])})
    except Exception as failed:
        chain: list[BaseException] = [failed]
        while (cause := chain[-1].__cause__) is not None:
            chain.append(cause)
        if not any(out_of_memory(error) for error in chain):
            raise
        write({
            "case": case, "processes": ranks.world, "status": "out of memory", "why": reason_of(chain[-1]),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if ranks.device.type == "cuda" else None,
        })  # fmt: skip
        if not ranks.alone:
            raise


def show(row: dict[str, Any]) -> str:
    head = f"  {row['case']:11s} {row['processes']} x"
    if row["status"] not in ("ok", "wrong"):
        return f"{head} {row['status']}: {row['why']}"
    times = f"  {row['times_one']:.3f} times one" if row.get("times_one") else ""
    return (
        f"{head} {row['tokens_s']:10.1f} tokens/s{times}  step {row['median_ms']:.1f} ms  peak of a GPU "
        f"{row['peak_gib']:.2f} GiB  loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
        f"{'' if row['status'] == 'ok' else '  WRONG: ' + row['why']}"
    )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="riftco bench many-gpus", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("case", choices=["speed", "full"])
    p.add_argument("--size", choices=list(SHAPES), default="8b")
    p.add_argument("--layers", type=int, help="fewer layers than the size has")
    p.add_argument("--batch", type=int, default=1, help="sequences of a process's micro-batch")
    p.add_argument("--seq", type=int, default=4096)
    p.add_argument("--checkpointing", action="store_true", help="keep only each block's input")
    p.add_argument("--steps", type=int, default=5, help="timed steps")
    p.add_argument("--cap-gib", type=float, help="full: the memory that a process may take")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on cuda, else float32")
    p.add_argument(
        "--out", type=pathlib.Path, help="CSV file, appended to; default <folder>/<date>-many_gpus-<device>.csv"
    )
    return p


def main(argv: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    """The command, in each process; returns the exit status, 1 where a loss is wrong."""
    options = parser().parse_args(argv)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks = Ranks.join(torch.device("cuda", local) if options.device == "cuda" else "cpu")
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    shape = dict(SHAPES[options.size])
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    common = {
        "size": options.size, "layers": shape["num_hidden_layers"], "batch": options.batch, "seq": options.seq,
        "checkpointing": options.checkpointing, "cap_gib": options.cap_gib, "dtype": str(dtype).removeprefix("torch."),
        "device": options.device, **machine_columns(options.device),
    }  # fmt: skip
    wrong = False
    out = file_of(options.out, folder, f"many_gpus-{options.device}")

    def write(row: dict[str, Any]) -> None:
        nonlocal wrong
        wrong |= row["status"] == "wrong"
        if not ranks.main:
            return
        print(show(row), flush=True)
        append(out, COLUMNS, [{**common, **row}])

    if ranks.main:
        print(", ".join(f"{k} {v}" for k, v in common.items()), flush=True)
    with ranks.until_done():
        {"speed": speed, "full": full}[options.case](options, shape, dtype, ranks, write)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
