"""An event on its way to the disk while serving goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait


class Writing:
    """What a learn changed stands in memory; the disk has it once this is done.

    Args:
        future: of the write.
        take_back: makes memory what it was before the event.
    """

    def __init__(self, future: Future[None], take_back: Callable[[], None]):
        self._future, self._take_back = future, take_back

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self, seconds: float | None = None) -> None:
        """Return once the disk has said yes or no, or after so many seconds."""
        wait([self._future], seconds)

    def settle(self) -> None:
        """Take the event back if the disk refused it. Once, and by who has the engine."""
        if self._future.exception() is not None:
            self._take_back()

    def check(self) -> None:
        """Raise what the disk refused it with."""
        self._future.result()
