"""Recording work on a GPU once, to do it again with one launch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .failures import diagnostic, out_of_memory

T = TypeVar("T")


class CannotCapture(Exception):
    """The work stays eager; the message says why."""


class Captured(Protocol):
    """Work that was recorded: `replay` does it again, on the memory that it was recorded on."""

    output: Any
    pool_bytes: int

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Give its memory back."""


class Capture(Protocol):
    def why_not(self, device: torch.device) -> str:
        """Why nothing can be captured on `device`; "" where it can."""

    def __call__(self, run: Callable[[], Any], device: torch.device, *, warm: bool = False) -> Captured:
        """Record `run`, which may be run before for warming up: not where its like was recorded before (`warm`).
        Raises CannotCapture."""


def attempt(make: Callable[[], T], what: str) -> tuple[T | None, str]:
    """(what `make` captures, ""), or (None, why it stays eager): it cannot be captured, or `what` does not fit. No
    traceback holds what a capture that failed had made once this has returned."""
    try:
        return make(), ""
    except CannotCapture as refused:
        return None, str(refused)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None, f"{what} does not fit in memory: {diagnostic(error)}"


def _first(error: BaseException) -> BaseException:
    """What ended a capture, not the error that says that it had ended."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class CudaCapture:
    """Records with CUDA graphs.

    Args:
        shared: all that this records takes its memory from one pool: what one replay has left there, the next one of
            another may overwrite. By default each has a pool of its own.
    """

    def __init__(self, *, shared: bool = False):
        self._shared = shared
        self._pool: Any = None
        self._made: weakref.WeakSet[CudaGraphed] = weakref.WeakSet()  # in that pool
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def why_not(self, device: torch.device) -> str:
        return "" if device.type == "cuda" else f"CUDA graphs need a CUDA device, this is {device}"

    def __call__(self, run: Callable[[], Any], device: torch.device, *, warm: bool = False) -> Captured:
        with torch.cuda.device(device):
            current, side = torch.cuda.current_stream(), self._stream(device)
            if not warm:
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    run()  # kernels, handles and workspaces of this stream are there from now on
                current.wait_stream(side)
                gc.collect()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            collects = gc.isenabled()
            gc.disable()  # a collection while capturing might free what CUDA does not let go of then
            try:
                made = CudaGraphed(run, current, side, self._pool_now())
                self._made.add(made)
                return made
            finally:
                if collects:
                    gc.enable()

    def _pool_now(self) -> Any:
        """One for as long as a graph lives in it: PyTorch takes none up again that all of them have left."""
        if self._shared and not any(graph.live for graph in self._made):
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """One for all captures: cuBLAS keeps a workspace for each."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream()
        return self._streams[device]


def _end_drawing(device: torch.device, numbers: Tensor) -> None:
    """Give the default generator a state of its own again, with these numbers.

    Where ending a capture fails, PyTorch leaves the generator's state as one of that capture, and every later draw
    outside of a graph is refused.
    """
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    generator.set_state(numbers)


class CudaGraphed:
    """One torch.cuda.CUDAGraph."""

    def __init__(self, run: Callable[[], Any], current: torch.cuda.Stream, side: torch.cuda.Stream, pool: Any = None):
        torch.cuda.empty_cache()  # as the capture does when it begins: what is taken from here on is its own
        before, numbers = torch.cuda.memory_reserved(), torch.cuda.get_rng_state(current.device)
        self.live, self.graph = True, torch.cuda.CUDAGraph()
        why = ""
        try:
            # the outer block puts the stream back where a failed capture leaves its own
            with torch.cuda.stream(current), torch.cuda.graph(self.graph, pool=pool, stream=side):
                self.output = run()
        except Exception as error:
            if out_of_memory(_first(error)):
                _end_drawing(current.device, numbers)
                raise _first(error) from None
            why = diagnostic(_first(error))
        if why:
            torch.cuda.synchronize()  # raises where the device itself has failed
            _end_drawing(current.device, numbers)
            raise CannotCapture(f"the step cannot be captured: {why}")
        self.pool_bytes = torch.cuda.memory_reserved() - before

    def replay(self) -> None:
        self.graph.replay()

    def reset(self) -> None:
        self.live = False
        self.graph.reset()
        del self.output
