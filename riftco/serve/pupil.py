"""An adapter that learns: its parameters, its one optimizer, and the way back."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import Adam
from ..train.state import unflatten_optimizer
from .side_by_side import SideBySide
from .versions import State

SLOTS = ("step", "exp_avg", "exp_avg_sq")  # what the optimizer keeps of a parameter


@dataclass(frozen=True)
class Moment:
    """A shadow and its optimizer as they were after `step` steps. Shared by whoever asks for it: never written.

    Its tensors are good for as long as it is held: their memory serves again once no Moment has `held`.
    """

    step: int
    shadow: State
    optimizer: dict
    tensors: dict[str, Tensor]
    held: object = None


class _Held:
    """Says that a room is taken, for as long as somebody has it."""


@dataclass
class _Room:
    """The host's memory for a moment; for the optimizer's state once there is any."""

    shadow: SideBySide
    state: SideBySide | None = None


class Pupil:
    """
    Args:
        shadow: the trainable parameters, which lie in `weights`.
        optimizer: of them, in their order.

    Attributes:
        step: how many were taken.
        journal: what an undo goes back to, oldest first.
    """

    def __init__(self, shadow: Mapping[str, nn.Parameter], weights: SideBySide, optimizer: Adam):
        self.shadow, self.weights, self.optimizer = shadow, weights, optimizer
        self.step = 0
        self.journal: deque[Moment] = deque()
        self._moments: SideBySide | None = None
        self._newest: tuple[Any, State, dict[str, Tensor], _Held] | None = None
        self._free: list[_Room] = []  # of moments that are no more
        self._slots: list[tuple[Tensor, list[tuple[str, str, Tensor]]]] = []  # a parameter: slot, name, where it lies
        self._reserved = False

    def moment(self) -> Moment:
        """A copy on the host, which many of do not take the GPU's memory.

        Made once for as long as nothing changes: what is written after one learn is what the next one goes back to.
        """
        held = self._lay()
        pieces = [*self.weights.pieces, *(self._moments.pieces if held and self._moments is not None else [])]
        now = held, [piece._version for piece in pieces]  # which their views share
        if self._newest is None or self._newest[0] != now:
            self._newest = None  # its memory serves again where nobody else holds it
            room = self._free.pop() if self._free else _Room(self.weights.host_room())
            taken, copies = _Held(), {}
            weakref.finalize(taken, self._free.append, room).atexit = False
            if held:
                room.state = self._laid().on_host(room.state)
                copies = room.state.views
            tensors = copies if len(held) == len(self._slots) else _of(copies, held)
            self._newest = now, self.weights.on_host(room.shadow).views, tensors, taken
        _, shadow, tensors, taken = self._newest
        return Moment(self.step, shadow, {"param_groups": self._groups(), "values": {}}, tensors, taken)

    def reserve(self, moments: int) -> None:
        """Take pinned memory for so many moments at once: it is dear to get, and neighbours wait for it."""
        if self.weights.cuda and not self._reserved:
            self._reserved = True
            laid = self._laid()
            self._free += [_Room(self.weights.host_room(), laid.host_room()) for _ in range(moments)]

    def go_back(self, to: Moment) -> None:
        with torch.no_grad():
            for name, p in self.shadow.items():
                p.copy_(to.shadow[name])
                p.grad = None
        self.optimizer.load_state_dict(unflatten_optimizer(to.optimizer, to.tensors))
        self.step = to.step
        self._lay()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what the optimizer keeps, named as `flatten_optimizer` does."""
        shapes = self.weights.shapes.values()
        return {_name(i, slot): () if slot == "step" else shape for i, shape in enumerate(shapes) for slot in SLOTS}

    def _lay(self) -> list[int]:
        """Lay what the optimizer keeps side by side where it is not: at first, and after a state was loaded. The
        parameters, by number, of which it keeps anything."""
        state = self.optimizer.state
        held = [i for i, p in enumerate(self.shadow.values()) if state.get(p)]
        if not held:
            return held
        laid = self._laid()
        away = {}
        for i in held:
            p, slots = self._slots[i]
            kept = state[p]
            for slot, name, view in slots:
                if kept[slot] is not view:
                    away[name] = kept[slot]
                    kept[slot] = view
        laid.copy_(away)
        return held

    def _laid(self) -> SideBySide:
        """Where the optimizer's state lies; taken when it is first asked for."""
        if self._moments is None:
            self._moments = SideBySide(self._shapes(), self.weights.device)
            views = self._moments.views
            self._slots = [
                (p, [(slot, _name(i, slot), views[_name(i, slot)]) for slot in SLOTS])
                for i, p in enumerate(self.shadow.values())
            ]
        return self._moments

    def _groups(self) -> list[dict[str, Any]]:
        """As in the optimizer's state_dict, without walking its state."""
        made, n = [], 0
        for group in self.optimizer.param_groups:
            count = len(group["params"])
            made.append({**group, "params": list(range(n, n + count))})
            n += count
        return made


def _of(copies: dict[str, Tensor], parameters: Iterable[int]) -> dict[str, Tensor]:
    return {_name(i, slot): copies[_name(i, slot)] for i in parameters for slot in SLOTS}


def _name(parameter: int, slot: str) -> str:
    return f"optimizer.{parameter}.{slot}"
