"""Saved activations wait for the backward in pinned host memory; the copies run beside the compute, both ways.

PyTorch's save_on_cpu copies on the stream that computes, and weights too. Here the forward goes on while two tensors at
most are on their way out, and the backward finds the next two already on their way in.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .step_key import Layout

SMALLEST = 1 << 20  # bytes; below, a copy's latency is more than its memory is worth
ON_THE_WAY = 2  # tensors that travel at once, each way
NEAR = 16  # saved tensors back that are looked at for the next to bring in


class Lanes(Protocol):
    """Copies between a device and the host, beside the work that computes."""

    def out(self, t: Tensor) -> tuple[Tensor, Any]:
        """(a copy in host memory, the point at which it is whole), after what computes has made `t`."""

    def back(self, host: Tensor, like: Tensor) -> tuple[Tensor, Any]:
        """(a copy on the device, the point at which it is whole). `like` has no storage, only strides."""

    def wait(self, point: Any) -> None:
        """What computes goes on after `point` only."""


class _Parked:
    """A saved tensor: on the device, on its way, or on the host. What autograd's graph holds in its place.

    Attributes:
        here: the tensor while the device has it.
        host: its copy.
        uses: how many nodes will still ask for it.
    """

    def __init__(self, t: Tensor, order: int):
        self.here: Tensor | None = t
        self.storage = weakref.ref(t.untyped_storage())
        self.like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        self.host: Tensor | None = None
        self.order, self.uses = order, 0


class Offload:
    """A context manager around a forward: what it saves for the backward goes to the host.

    Tensors stay on the device that are smaller than `smallest`, that the model holds (weights, their views, quantised
    ones too), that have gaps or overlap in memory, or that are beyond the budget: the first layers' go first, which
    the backward needs last. A tensor that several nodes save is copied once. Values are bit-equal to those without. As
    with any saved-tensor hooks, autograd does not notice when a saved tensor is changed in place.

    Args:
        model: what it holds is never copied.
        host_bytes: most bytes on the host at once; None: no limit. PyTorch's allocator of pinned memory gives powers of
            two, so that up to twice as much may be taken.
        lanes: how copies are made; None: on a stream of their own for a CUDA device, none on a CPU, where memory is
            the host's already.

    Attributes:
        offloaded_bytes, kept_bytes: of the last forward's saved tensors; each tensor counts once.
        why_not: why nothing is copied; "" where it is.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device | str,
        *,
        host_bytes: int | None = None,
        smallest: int = SMALLEST,
        lanes: Lanes | None = None,
    ):
        if host_bytes is not None and host_bytes < 0:
            raise ValueError(f"host_bytes must be 0 or more; got {host_bytes}")
        self.model, self.device = model, torch.device(device)
        self.host_bytes, self.smallest = host_bytes, smallest
        self.why_not = ""
        if lanes is None:
            if self.device.type == "cuda":
                lanes = CudaLanes(self.device)
            else:
                self.why_not = f"activations on {self.device} are not offloaded: only a CUDA device's memory is apart"
        self._lanes = lanes
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._layout: Layout | None = None
        self._held: frozenset[int] = frozenset()
        self.offloaded_bytes = self.kept_bytes = self._on_host = self._count = 0
        self._known: dict[tuple[Any, ...], weakref.ref[_Parked]] = {}
        self._order: dict[int, weakref.ref[_Parked]] = {}
        self._leaving: collections.deque[tuple[_Parked, Any]] = collections.deque()
        self._arriving: dict[int, tuple[Tensor, Any]] = {}

    def __enter__(self) -> Offload:
        if self._lanes is not None:
            self.finish()
            self.offloaded_bytes = self.kept_bytes = 0
            if self._layout is None or not self._layout.same(self.model):
                self._layout = Layout(self.model)
            self._held = self._layout.storages
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(*error)
            self._settle(0)

    def finish(self) -> None:
        """Wait for what is still on its way, and let go of it: a backward that never came leaves nothing behind."""
        assert self._lanes is not None
        self._settle(0)
        for _, point in self._arriving.values():
            self._lanes.wait(point)
        self._arriving.clear()

    # ---- forward

    def _pack(self, t: Tensor) -> Tensor | _Parked:
        storage = t.untyped_storage()
        key = (storage._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype)
        parked = found() if (found := self._known.get(key)) is not None else None
        if parked is None or parked.storage() is not storage:  # another storage may lie where one has died
            if not self._goes(t):
                self.kept_bytes += 0 if storage._cdata in self._held else t.nbytes
                return t.detach()  # a node that saves what it returns would hold itself through it
            parked = self._send(t.detach())
            self._known[key] = weakref.ref(parked)
            weakref.finalize(parked, self._died, key, parked.order, t.nbytes).atexit = False
        parked.uses += 1
        return parked

    def _goes(self, t: Tensor) -> bool:
        if t.device.type != self.device.type or t.nbytes < self.smallest or not _dense(t):
            return False
        if t.untyped_storage()._cdata in self._held:
            return False
        return self.host_bytes is None or self._on_host + t.nbytes <= self.host_bytes

    def _send(self, t: Tensor) -> _Parked:
        assert self._lanes is not None
        parked = _Parked(t, self._count)
        parked.host, point = self._lanes.out(t)
        self._count += 1
        self._order[parked.order] = weakref.ref(parked)
        self._on_host += t.nbytes
        self.offloaded_bytes += t.nbytes
        self._leaving.append((parked, point))
        self._settle(ON_THE_WAY)
        return parked

    def _died(self, key: tuple[Any, ...], order: int, nbytes: int) -> None:
        self._on_host -= nbytes
        del self._order[order]
        if (known := self._known.get(key)) is not None and known() is None:
            del self._known[key]

    def _settle(self, most: int) -> None:
        """Let the device forget all but the newest `most` tensors on their way out, once their copies are whole."""
        while len(self._leaving) > most:
            parked, point = self._leaving.popleft()
            assert self._lanes is not None
            self._lanes.wait(point)
            parked.here = None

    # ---- backward

    def _unpack(self, saved: Tensor | _Parked) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert self._lanes is not None
        if saved.here is None:
            coming = saved.order in self._arriving
            tensor, point = self._arriving.pop(saved.order) if coming else self._fetch(saved)
            self._lanes.wait(point)
            saved.here = tensor
        result = saved.here
        saved.uses -= 1
        if saved.uses <= 0:  # a backward that comes again fetches again
            saved.here = None
        self._ahead(saved.order)
        return result

    def _fetch(self, saved: _Parked) -> tuple[Tensor, Any]:
        assert self._lanes is not None and saved.host is not None
        return self._lanes.back(saved.host, saved.like)

    def _ahead(self, order: int) -> None:
        """Start the copies of what was saved before: the backward will ask for it next."""
        assert self._lanes is not None
        for i in [i for i in self._arriving if i not in self._order]:  # their nodes were never reached
            self._lanes.wait(self._arriving.pop(i)[1])
        for i in range(order - 1, max(order - 1 - NEAR, -1), -1):
            if len(self._arriving) >= ON_THE_WAY:
                return
            parked = found() if (found := self._order.get(i)) is not None else None
            if parked is not None and parked.here is None and parked.uses > 0 and i not in self._arriving:
                self._arriving[i] = self._fetch(parked)


