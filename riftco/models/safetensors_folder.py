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
# a model with images holds its text model below one of these, and beside it what reads the images
_TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
_IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class SafetensorsFolder:
    """A model source: `config`, the `shapes` of its tensors by name, and `tensor(name)`."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.path = folder
        config = read_json(folder / "config.json")
        bnb.check_config(config)
        self.config = DecoderConfig.from_hf(config)
        with_images = config.get("model_type") == "gemma3"
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, tuple[Any, str]] = {}  # a tensor's file, and its name there
        for file in _weight_files(folder):
            try:
                opened = safe_open(file, framework="pt", device="cpu")
                names = list(opened.keys())
                for stored in names:
                    name = _in_text_model(stored) if with_images else stored
                    if name in self._stored:
                        raise ModelError(f"{folder}: tensor {stored} is in two files")
                    if name is not None and not name.endswith(_IGNORED):
                        self._stored[name] = opened, stored
                        self.shapes[name] = tuple(opened.get_slice(stored).get_shape())
            except (SafetensorError, OSError) as why:
                raise ModelError(f"{file}: not a readable safetensors file, perhaps cut short ({why})") from why

    def tensor(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU."""
        opened, stored = self._stored[name]
        return opened.get_tensor(stored)


def _in_text_model(name: str) -> str | None:
    """The name of a tensor of a model with images in its text model; None for what reads the images."""
    if name.startswith(_IMAGES):
        return None
    for prefix, own in _TEXT.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


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
