"""What a captured step depends on: the geometry of its micro-batch, the run's choices, and every tensor's place."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..data import Batch
from ..models.held import all_held, held_beside_parameters


@dataclass(frozen=True)
class StepKey:
    """What a captured step depends on besides the numbers in its inputs.

    Attributes:
        tokens: how many, the longest document, and the dtypes of ids and offsets.
        documents: how many there is room for; where each lies is one of the step's inputs.
        attention: the implementation.
        labelled: how many rows carry a label.
        labels: which of weights and several labels there are, with their dtypes and widths.
        checkpointing: of activations.
        numerics: dropout on or off, autocast, deterministic algorithms, precision of float32 products.
        trainable, frozen: identity and layout of every tensor that the model holds.
        optimizer: its kind and its groups' parameters.
    """

    tokens: tuple[Any, ...]
    documents: int
    attention: str
    labelled: int
    labels: tuple[Any, ...]
    checkpointing: str
    numerics: tuple[Any, ...]
    trainable: tuple[Any, ...]
    frozen: tuple[Any, ...]
    optimizer: tuple[Any, ...]

    def differs(self, other: StepKey) -> str:
        """The names of the fields that are not equal."""
        return ", ".join(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))


class Layout:
    """The identity and place of what model and optimizer hold. Making it walks everything; `same` is a glance.

    Attributes:
        trainable, frozen, optimizer: fields of StepKey.
        storages: what the model's tensors lie in, as torch names it.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None):
        held = list(all_held(model))
        self.storages = frozenset(t.untyped_storage()._cdata for t in held)
        groups = [group["params"] for group in _groups(optimizer)]
        self.trainable = tuple(_layout(t) for t in held if t.requires_grad)
        self.frozen = tuple(_layout(t) for t in held if not t.requires_grad)
        places = (tuple(p.data_ptr() for p in group) for group in groups)
        self.optimizer = (type(optimizer).__name__, getattr(optimizer, "form", ""), *places)
        self._model, self._of = model, optimizer
        # thousands of things are looked at before each step, while the GPU waits: in loops of C, so as flat lists
        self._tensors = list({id(t): t for t in [*held, *(p for group in groups for p in group)]}.values())
        self._pointers, self._learning = _pointers(self._tensors), _learning(self._tensors)
        self._slots: list[dict[str, Any]] = []
        self._places: list[dict[str, Any]] = []  # where an attribute stands
        self._names: list[str] = []
        for module in model.modules():
            self._slots += (module._modules, module._parameters, module._buffers)
            plain = [name for name in held_beside_parameters(module) if name not in module._buffers]
            self._places += [vars(module)] * len(plain)
            self._names += plain
        self._sizes, self._inside = list(map(len, self._slots)), list(_inside(self._slots))
        self._attributes = list(map(dict.get, self._places, self._names))
        self._groups = [(group, tuple(group)) for group in groups]

    def same(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Whether everything is where it was."""
        if model is not self._model or optimizer is not self._of or len(_groups(optimizer)) != len(self._groups):
            return False
        return (
            list(map(len, self._slots)) == self._sizes
            and all(map(operator.is_, _inside(self._slots), self._inside))
            and all(
                len(group) == len(before) and all(map(operator.is_, group, before)) for group, before in self._groups
            )
            and all(map(operator.is_, map(dict.get, self._places, self._names), self._attributes))
            and _pointers(self._tensors) == self._pointers
            and _learning(self._tensors) == self._learning
        )


def _groups(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups


_values, _requires_grad = operator.methodcaller("values"), operator.attrgetter("requires_grad")


def _inside(slots: list[dict[str, Any]]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(_values, slots))


def _pointers(tensors: list[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _learning(tensors: list[Tensor]) -> list[bool]:
    return list(map(_requires_grad, tensors))


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.shape, t.stride()


def step_key(batch: Batch, model: torch.nn.Module, layout: Layout, device: torch.device) -> StepKey:
    """The key of a micro-batch that still lies on the host."""
    extra = (getattr(batch, name) for name in ("row_weight", "topk_ids", "topk_weights"))
    return StepKey(
        tokens=(batch.physical_tokens, batch.max_seqlen, batch.input_ids.dtype, batch.cu_seqlens.dtype),
        documents=batch.geometry.sequences,
        attention=getattr(model, "attention", ""),
        labelled=batch.n_labelled,
        labels=(batch.target.dtype, *(None if t is None else (t.dtype, *t.shape[1:]) for t in extra)),
        checkpointing=getattr(model, "activation_checkpointing", ""),
        numerics=(
            model.training,
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
        ),
        trainable=layout.trainable,
        frozen=layout.frozen,
        optimizer=layout.optimizer,
    )
