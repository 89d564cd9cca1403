"""Moments in pages: slabs of them on the parameters' device, the rest in host memory, passing through in turn."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from . import quantized
from .spec import pages_in, runs_of

SLAB_BYTES = 32 << 20  # one allocation, and one transfer: smaller ones cost the host more time than the link
BUFFERS = 3  # slabs in passage: one arriving, one being updated, one leaving


class Pool:
    """Pages of one dtype (uint8: quantised), numbered in the order of their allocation, in slabs.

    `slabs[j]` holds the pages from number `starts[j]` on. It lies on `device` where `left()` bytes there are enough
    (None: always), else in host memory, pinned for a CUDA device.
    """

    def __init__(self, page_size: int, dtype: torch.dtype, device: torch.device, left: Callable[[], int | None]):
        self.page_size, self.dtype, self.device, self.left = page_size, dtype, device, left
        self.slabs: list[Tensor] = []
        self.starts: list[int] = []
        self.hosted: list[bool] = []
        self.pages = 0

    @property
    def page_bytes(self) -> int:
        size = self.page_size
        return quantized.page_bytes(size) if self.dtype == torch.uint8 else 2 * size * self.dtype.itemsize

    @property
    def resident_bytes(self) -> int:
        return sum(s.nbytes for s, hosted in zip(self.slabs, self.hosted) if not hosted)

    @staticmethod
    def pages_in(slab: Tensor) -> int:
        return pages_in(slab)

    def grow(self, sizes: Sequence[int]) -> list[int]:
        """Zeroed pages for tensors of these sizes: the number of each one's first."""
        firsts = []
        wanted = self.pages
        for size in sizes:
            firsts.append(wanted)
            wanted += -(-size // self.page_size)
        most = max(SLAB_BYTES // self.page_bytes, 1)
        while self.pages < wanted:
            pages = min(most, wanted - self.pages)
            left = self.left()
            hosted = left is not None and pages * self.page_bytes > left
            self.slabs.append(self._zeros(pages, hosted))
            self.starts.append(self.pages)
            self.hosted.append(hosted)
            self.pages += pages
        return firsts

    def _zeros(self, pages: int, hosted: bool) -> Tensor:
        coded = self.dtype == torch.uint8
        shape = (pages, self.page_bytes) if coded else (2, pages, self.page_size)
        if hosted:
            return torch.zeros(shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def touched(self, first: int, numel: int) -> range:
        """Indices of the slabs that hold pages of this tensor."""
        if not numel:
            return range(0)
        last = first + -(-numel // self.page_size) - 1
        return range(bisect_right(self.starts, first) - 1, bisect_right(self.starts, last))

    def read(self, first: int, numel: int) -> tuple[Tensor, ...]:
        """Host copies of a tensor's moments: (m, v) flat, or (codes of m, of v, scales of m, of v)."""
        parts: list[tuple[Tensor, ...]] = []
        for slab, a, b, lo, hi in runs_of(numel, first, self.slabs, self.starts, self.page_size):
            if self.dtype == torch.uint8:
                n = hi - lo
                sizes = n, n, -(-n // quantized.BLOCK), -(-n // quantized.BLOCK)
                rows = quantized.parts(slab[a:b].cpu(), self.page_size)
                parts.append(tuple(r.reshape(-1)[:size] for r, size in zip(rows, sizes)))
            else:
                parts.append(tuple(moment[a:b].reshape(-1)[: hi - lo].cpu() for moment in slab))
        empty = torch.empty(0, dtype=self.dtype)
        if not parts:
            return (empty, empty, torch.empty(0), torch.empty(0))[: 4 if self.dtype == torch.uint8 else 2]
        return tuple(torch.cat(column) for column in zip(*parts))

    def write(self, first: int, numel: int, values: Sequence[Tensor]) -> None:
        """The inverse of `read`."""
        for slab, a, b, lo, hi in runs_of(numel, first, self.slabs, self.starts, self.page_size):
            if self.dtype == torch.uint8:
                rows = slab[a:b].cpu()
                blocks = slice(lo // quantized.BLOCK, -(-hi // quantized.BLOCK))
                for part, value, here in zip(
                    quantized.parts(rows, self.page_size), values, (slice(lo, hi), slice(lo, hi), blocks, blocks)
                ):
                    flat = part.reshape(-1)
                    flat[: len(value[here])] = value[here].to(flat)
                    part.copy_(flat.view(part.shape))
                slab[a:b] = rows
            else:
                for moment, value in zip(slab, values):
                    moment[a:b].view(-1)[: hi - lo] = value[lo:hi].to(moment)


class Lanes:
    """Where things run: "in" and "out" are copies, "main" is the caller's stream. On a CPU everything runs at once."""

    def do(self, lane: str, work: Callable[[], object]) -> None:
        work()

    def mark(self, lane: str) -> object:
        """A point that `wait` waits for: all that the lane was given until now."""
        return None

    def wait(self, lane: str, point: object) -> None:
        """What the lane is given from now on comes after `point`."""

    def adopt(self, buffers: Sequence[Tensor]) -> None:
        """Memory of the main lane that the others will use."""

    def finish(self) -> None:
        """The host waits for all copies."""


class CudaLanes(Lanes):
    def __init__(self, device: torch.device):
        self.device = device
        self.streams = {name: torch.cuda.Stream(device) for name in ("in", "out")}

    def _stream(self, lane: str) -> torch.cuda.Stream:
        return self.streams.get(lane) or torch.cuda.current_stream(self.device)

    def do(self, lane: str, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream(lane)):
            work()

    def mark(self, lane: str) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: str, point: object) -> None:
        assert isinstance(point, torch.cuda.Event)
        self._stream(lane).wait_event(point)

    def adopt(self, buffers: Sequence[Tensor]) -> None:
        for buffer in buffers:
            for stream in self.streams.values():
                buffer.record_stream(stream)

    def finish(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()


class Passage:
    """Brings slabs of host memory to the device, one after the other, and what became of them back.

    The k-th slab uses buffer k % BUFFERS. It arrives when the slab before it in that buffer has left and its own last
    departure is over, and leaves when its update is done: copies both ways run beside the updates.
    """

    def __init__(self, device: torch.device, lanes: Lanes | None = None):
        self.device = device
        self.lanes = lanes or (CudaLanes(device) if device.type == "cuda" else Lanes())
        self.buffers: list[Tensor] = []
        self.left: dict[int, object] = {}  # buffer -> when its slab is back in host memory
        self.back: dict[int, object] = {}  # address of a slab in host memory -> the same
        self.coming: deque[Tensor] = deque()
        self.arriving: deque[tuple[Tensor, int, Tensor, object]] = deque()
        self.fetched = 0

    def begin(self, slabs: Sequence[Tensor]) -> None:
        """Start fetching; what the caller does before `run` overlaps. Each slab once."""
        self.coming, self.fetched = deque(slabs), 0
        self._reserve(max((s.nbytes for s in slabs), default=0))
        for _ in range(BUFFERS):
            self._fetch()

    def run(self, work: Callable[[int, Tensor], None]) -> None:
        """work(k, buffer) updates slab k, which then lies in the buffer."""
        lanes, k = self.lanes, 0
        while self.arriving:
            slab, b, buffer, arrived = self.arriving.popleft()
            lanes.wait("main", arrived)
            lanes.do("main", partial(work, k, buffer))
            lanes.wait("out", lanes.mark("main"))
            lanes.do("out", partial(slab.copy_, buffer, non_blocking=True))
            self.left[b] = self.back[slab.data_ptr()] = lanes.mark("out")
            self._fetch()
            k += 1

    def _fetch(self) -> None:
        if not self.coming:
            return
        slab, b = self.coming.popleft(), self.fetched % BUFFERS
        buffer = self.buffers[b][: slab.nbytes].view(slab.dtype).view(slab.shape)
        for point in (self.left.get(b), self.back.get(slab.data_ptr())):
            if point is not None:
                self.lanes.wait("in", point)
        self.lanes.do("in", partial(buffer.copy_, slab, non_blocking=True))
        self.arriving.append((slab, b, buffer, self.lanes.mark("in")))
        self.fetched += 1

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= (self.buffers[0].numel() if self.buffers else 0):
            return
        self.lanes.finish()
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(BUFFERS)]
        self.lanes.adopt(self.buffers)
        self.lanes.wait("in", self.lanes.mark("main"))  # their memory may have had another use there
