"""The way of a micro-batch from the host to a GPU: through pinned buffers that are made once and used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .batch import TENSORS, Batch
from .geometry import Geometry

FIELDS = (*TENSORS, "positions", "cu_seqlens")


class Staging:
    """Copies batches to `device`. Two sets of buffers take turns, so that one fills while the other travels; they grow
    to the largest batch and keep that capacity.

    Args:
        allocate: makes a host buffer of `count` elements of a dtype; pinned memory by default.
    """

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[int, torch.dtype], Tensor] = lambda n, dtype: torch.empty(n, dtype=dtype, pin_memory=True),
    ):
        self.device, self._allocate = device, allocate
        self._buffers: list[dict[tuple[str, torch.dtype], Tensor]] = [{}, {}]
        self._left: list[Any] = [None, None]  # an event for each set: its last copy has left the host
        self._turn = 0

    def __call__(self, batch: Batch) -> Batch:
        self._turn = 1 - self._turn
        left = self._left[self._turn]
        if left is not None:
            left.synchronize()
        moved: dict[str, Any] = {}
        for name in FIELDS:
            value = getattr(batch, name)
            moved[name] = value if value is None else self._through(name, value)
        if self.device.type == "cuda":
            self._left[self._turn] = torch.cuda.current_stream(self.device).record_event()
        geometry = Geometry(moved.pop("positions"), moved.pop("cu_seqlens"), batch.max_seqlen)
        return replace(batch, geometry=geometry, **moved)

    def _through(self, name: str, value: Tensor) -> Tensor:
        buffers, key = self._buffers[self._turn], (name, value.dtype)
        if key not in buffers or buffers[key].numel() < value.numel():
            buffers[key] = self._allocate(value.numel(), value.dtype)
        host = buffers[key][: value.numel()].view(value.shape)
        host.copy_(value)  # the whole of what travels is written: nothing of an earlier batch is left
        return host.to(self.device, non_blocking=True, copy=True)
