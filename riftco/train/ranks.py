"""The processes of one run (torchrun starts them): who they are, what they agree on, and what they sum.

Small decisions travel over gloo between hosts' memories, so that no device is waited for; gradients and losses over the
device's own backend. Without torchrun there is one process, and everything here does nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .watch import PeerLost, Watch

NEWS = 5.0  # seconds that a failed exchange waits to hear which process has ended
BUCKET_BYTES = 256 << 20  # of gradients that are copied side by side and summed at once
PATIENCE = datetime.timedelta(
    days=7
)  # a process that is alive may compute as long as it likes; Watch notices dead ones

T = TypeVar("T")


class ElsewhereError(ValueError):
    """Another process of the run found something wrong, which it says."""

    of_another = True


class DisagreementError(ValueError):
    """The processes of a run were given different things; all raise it, the first one says it."""

    def __init__(self, main: bool, what: str):
        super().__init__(f"the processes disagree about {what}; they must read the same files with one riftco")
        self.of_another = not main


class Ranks:
    """This process among those of the run.

    Attributes:
        rank, world: its number from 0, and how many there are.
        device: where it computes.
        main: whether it is the one that prints and writes.
        devices: the group over the device's backend; None where there is one process.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.rank, self.world = 0, 1
        self.devices: Any = None
        self._host: Any = None
        self._store: Any = None
        self._watch: Watch | None = None

    @classmethod
    def join(cls, device: torch.device | str = "cpu") -> Ranks:
        """Meet the other processes that torchrun started; one that ends before `close` ends this one too.

        Args:
            device: where this one computes, if that is known already; `on` says it later.
        """
        made = cls()
        if started_by_torchrun() > 1:
            if not dist.is_initialized():
                backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
                dist.init_process_group(backend, timeout=PATIENCE)
            made.rank, made.world, made.devices = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
            made._host = dist.new_group(backend="gloo", timeout=PATIENCE)
            made._store = dist.distributed_c10d._get_default_store()
            made._watch = Watch(made.rank, made.world, made._store)
        made.on(device)
        return made

    def on(self, device: torch.device | str) -> None:
        """This process computes on `device`."""
        self.device = torch.device(device)
        if self.device.type == "cuda" and not self.alone:
            torch.cuda.set_device(self.device)

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world == 1

    # ---- what is shared out

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's items: every `world`-th."""
        return list(items[self.rank :: self.world])

    def most_of(self, items: Sequence[Any]) -> int:
        """The most items that a process has of them."""
        return -(-len(items) // self.world)

    def draw(self, seed: int, step: int) -> None:
        """Give processes beside the first a random stream of their own for a step, which a resume gives them again."""
        if self.rank:
            torch.manual_seed(random.Random(f"{seed}/{self.rank}/{step}").getrandbits(63))

    # ---- what is agreed on, in host memory

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all processes."""
        if self.alone:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64)
        self._call(dist.all_reduce, mine, op=dist.ReduceOp.MAX, group=self._host)
        return mine.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in one of the processes; all of them ask together."""
        return bool(self.largest(float(flag))[0])

    def agree(self, code: int, why: str = "") -> tuple[int, int, str]:
        """(the largest code, the first process that has it, its `why`)."""
        if self.alone:
            return code, 0, why
        if code:
            self._call(self._store.set, f"riftco/why/{self.rank}", why)
        (largest,) = self.largest(code * self.world + self.world - 1 - self.rank)
        code, behind = divmod(int(largest), self.world)
        first = self.world - 1 - behind
        if not code:
            return 0, 0, ""
        return code, first, self._call(self._store.get, f"riftco/why/{first}").decode()

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """The processes come out of the block together: an error in one of them is an error in all.

        Raises:
            ElsewhereError: another process failed first, and says why.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        if self.alone:
            if failed is not None:
                raise failed
            return
        code, first, why = self.agree(int(failed is not None), str(failed))
        if failed is not None and first == self.rank:
            raise failed
        if code:
            raise ElsewhereError(f"process {first}: {why}") from failed

    def same(self, what: str, *values: float) -> None:
        """Refuse to go on where processes have different values: they would not train on one batch.

        Raises:
            DisagreementError: naming `what`.
        """
        ends = self.largest(*values, *(-v for v in values))
        if any(high != -low for high, low in zip(ends[: len(values)], ends[len(values) :])):
            raise DisagreementError(self.main, what)

    def wait(self) -> None:
        """Until all processes are here."""
        self.largest(0.0)

    # ---- what is summed, on the device

    def sum_(self, *tensors: Tensor) -> None:
        """Each tensor becomes its sum over all processes."""
        if self.alone:
            return
        for t in tensors:
            self._call(dist.all_reduce, t, group=self.devices)

    def sum_gradients(self, params: Sequence[Tensor]) -> None:
        """The gradients become their sums; a parameter without one, here or in any process, counts as zeros.

        Few calls, of many gradients laid side by side. A large gradient is summed where it lies.
        """
        if self.alone:
            return
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets([p.grad for p in params if p.grad is not None]):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                self.sum_(bucket[0])
                continue
            flat = torch.cat([g.reshape(-1) for g in bucket])
            self.sum_(flat)
            pieces = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [piece.view(g.shape) for piece, g in zip(pieces, bucket)])

    def copy_of_first(self, params: Sequence[Tensor]) -> None:
        """Parameters become those of the first process."""
        if not self.alone:
            with torch.no_grad():
                for p in params:
                    self._call(dist.broadcast, p, src=0, group=self.devices)

    # ---- how it ends

    def undisturbed(self) -> contextlib.AbstractContextManager:
        """Within the block the end of another process does not end this one: it writes files."""
        return contextlib.nullcontext() if self._watch is None else self._watch.undisturbed

    def lost(self, seconds: float = 0.0) -> PeerLost | None:
        """Whether another process has ended, waiting a moment for the news."""
        return None if self._watch is None else self._watch.lost(seconds)

    def _call(self, function, *arguments, **options):
        """A failed exchange almost always means that a process has ended: then that is what is said."""
        try:
            return function(*arguments, **options)
        except RuntimeError as error:
            raise (self.lost(NEWS) or error) from error

    def close(self, error: BaseException | None = None) -> None:
        """Leave the others: in peace, or with the reason, which ends them too."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(None if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}")
        if self._host is not None and error is None:
            self._host = None
            dist.destroy_process_group()

    @contextlib.contextmanager
    def until_done(self) -> Iterator[Ranks]:
        """Within the block the processes belong together; the first error in one ends all."""
        try:
            yield self
        except BaseException as error:
            # a collective that broke off says less than which process has ended
            broke = type(error) is RuntimeError or isinstance(error, dist.DistError)
            lost = self.lost(NEWS) if broke else None
            self.close(lost or error)
            if lost is not None:
                raise lost from error
            raise
        self.close()


def started_by_torchrun() -> int:
    """How many processes torchrun started; 0 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "0")) if "MASTER_ADDR" in os.environ else 0


def local_rank() -> int:
    """This process's number on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world() -> int:
    """How many processes of the run are on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype, together at most BUCKET_BYTES; in their order, which is the same in every process."""
    for dtype in dict.fromkeys(g.dtype for g in grads):
        bucket: list[Tensor] = []
        for g in (g for g in grads if g.dtype == dtype):
            if bucket and sum(b.nbytes for b in bucket) + g.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(g)
        if bucket:
            yield bucket
