"""Numbers on their way between host and device: through pinned memory beside a GPU, waited for as late as can be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostRow:
    """Reads up to `most` numbers through pinned memory: one copy that is queued behind the work, and one wait."""

    def __init__(self, most: int, device: torch.device):
        self._row = self._event = None
        if device.type == "cuda":
            self._row, self._event = torch.empty(most, dtype=torch.int64, pin_memory=True), torch.cuda.Event()

    def __call__(self, t: Tensor) -> list[int]:
        """The numbers in t [n], int64."""
        return self.wait(self.begin(t))

    def begin(self, t: Tensor) -> Tensor:
        """Queue their copy behind the work; what `wait` takes."""
        if self._row is None or self._event is None:
            return t
        row = self._row[: len(t)]
        row.copy_(t, non_blocking=True)
        self._event.record(torch.cuda.current_stream(t.device))
        return row

    def wait(self, row: Tensor) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return row.tolist()


class DeviceRow:
    """Whole numbers on the device that the host fills again and again: one copy each time, which nobody waits for.

    Between `writable` and `send` the host's side may be written.

    Attributes:
        host, there: int64 [n], zeros at first.
    """

    def __init__(self, n: int, device: torch.device):
        pinned = device.type == "cuda"
        self.there = torch.zeros(n, dtype=torch.int64, device=device)
        self.host = torch.zeros(n, dtype=torch.int64, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None

    def writable(self) -> Tensor:
        """The host's side, once the last copy has read it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.host

    def send(self) -> None:
        """Queue the copy in front of what is launched next."""
        self.there.copy_(self.host, non_blocking=self._copied is not None)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.there.device))


def sent(numbers: Sequence, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A few numbers on the device, once."""
    pinned = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)
