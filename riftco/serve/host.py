"""A few whole numbers of the device, on the host."""

from __future__ import annotations

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
