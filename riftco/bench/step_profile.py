"""Where a training step's time goes on a GPU: kernels by kind and by name, beside the host's time to launch them.

`python bench/step_profile.py --size 8b --method qlora --batch 2 --seq 4096 [--checkpointing]`: bench/e2e.py's steps.
"""

from __future__ import annotations

import collections
import pathlib
import sys
import time

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from . import e2e
from .machine import machine_columns
from .rows import append, file_of

# kind -> how kernels' names begin; what is no kernel of riftco's goes by the words in WORDS
KINDS = {
    "attention": ("attention", "backward_kernel", "dkdv_kernel", "dq_kernel", "_prepare", "_convert", "_zero_outside",
                  "_cached"),
    "weights decoded": ("_tile", "_groups", "_row", "_forward", "_backward"),
    "adapters": ("down", "up", "grads", "rescale"),
    "norms": ("_norm_", "_long_", "_add_parts"),
    "gated units": ("_glu",),
    "rotation": ("_rope",),
    "loss": ("forward_rows", "backward_rows", "count_labelled", "place_labelled"),
    "embedding": ("_gather", "_scatter", "_segment", "_unscatter"),
    "optimizer": ("_update", "_norm", "_finish", "_advance"),
}  # fmt: skip
WORDS = {
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    "optimizer": ("multi_tensor", "adam"),
    "copies": ("memcpy", "memset", "copy", "fill"),
}
COLUMNS = ("size", "layers", "method", "batch", "seq", "checkpointing", "kind", "kernel", "ms", "launches")
PROFILED = 2


def kind_of(name: str) -> str:
    if "::" not in name and name.isidentifier():
        begun = [kind for kind, starts in KINDS.items() if name.startswith(starts)]
        if begun:
            return begun[0]
    low = name.lower()
    return next((kind for kind, words in WORDS.items() if any(word in low for word in words)), "other")


def step_of(options, shape: dict):
    """One step of riftco's model of bench/e2e.py."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype or "bfloat16")
    model, loss_of = e2e.riftco_model(shape, options.method, options.checkpointing, dtype, options.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=e2e.LEARNING_RATE, fused=True)
    ids = torch.randint(0, shape["vocab_size"], (options.batch, options.seq), device=options.device)

    def step():
        loss_of(ids).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def run(options, shape: dict) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """(wall and host milliseconds of a step), kernel -> (milliseconds, launches) of a step."""
    step = step_of(options, shape)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    walls, hosts = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        step()
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as made:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in made.events():
        if event.device_type == DeviceType.CUDA:
            kernels[event.name][0] += event.device_time / 1e3 / PROFILED
            kernels[event.name][1] += 1 / PROFILED
    middle = {"wall": 1e3 * sorted(walls)[len(walls) // 2], "host": 1e3 * sorted(hosts)[len(hosts) // 2]}
    return middle, {name: (ms, n) for name, (ms, n) in kernels.items()}


def main(argv: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    """The command; returns the exit status."""
    parser = e2e.parser()
    parser.prog, parser.description = "riftco bench step-profile", __doc__
    options = parser.parse_args(argv)
    if options.device != "cuda":
        print("a step's kernels are timed on a CUDA device; there is none", file=sys.stderr)
        return 2
    shape = dict(e2e.SIZES[options.size])
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    times, kernels = run(options, shape)
    common = {
        "size": options.size, "layers": shape["num_hidden_layers"], "method": options.method, "batch": options.batch,
        "seq": options.seq, "checkpointing": options.checkpointing,
    }  # fmt: skip
    kinds: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for name, (ms, n) in kernels.items():
        kinds[kind_of(name)][0] += ms
        kinds[kind_of(name)][1] += n
    busy = sum(ms for ms, _ in kernels.values())
    print(", ".join(f"{k} {v}" for k, v in common.items()))
    print(f"  a step {times['wall']:.1f} ms, the host's part {times['host']:.1f}; kernels {busy:.1f} ms")
    for kind, (ms, n) in sorted(kinds.items(), key=lambda one: -one[1][0]):
        print(f"  {kind:16s} {ms:8.2f} ms {100 * ms / busy:5.1f} %  {n:6.0f} launches")
        named = [(k, v) for k, v in kernels.items() if kind_of(k) == kind]
        for name, (ms_, n_) in sorted(named, key=lambda one: -one[1][0])[:4]:
            print(f"      {ms_:8.2f} ms {n_:6.0f}  {name[:90]}")
    machine = machine_columns("cuda")
    rows = [
        {
            **common, "kind": "step" if name in times else kind_of(name), "kernel": name[:200], "ms": ms, "launches": n,
            **machine,
        }
        for name, (ms, n) in [("wall", (times["wall"], 1)), ("host", (times["host"], 1)), *kernels.items()]
    ]  # fmt: skip
    append(file_of(options.out, folder, "step-profile"), [*COLUMNS, *machine], rows)
    return 0
