"""A decoder as a Hugging Face folder that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from ..functional import dequantize_nf4
from ..nn import NF4Linear
from .decoder import Decoder
from .errors import ModelError

SHARD_BYTES = 4 << 30


def save_hf(
    model: Decoder, folder: str | Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config.json and safetensors; 4-bit weights are written dequantised. The folder appears whole or not at all.

    Args:
        model: a decoder without adapters (merge them first).
        folder: must not exist, or be empty.
        dtype: of the saved weights; the model's own by default.
        shard_bytes: the most that one file holds; one shard at a time is in memory beside the model.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder}: already there and not empty; name a new folder")
    shapes = _expected(model)
    dtype = dtype or model.dtype
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        groups = _shards({n: s.numel() * dtype.itemsize for n, s in shapes.items()}, shard_bytes)
        index: dict[str, str] = {}
        for i, names in enumerate(groups):
            file = "model.safetensors" if len(groups) == 1 else f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
            tensors = {n: _weight(model, n).detach().to("cpu", dtype).contiguous() for n in names}
            save_file(tensors, fresh / file, metadata={"format": "pt"})
            index |= dict.fromkeys(names, file)
        if len(groups) > 1:
            total = sum(s.numel() * dtype.itemsize for s in shapes.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (fresh / "model.safetensors.index.json").write_text(text)
        named = str(dtype).removeprefix("torch.")
        config = {**model.config.to_hf(), "dtype": named, "torch_dtype": named}
        (fresh / "config.json").write_text(json.dumps(config, indent=2))
        for written in fresh.iterdir():
            with written.open("rb") as f:
                os.fsync(f.fileno())
        if folder.exists():
            folder.rmdir()
        fresh.chmod(0o755)
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _expected(model: Decoder) -> dict[str, torch.Size]:
    """Names and shapes of a plain decoder; refuses one whose modules were replaced by anything but 4-bit linears."""
    with torch.device("meta"):
        plain = Decoder(model.config)
    shapes = {n: p.shape for n, p in plain.named_parameters()}
    have = {m for m, _ in model.named_modules()}
    for path, module in plain.named_modules():
        found = model.get_submodule(path) if path in have else None
        if isinstance(module, nn.Linear) and type(found) not in (nn.Linear, NF4Linear):
            raise ModelError(f"save_hf: {path} is a {type(found).__name__}; merge the adapter first")
    return shapes


def _weight(model: Decoder, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, NF4Linear) and leaf == "weight":
        return dequantize_nf4(module.weight, torch.float32)
    return getattr(module, leaf)


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
