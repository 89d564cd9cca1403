"""Notices at once when another process of the run ends, and ends this one with a clear message.

A process that waits inside a device's collective cannot notice by itself: it would hang until a timeout. So a thread of
each process listens to the process before it in a ring; a connection that breaks is a process that ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from typing import Any

GRACE = 3.0  # seconds for the main thread to end by itself
BYE = b"."
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))  # a host that is gone says nothing


class PeerLost(RuntimeError):
    """Another process of the run ended; this one cannot go on without it."""


class Watch:
    """Args: this process's number, how many there are, and the store through which they find each other.

    Attributes:
        undisturbed: held while the main thread writes what must be whole.
    """

    def __init__(self, rank: int, world: int, store: Any):
        self.rank, self.world, self.store = rank, world, store
        self._why: PeerLost | None = None
        self._news, self._closed = threading.Event(), threading.Event()
        self.undisturbed = threading.Lock()
        self._before, self._after = self._meet()
        self._thread = threading.Thread(target=self._listen, name="riftco-watch", daemon=True)
        self._thread.start()

    def _meet(self) -> tuple[socket.socket, socket.socket]:
        """Connections to the process before this one, and from the one behind it."""
        family, own = _own_address()
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((own, 0))
            listener.listen(1)
            self.store.set(f"riftco/watch/{self.rank}", f"{own} {listener.getsockname()[1]}")
            host, port = self.store.get(f"riftco/watch/{(self.rank - 1) % self.world}").decode().split()
            before = socket.create_connection((host, int(port)))
            before.settimeout(None)
            before.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                if hasattr(socket, name):
                    before.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            after, _ = listener.accept()
        return before, after

    def lost(self, seconds: float = 0.0) -> PeerLost | None:
        """Why this process must end, waiting a moment for the news."""
        self._news.wait(seconds)
        return self._why

    def close(self, error: str | None = None) -> None:
        """In peace: wait for the others to close, too. With an error: say it and be gone."""
        if error is None:
            with contextlib.suppress(OSError):  # it has ended already, which is no matter here
                self._after.sendall(BYE)
            self._thread.join()
        self._closed.set()
        if error is not None and self._why is None:
            self._say(f"process {self.rank} failed: {error}")
        for connection in (self._before, self._after):
            with contextlib.suppress(OSError):  # the other end has closed it
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._before.close()
        self._after.close()

    def _listen(self) -> None:
        before = (self.rank - 1) % self.world
        try:
            heard = self._before.recv(1)
        except OSError:
            heard = b""
        if heard == BYE or self._closed.is_set():
            return
        self._why = PeerLost(
            f"{self._cause(before)}; process {self.rank} stops too: nothing of this step is kept, "
            "--resume goes on from the last checkpoint, if there is one, with any number of processes"
        )
        self._news.set()
        with contextlib.suppress(OSError):  # on to the next
            self._after.shutdown(socket.SHUT_RDWR)
        if not self._closed.wait(GRACE):  # the main thread waits in a device's collective
            with self.undisturbed:
                if not self._closed.is_set():
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
        with contextlib.suppress(RuntimeError):  # the store has gone: nobody is there to read it
            if not self.store.check(["riftco/ended"]):
                self.store.set("riftco/ended", cause)


def _own_address() -> tuple[socket.AddressFamily, str]:
    """How the other processes reach this host: as it looks from where they all meet."""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, _, _, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect(address)
        return family, probe.getsockname()[0]
