"""What a run is besides its weights, as JSON values and tensors by name: optimizer and generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import tpu


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators that a step draws from (dropout)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    elif device.type == tpu.DEVICE_TYPE:
        states["tpu"] = tpu.rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"])
    elif device.type == tpu.DEVICE_TYPE and "tpu" in states:
        tpu.set_rng_state(states["tpu"])


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the host's memory, pinned where they come from a GPU: all are queued, then waited for once."""
    copies = {n: t.detach().contiguous().to("cpu", non_blocking=t.is_cuda, copy=True) for n, t in tensors.items()}
    for device in {t.device for t in tensors.values() if t.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def flatten_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """torch's optimizer state_dict as JSON values and tensors named "optimizer.<parameter>.<slot>"."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, slots in state["state"].items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{parameter}.{slot}"] = value
            else:
                values.setdefault(str(parameter), {})[slot] = value
    return {"param_groups": state["param_groups"], "values": values}, on_host(tensors)


def unflatten_optimizer(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    slots: dict[int, dict[str, Any]] = {int(p): dict(v) for p, v in state["values"].items()}
    for parameter, slot, tensor in _named(tensors):
        slots.setdefault(parameter, {})[slot] = tensor
    groups = [{k: tuple(v) if k == "betas" else v for k, v in g.items()} for g in state["param_groups"]]
    return {"state": slots, "param_groups": groups}


def _named(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, parameter, slot = name.split(".", 2)
            yield int(parameter), slot, tensor


class Writes(TorchDispatchMode):
    """Within the block `begun` turns True before the first operator that writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.begun |= func._schema.is_mutable
        return func(*args, **(kwargs or {}))
