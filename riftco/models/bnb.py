"""bitsandbytes 4-bit checkpoints (NF4): which layers of a folder are quantised, and those layers as NF4Linear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import NF4Linear
from .errors import ModelError

_MARK = ".weight.quant_state.bitsandbytes__nf4"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state.bitsandbytes__nf4")


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config.json whose weights are quantised in any way but bitsandbytes' NF4."""
    found = config.get("quantization_config")
    if not found:
        return
    if not isinstance(found, Mapping) or found.get("quant_method") != "bitsandbytes":
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        raise ModelError(f"config: weights quantised by {method!r} are not supported; accepted: bitsandbytes, nf4")
    if not found.get("load_in_4bit") or found.get("bnb_4bit_quant_type") != "nf4":
        kind = found.get("bnb_4bit_quant_type") if found.get("load_in_4bit") else "8-bit"
        raise ModelError(f"config: bitsandbytes {kind} weights are not supported; accepted: 4-bit nf4")


def quantised(names: Iterable[str]) -> dict[str, list[str]]:
    """Path of each quantised layer inside the blocks -> the names of its weight's tensors, among `names`."""
    names = set(names)
    paths = [n.removesuffix(_MARK) for n in names if n.endswith(_MARK) and n.startswith("model.layers.")]
    return {
        path: [n for n in (f"{path}.weight", *(f"{path}.weight.{part}" for part in _PARTS)) if n in names]
        for path in paths
    }


def read(
    path: str, like: nn.Linear, names: list[str], tensor: Callable[[str], Tensor], device: torch.device
) -> NF4Linear:
    """The layer at `path`, its blocks taken as they are stored, without a bias."""
    made = NF4Linear(like.in_features, like.out_features, device="meta")
    state = {name.removeprefix(f"{path}."): tensor(name).to(device) for name in names}
    try:
        made.load_state_dict(state, assign=True)
    except (RuntimeError, ValueError, KeyError) as why:
        raise ModelError(f"tensor {path}.weight: {' '.join(str(why).split())}") from why
    return made


def config_of(layers: list[NF4Linear], dense: list[str], compute_dtype: str) -> dict[str, Any]:
    """config.json's quantization_config for these layers, beside linear layers that stay `dense`, as transformers
    writes it."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": any(layer.weight.nested is not None for layer in layers),
        "bnb_4bit_compute_dtype": compute_dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head", *dense],
    }
