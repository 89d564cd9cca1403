"""What a run is besides its weights, as JSON values and tensors by name: optimizer and generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import tpu

SLAB, ALIGNED = 64 << 20, 64  # bytes of a piece, a power of two, to which pinned memory is rounded; of a tensor's start


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
    there = {n: t.detach() for n, t in tensors.items() if t.is_cuda}
    copies = {n: t.detach().contiguous().to("cpu", copy=True) for n, t in tensors.items() if n not in there}
    if there:
        copies |= in_slabs(there, pinned=True)
        for device in {t.device for t in there.values()}:
            torch.cuda.current_stream(device).synchronize()
    return {name: copies[name] for name in tensors}


def in_slabs(tensors: Mapping[str, Tensor], pinned: bool) -> dict[str, Tensor]:
    """Copies that lie side by side in a few pieces of the host's memory, of which pinned ones are dear to get. Those
    from a GPU are on their way when this returns."""
    copies, room = {}, torch.empty(0, dtype=torch.uint8)
    left = sum(-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors.values())
    for name, t in tensors.items():
        need = -(-t.nbytes // ALIGNED) * ALIGNED
        if need > len(room):
            room = torch.empty(max(need, min(left, SLAB)), dtype=torch.uint8, pin_memory=pinned)
        copies[name] = room[: t.nbytes].view(t.dtype).view(t.shape)
        copies[name].copy_(t, non_blocking=pinned)
        room, left = room[need:], left - need
    return copies


def whole(t: Any) -> Tensor:
    """A tensor that is cut over processes (DTensor), gathered; all of them must ask. Others as they are."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def flatten_optimizer(state: Mapping[str, Any], keep: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """torch's optimizer state_dict as JSON values and tensors named "optimizer.<parameter>.<slot>".

    What is cut over processes is gathered, one tensor at a time; a process that only helps with it keeps nothing.
    """
    gathered: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, slots in state["state"].items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                name = f"optimizer.{parameter}.{slot}"
                if hasattr(value, "full_tensor"):
                    full = whole(value.detach())
                    gathered |= on_host({name: full}) if keep else {}
                elif keep:
                    tensors[name] = value
            else:
                values.setdefault(str(parameter), {})[slot] = value
    return {"param_groups": state["param_groups"], "values": values}, on_host(tensors) | gathered


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