def _dense(t: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, each once, in whatever order."""
    filled = 1
    for size, stride in sorted(((n, s) for n, s in zip(t.shape, t.stride()) if n != 1), key=lambda pair: pair[1]):
        if stride != filled:
            return False
        filled *= size
    return True


class CudaLanes:
    """One stream beside the compute for each direction; host memory is pinned."""

    def __init__(self, device: torch.device):
        self.device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, t: Tensor) -> tuple[Tensor, Any]:
        host = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, pin_memory=True)
        return host, self._copy(self._out, host, t)

    def back(self, host: Tensor, like: Tensor) -> tuple[Tensor, Any]:
        # taken from the compute's own memory, whose earlier use the copy waits for
        there = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=self.device)
        return there, self._copy(self._in, there, host)

    def _copy(self, lane: torch.cuda.Stream, to: Tensor, source: Tensor) -> Any:
        lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(lane), torch.no_grad():
            to.copy_(source, non_blocking=True)
            return lane.record_event()

    def wait(self, point: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(point)


def offload_for(
    model: torch.nn.Module, device: torch.device, note: Callable[[str], None], host_bytes: int | None = None
) -> Offload:
    """What --offload-activations asks for; says so where it changes nothing."""
    made = Offload(model, device, host_bytes=host_bytes)
    if made.why_not:
        note(made.why_not)
    return made
