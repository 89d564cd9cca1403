"""The versions of one adapter, in order. Those that nothing new is served under need not stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

State = Mapping[str, Tensor]  # "<layer>.lora_A.weight" -> tensor
HELD = 2  # newest versions that stay: turns go on under the one before the newest


class Versions:
    """`versions[n - 1]` is version n; one that was let go of is read again each time."""

    def __init__(self) -> None:
        self._held: list[State | None] = []
        self._read: Callable[[int], State] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> State:
        held = self._held[index]
        if held is not None:
            return held
        assert self._read is not None
        return self._read(index % len(self._held) + 1)

    def append(self, state: State) -> None:
        self._held.append(state)

    def take_back(self) -> None:
        """The newest one never was."""
        del self._held[-1]

    def let_go(self, read: Callable[[int], State]) -> None:
        """Hold the newest ones alone; `read` gives any by its number."""
        self._read = read
        for old in range(len(self._held) - HELD):
            self._held[old] = None
