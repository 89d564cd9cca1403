"""Notices at once when another process of the run ends, and ends this one with a clear message.

A process that waits inside a device's collective cannot notice by itself: it would hang until a timeout. So a thread of
each process listens to the process before it in a ring; a connection that breaks is a process that ended.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GRACE = 10.0  # seconds for the main thread to end by itself
BYE = 1


class PeerLost(RuntimeError):
    """Another process of the run ended; this one cannot go on without it."""


class Watch:
    def __init__(self, rank: int, world: int, store: Any, patience: timedelta):
        self.rank, self.world, self.store = rank, world, store
        self.group = dist.new_group(backend="gloo", timeout=patience)
        self._why: PeerLost | None = None
        self._news, self._closed = threading.Event(), threading.Event()
        dist.barrier(group=self.group)  # connects everyone
        self._thread = threading.Thread(target=self._listen, name="riftco-watch", daemon=True)
        self._thread.start()

    def lost(self, seconds: float = 0.0) -> PeerLost | None:
        self._news.wait(seconds)
        return self._why

    def close(self, error: str | None = None) -> None:
        """In peace: wait for the others to close, too. With an error: say it and be gone."""
        self._closed.set()
        if error is not None:
            if self._why is None:
                self._say(f"process {self.rank} failed: {error}")
            return
        try:
            dist.send(torch.tensor([BYE]), dst=(self.rank + 1) % self.world, group=self.group)
        except RuntimeError:
            return  # it has ended already, after a close of its own or with news for its follower
        self._thread.join()

    def _listen(self) -> None:
        before = (self.rank - 1) % self.world
        try:
            dist.recv(torch.empty(1, dtype=torch.int64), src=before, group=self.group)
            return
        except RuntimeError:
            pass
        if self._closed.is_set():
            return
        self._why = PeerLost(
            f"{self._cause(before)}; process {self.rank} stops too: nothing of this step is kept, "
            "the last checkpoint stands; go on with --resume, with any number of processes"
        )
        self._news.set()
        if not self._closed.wait(GRACE):  # the main thread waits in a device's collective
            print(f"riftco: {self._why}", file=sys.stderr, flush=True)
            os._exit(1)

    def _cause(self, before: int) -> str:
        """What was said first; else that the process before this one ended, said for those behind."""
        try:
            if self.store.check(["riftco/ended"]):
                return self.store.get("riftco/ended").decode()
        except RuntimeError:  # the store has gone with the process that kept it
            return f"process {before} ended"
        cause = f"process {before} ended without a word (killed, or out of host memory)"
        self._say(cause)
        return cause

    def _say(self, cause: str) -> None:
        try:
            if not self.store.check(["riftco/ended"]):
                self.store.set("riftco/ended", cause)
        except RuntimeError:
            return  # nobody is there to read it
