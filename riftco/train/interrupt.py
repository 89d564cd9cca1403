"""Ctrl-C and SIGTERM as a request to stop after the current micro-batch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

from .ranks import Ranks


class Interrupt:
    """True once a signal has come, here or in another process of the run (`elsewhere`)."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.elsewhere = False

    def __bool__(self) -> bool:
        return self.signal is not None or self.elsewhere

    def agreed(self, ranks: Ranks) -> bool:
        """The same in all processes, which ask together."""
        self.elsewhere = ranks.any(bool(self))
        return self.elsewhere

    def __call__(self, number: int, _frame) -> None:
        if self.signal is not None:  # the second one does not wait
            raise KeyboardInterrupt
        self.signal = number


@contextlib.contextmanager
def stop_signals() -> Iterator[Interrupt]:
    """Within the block SIGINT and SIGTERM set the Interrupt; a second one raises KeyboardInterrupt.

    Python delivers signals to the main thread only: elsewhere the block changes nothing.
    """
    asked = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
