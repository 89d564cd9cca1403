"""A decoder as a Hugging Face folder that transformers loads."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import GGUFEmbedding, GGUFLinear, NF4Linear
from . import bnb
from .decoder import Decoder
from .errors import ModelError

SHARD_BYTES = 4 << 30


def save_hf(
    model: Decoder,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    quantised: bool = False,
) -> None:
    """Write config.json and safetensors. The folder appears whole or not at all.

    Args:
        model: a decoder without adapters (merge them first).
        folder: must not exist, or be empty.
        dtype: of the saved weights; the model's own by default.
        shard_bytes: the most that one file holds; one shard at a time is in memory beside the model.
        quantised: NF4 layers keep their bits, as a bitsandbytes 4-bit checkpoint of transformers; without, they are
            written dequantised (as packed GGUF layers always are).
    """
    with fresh_folder(folder) as fresh:
        write_hf(model, fresh, dtype=dtype, shard_bytes=shard_bytes, quantised=quantised)


@contextlib.contextmanager
def fresh_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which takes its name once everything in it is on the disk."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder}: already there and not empty; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield fresh
        for written in fresh.iterdir():
            written.chmod(0o644)  # some writers make files for their owner alone
            with written.open("rb") as f:
                os.fsync(f.fileno())
        if folder.exists():
            folder.rmdir()
        fresh.chmod(0o755)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_hf(
    model: Decoder, folder: Path, *, dtype: torch.dtype | None, shard_bytes: int = SHARD_BYTES, quantised: bool = False
) -> None:
    """save_hf into a folder that is there."""
    from safetensors.torch import save_file

    names, dtype = _expected(model), dtype or model.dtype
    packed = {n for n in names if quantised and isinstance(_owner(model, n), NF4Linear) and n.endswith(".weight")}
    if quantised and not packed:
        raise ModelError("save_hf: quantised=True, but no layer of the model is NF4; load it with weights='nf4'")
    sizes = {n: sum(_bytes(t) for t in _tensors(model, n, dtype, n in packed, meta=True).values()) for n in names}
    groups = _shards(sizes, shard_bytes)
    index: dict[str, str] = {}
    total = 0
    for i, group in enumerate(groups):
        file = "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in group:
            tensors |= _tensors(model, name, dtype, name in packed)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(_bytes(t) for t in tensors.values())
    if len(groups) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text)
    named = str(dtype).removeprefix("torch.")
    config: dict[str, Any] = {**model.config.to_hf(), "dtype": named, "torch_dtype": named}
    if packed:
        layers = [_owner(model, n) for n in packed]
        dense = [n for n, m in model.named_modules() if n != "lm_head" and isinstance(m, (nn.Linear, GGUFLinear))]
        config["quantization_config"] = bnb.config_of([m for m in layers if isinstance(m, NF4Linear)], dense, named)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _expected(model: Decoder) -> list[str]:
    """Names of a plain decoder; refuses one whose modules were replaced by anything but frozen linears."""
    with torch.device("meta"):
        plain = Decoder(model.config)
    have = {m for m, _ in model.named_modules()}
    for path, module in plain.named_modules():
        found = model.get_submodule(path) if path in have else None
        if isinstance(module, nn.Linear) and type(found) not in (nn.Linear, NF4Linear, GGUFLinear):
            raise ModelError(f"save_hf: {path} is a {type(found).__name__}; merge the adapter first")
        if isinstance(module, nn.Embedding) and type(found) not in (type(module), GGUFEmbedding):
            raise ModelError(f"save_hf: {path} is a {type(found).__name__}; merge the adapter first")
    return [n for n, _ in plain.named_parameters()]


def _owner(model: Decoder, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _tensors(model: Decoder, name: str, dtype: torch.dtype, packed: bool, meta: bool = False) -> dict[str, Tensor]:
    """What is written for the parameter `name`, on the CPU; meta: only its shapes and dtypes, nothing is decoded."""
    module, leaf = _owner(model, name), name.rpartition(".")[2]
    if packed and isinstance(module, NF4Linear):
        parts = {name: module.weight.codes} | {f"{name}.{k}": v for k, v in module.weight.state().items()}
        return parts if meta else {k: v.detach().to("cpu").contiguous() for k, v in parts.items()}
    weight = getattr(module, leaf)
    if meta:
        return {name: torch.empty(tuple(weight.shape), dtype=dtype, device="meta")}
    if not isinstance(weight, Tensor):
        weight = weight.decoded(0, weight.shape[0], torch.float32)
    return {name: weight.detach().to("cpu", dtype).contiguous()}


def _bytes(t: Tensor) -> int:
    return t.numel() * t.dtype.itemsize


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups
