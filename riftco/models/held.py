"""What a module holds: parameters, buffers, and tensors inside of its plain attributes (quantised weights)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def held_beside_parameters(module: torch.nn.Module) -> dict[str, list[Tensor]]:
    """Attribute -> tensors: buffers, and tensors inside of this module's plain attributes; not its children's."""
    held = {name: [b] for name, b in module._buffers.items() if b is not None}
    for name, value in vars(module).items():
        if not name.startswith("_") or name == "_weight":
            found = tensors_in(value)
            if found:
                held[name] = found
    return held


def all_held(model: torch.nn.Module) -> Iterator[Tensor]:
    """Every tensor that the model holds, its children's included; a shared one comes as often as it is held."""
    for module in model.modules():
        yield from (p for p in module._parameters.values() if p is not None)
        for tensors in held_beside_parameters(module).values():
            yield from tensors


def tensors_in(value: Any, depth: int = 4) -> list[Tensor]:
    """The tensors in a value made of records, lists and dictionaries; modules and optimizers are not entered."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or isinstance(value, (torch.nn.Module, torch.optim.Optimizer, str, bytes, type)):
        return []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return [t for part in parts for t in tensors_in(part, depth - 1)]
