"""Recorded steps, by what they were recorded for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn

from ..models.held import all_held
from ..train.capture import Captured


@dataclass(frozen=True)
class Graph:
    """A recorded step, and what it reads: the layers of its adapters, and the model's tensors where they were."""

    captured: Captured
    layers: Mapping[str, nn.Module]
    places: tuple[int, ...]


K = TypeVar("K")
G = TypeVar("G", bound=Graph)


class Graphs(OrderedDict[K, G], Generic[K, G]):
    """Key -> Graph, the longest unused one first.

    Args:
        model: whose tensors they read.
        most: how many are kept.
    """

    def __init__(self, model: nn.Module, most: int):
        super().__init__()
        self._held, self._most = tuple(all_held(model)), most

    def places(self) -> tuple[int, ...]:
        """Where the model's tensors are."""
        return tuple(map(Tensor.data_ptr, self._held))

    def find(self, key: K, layers: Mapping[str, nn.Module]) -> G | None:
        """The graph of a key; one that has read other layers, or tensors that have moved since, is dropped."""
        found = self.get(key)
        if found is None:
            return None
        if found.layers is layers and found.places == self.places():
            self.move_to_end(key)
            return found
        self.drop(key)
        return None

    def make_room(self) -> None:
        """Let the longest unused ones go, so that one more may be recorded."""
        while len(self) >= self._most:
            self.drop(next(iter(self)))

    def drop(self, key: K) -> None:
        """Give a graph's memory back."""
        self.pop(key).captured.reset()
