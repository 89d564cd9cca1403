"""An adapter that learns: its parameters, its one optimizer, and the way back."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
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
    """A shadow and its optimizer as they were after `step` steps. Shared by whoever asks for it: never written."""

    step: int
    shadow: State
    optimizer: dict
    tensors: dict[str, Tensor]


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
        self._newest: tuple[Any, State, dict[str, Tensor]] | None = None
        self._reserved = False

    def moment(self) -> Moment:
        """A copy on the host, which many of do not take the GPU's memory.

        Made once for as long as nothing changes: what is written after one learn is what the next one goes back to.
        """
        held = self._lay()
        now = [t._version for t in (*self.shadow.values(), *held.values())], list(held)
        if self._newest is None or self._newest[0] != now:
            self._newest = None  # its memory serves again where nobody else holds it
            tensors: dict[str, Tensor] = {}
            shadow = self.weights.on_host().views
            if self._moments is not None and held:
                copies = self._moments.on_host().views
                tensors = {name: copies[name] for name in held}
            self._newest = now, shadow, tensors
        return Moment(self.step, self._newest[1], {"param_groups": self._groups(), "values": {}}, self._newest[2])

    def reserve(self, moments: int) -> None:
        """Have PyTorch hold pinned memory for so many moments: it is dear to get, and neighbours wait for it."""
        if self.weights.cuda and not self._reserved:
            self._reserved = True
            shapes = self.weights.shapes, self._shapes()
            held = [SideBySide(some, "cpu", pinned=True) for _ in range(moments) for some in shapes]
            del held  # to the allocator, which keeps it

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

    def _lay(self) -> dict[str, Tensor]:
        """What the optimizer keeps, laid side by side where it was not: at first, and after a state was loaded."""
        states = {i: self.optimizer.state[p] for i, p in enumerate(self.shadow.values()) if self.optimizer.state.get(p)}
        if not states:
            return {}
        if self._moments is None:
            self._moments = SideBySide(self._shapes(), self.weights.device)
        views, away = self._moments.views, {}
        for i, state in states.items():
            for slot in SLOTS:
                if state[slot] is not views[_name(i, slot)]:
                    away[_name(i, slot)] = state[slot]
                    state[slot] = views[_name(i, slot)]
        self._moments.copy_(away)
        return {_name(i, slot): views[_name(i, slot)] for i in states for slot in SLOTS}

    def _groups(self) -> list[dict[str, Any]]:
        """As in the optimizer's state_dict, without walking its state."""
        made, n = [], 0
        for group in self.optimizer.param_groups:
            count = len(group["params"])
            made.append({**group, "params": list(range(n, n + count))})
            n += count
        return made


def _name(parameter: int, slot: str) -> str:
    return f"optimizer.{parameter}.{slot}"
