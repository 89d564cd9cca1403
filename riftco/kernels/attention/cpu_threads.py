"""Groups of heads side by side, each in a thread that shares none of its operations.

Operations that PyTorch spreads over threads wait for all of them at each end, which a busy machine makes slow; a group
of heads by itself waits for nobody.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
_POOLS: dict[int, ThreadPoolExecutor] = {}
_LOCK = threading.Lock()
os.register_at_fork(after_in_child=_POOLS.clear)  # threads do not survive a fork


def each(groups: Iterable[T], run: Callable[[T], R], alone: bool = False) -> list[R]:
    """`run` every group, in as many threads as PyTorch would use inside each operation; one by one if `alone`."""
    groups = list(groups)
    threads = torch.get_num_threads()
    if alone or threads <= 1 or len(groups) <= 1:
        return [run(group) for group in groups]
    inference = torch.is_inference_mode_enabled()

    def one(group: T) -> R:
        with torch.inference_mode(inference), torch.no_grad():
            return run(group)

    return list(_pool(threads).map(one, groups))  # raises what a group raised


def _pool(threads: int) -> ThreadPoolExecutor:
    with _LOCK:
        if threads not in _POOLS:
            pool, ready = ThreadPoolExecutor(threads, "riftco-attention"), threading.Barrier(threads + 1)

            def begin() -> None:
                torch.set_num_threads(1)  # of this thread, and of threads that have not asked yet
                ready.wait()

            for _ in range(threads):
                pool.submit(begin)
            ready.wait()
            torch.set_num_threads(threads)  # for those
            _POOLS[threads] = pool
        return _POOLS[threads]
