"""A Hugging Face folder as a model source: config.json and safetensors, one file or shards, read tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from . import bnb
from .config import DecoderConfig
from .errors import ModelError

_IGNORED = (".rotary_emb.inv_freq",)  # old checkpoints store what the config already says


class SafetensorsFolder:
    """A model source: `config`, the `shapes` of its tensors by name, and `tensor(name)`."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.path = folder
        config = read_json(folder / "config.json")
        bnb.check_config(config)
        self.config = DecoderConfig.from_hf(config)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Any] = {}
        for file in _weight_files(folder):
            try:
                opened = safe_open(file, framework="pt", device="cpu")
                names = list(opened.keys())
                for name in names:
                    if name in self._file_of:
                        raise ModelError(f"{folder}: tensor {name} is in two files")
                    if not name.endswith(_IGNORED):
                        self._file_of[name] = opened
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
            except (SafetensorError, OSError) as why:
                raise ModelError(f"{file}: not a readable safetensors file, perhaps cut short ({why})") from why

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU."""
        return self._file_of[name].get_tensor(name)


def read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as why:
        raise ModelError(f"{file}: not a readable JSON file ({why})") from why
    if not isinstance(found, dict):
        raise ModelError(f"{file}: must hold a JSON object; got {type(found).__name__}")
    return found


def _weight_files(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards or not all(isinstance(v, str) for v in shards.values()):
            raise ModelError(f"{index}: must hold a weight_map from tensors to files")
        names = sorted(set(shards.values()))
        outside = [n for n in names if Path(n).name != n]
        missing = [n for n in names if n not in outside and not (folder / n).exists()]
        if outside or missing:
            raise ModelError(f"{index}: names {(outside or missing)[0]!r}, which is not a file of this folder")
        return [folder / n for n in names]
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if pickles:
        raise ModelError(
            f"{folder}: {pickles[0]} is a pickle, which can run code when read; accepted: model.safetensors"
        )
    raise ModelError(
        f"{folder}: no weights; accepted: model.safetensors or model.safetensors.index.json with its shards"
    )
