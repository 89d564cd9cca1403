"""The peak of loading a sharded bfloat16 folder as NF4: what is held afterwards, and one layer.

`python bench/load_memory.py --size 8b --folder /tmp/8b`. The folder is written first, from random numbers made on the
device; the load runs in a process of its own, whose memory is its own. The folder is removed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
import pathlib
import shutil
import sys
import tempfile
import threading
import time
from typing import Any

import torch

from ..models import Decoder, DecoderConfig, load_model
from .engines import device_of, parser, shape_of
from .machine import machine_columns
from .rows import append, file_of, line

COLUMNS = (
    "size", "layers", "weights", "stored_gib", "shards", "write_s", "load_s", "held_gib", "peak_gib", "layer_gib",
    "peak_less_held_gib", "within", "host_before_gib", "host_anonymous_peak_gib", "host_peak_gib", "device", "machine",
    "date", "commit", "torch", "triton", "threads",
)  # fmt: skip
GIB = 2.0**30


def write(folder: pathlib.Path, shape: dict[str, Any], device: str, shard_bytes: int) -> tuple[int, int]:
    """Fill a folder as save_pretrained does, from random numbers; (bytes of tensors, files)."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = DecoderConfig.from_hf(shape)
    with torch.device("meta"):
        model = Decoder(config)
    generator = torch.Generator(device).manual_seed(0)
    where: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = files = 0

    def close() -> None:
        nonlocal files
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, p in model.named_parameters():
        t = torch.empty(p.shape, dtype=torch.bfloat16, device=device).normal_(std=0.02, generator=generator)
        if shard and sum(s.nbytes for s in shard.values()) + t.nbytes > shard_bytes:
            close()
        shard[name], total = t.cpu(), total + t.nbytes
    close()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config.to_hf()))
    return total, files


class HostMemory(contextlib.AbstractContextManager):
    """The most resident bytes of this process within the block, and of them those that no file backs. Mapped files
    count as resident while their pages are cached; the system takes those back when it wants to."""

    def __enter__(self):
        self.peak = self.anonymous = self.before = 0
        self.before = self._look()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._look()

    def _look(self) -> int:
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        resident, anonymous = (1024 * int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon"))
        self.peak, self.anonymous = max(self.peak, resident), max(self.anonymous, anonymous)
        return anonymous


def load(folder: pathlib.Path, weights: str, device: str) -> dict[str, Any]:
    """What a load takes; on a CPU the host's figures alone."""
    if device == "cuda":
        torch.empty(1, device=device)  # the context is there
    began = time.perf_counter()
    with HostMemory() as host:
        model, _ = load_model(folder, weights=weights, device=device, with_tokenizer=False)
        held = peak = 0
        if device == "cuda":
            torch.cuda.synchronize()
            held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    with torch.device("meta"):
        dense = Decoder(model.config)
    layer = max(sum(2 * p.numel() for p in block.parameters()) for block in dense.model.layers)
    return {
        "load_s": time.perf_counter() - began, "held_gib": held / GIB, "peak_gib": peak / GIB, "layer_gib": layer / GIB,
        "peak_less_held_gib": (peak - held) / GIB, "within": peak <= held + layer if device == "cuda" else "",
        "host_before_gib": host.before / GIB, "host_anonymous_peak_gib": host.anonymous / GIB,
        "host_peak_gib": host.peak / GIB,
    }  # fmt: skip


def apart(folder: pathlib.Path, weights: str, device: str) -> dict[str, Any]:
    """`load` in a fresh process."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(load, folder, weights, device).result()


def main(arguments: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    options = parser("load-memory", __doc__)
    options.add_argument("--weights", default="nf4", help="as load_model takes them")
    options.add_argument("--shard-mib", type=int, default=2048)
    options.add_argument("--folder", type=pathlib.Path, help="where the model is written; default: a temporary one")
    args = options.parse_args(arguments)
    device, shape = device_of(args), shape_of(args)
    place = pathlib.Path(tempfile.mkdtemp(dir=args.folder))
    try:
        began = time.perf_counter()
        stored, shards = write(place, shape, device, args.shard_mib << 20)
        written = time.perf_counter() - began
        row = apart(place, args.weights, device)
    finally:
        shutil.rmtree(place)
    row |= {
        "size": args.size, "layers": shape["num_hidden_layers"], "weights": args.weights, "stored_gib": stored / GIB,
        "shards": shards, "write_s": written, "device": device, **machine_columns(device),
    }  # fmt: skip
    out = file_of(args.out, folder, f"load-memory-{device}")
    print(line(row, COLUMNS[:15]))
    append(out, COLUMNS, [row])
    print(f"written to {out}")
    return 0 if row["within"] in (True, "") else 1


if __name__ == "__main__":
    sys.exit(main())
