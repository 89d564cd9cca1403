"""Leaving a part of the time to others: a duty cycle."""

from __future__ import annotations

import time
from collections.abc import Callable

SLICE = 0.05  # seconds between looks at a request to stop


class DutyCycle:
    """Works `fraction` of the time: after t seconds of work the next begins t * (1 / fraction - 1) later.

    Args:
        fraction: in (0, 1]; 1 never waits.
        busy: whether anyone else needs the time now; while nobody does, work starts at once.
        stopped: whether a stop was asked for: a wait ends then.
    """

    def __init__(
        self,
        fraction: float,
        *,
        busy: Callable[[], bool] = lambda: True,
        stopped: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not 0 < fraction <= 1:
            raise ValueError(f"a duty cycle's fraction must be in (0, 1]; got {fraction}")
        self.fraction, self.busy, self.stopped = fraction, busy, stopped
        self._sleep, self._clock = sleep, clock
        self._until = 0.0

    @property
    def debt(self) -> float:
        """Seconds that are still to be waited."""
        return max(self._until - self._clock(), 0.0)

    def worked(self, seconds: float) -> None:
        """So many seconds were computed: what they owe to others comes on top of the debt."""
        self._until = self._clock() + self.debt + seconds * (1 / self.fraction - 1)

    def wait(self) -> None:
        """Return when the debt is paid, nobody else is busy, or a stop was asked for."""
        while (left := self.debt) > 0 and self.busy() and not self.stopped():
            self._sleep(min(left, SLICE))

    def drop(self) -> None:
        """Forget the debt: on a cancellation nobody sleeps on the way out."""
        self._until = 0.0
