"""A step's forward and backward as one CUDA graph: captured once for a shape, replayed with new numbers.

Micro-batches come padded (data.Buckets): where documents lie and which tokens carry labels are numbers, too. The graph
of one key is kept. Whatever could make it wrong drops it: another key, a forward of the model outside of it
(evaluation, scoring, generation, a memory preflight), an error, a loaded state. The optimizer stays outside: its update
is a few launches, all or nothing, and its addresses and step counts are the host's.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..data import Batch
from ..data.geometry import Geometry
from ..data.staging import FIELDS
from .capture import Capture, Captured, CudaCapture, attempt
from .state import random_state, set_random_state
from .step_key import Layout, StepKey, step_key

Compute = Callable[[Batch, Tensor], Tensor]  # forward and backward of a batch with this denominator; the loss


class StepGraph:
    """The cache of one captured step.

    A shape is captured when it comes twice in a row: the first time, its micro-batch is computed eagerly, which
    compiles its kernels. Gradients are added into buffers that stay, so that micro-batches accumulate as ever.

    Args:
        model, optimizer: those of the trainer.
        note: told of every capture, of what drops one, and why steps stay eager.
        capture: how work is recorded; CUDA graphs by default.

    Attributes:
        off: why nothing is captured any more; "" while it may be.
        captured, replayed, eager: micro-batches.
        drops: reason -> how often it dropped a graph.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        note: Callable[[str], None] = print,
        capture: Capture | None = None,
    ):
        self.model, self.optimizer, self.note = model, optimizer, note
        self._capture = capture or CudaCapture()
        self._entry: _Entry | None = None
        self._last: StepKey | None = None
        self._layout: Layout | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.off = ""
        self.captured = self.replayed = self.eager = 0
        self.drops: collections.Counter[str] = collections.Counter()

    @property
    def pool_bytes(self) -> int:
        """What the captured step holds for itself: activations and workspaces. Gradients come on top."""
        return 0 if self._entry is None else self._entry.captured.pool_bytes

    def captures(self, device: torch.device) -> bool:
        """Whether steps on `device` may be captured; else they are computed as if nobody had asked for a graph."""
        if not self.off and (why := self._capture.why_not(device)):
            self._turn_off(why)
        return not self.off

    def __call__(self, batch: Batch, there: Batch, denominator: int, compute: Compute) -> Tensor:
        """The loss of a micro-batch, whose gradients have been added to the parameters'.

        Args:
            batch: on the host; there: the same on the device.
            compute: forward and backward; it must depend on its arguments alone.
        """
        device = there.input_ids.device
        if not self.captures(device):
            return self._eagerly(there, denominator, compute)
        if self._layout is None or not self._layout.same(self.model, self.optimizer):
            self._layout = Layout(self.model, self.optimizer)
        key = step_key(batch, self.model, self._layout, device)
        if self._entry is not None and self._entry.key != key:
            self.drop(f"other {key.differs(self._entry.key)}")
        if self._entry is None:
            again, self._last = self._last == key, key
            if not again:
                return self._eagerly(there, denominator, compute)
            if why := self._begin(key, there, denominator, compute):
                self._turn_off(why)
                return self._eagerly(there, denominator, compute)
        assert self._entry is not None
        try:
            loss = self._entry.replay(there, denominator)
        except BaseException:
            self.drop("an error")
            raise
        self.replayed += 1
        return loss

    def drop(self, why: str) -> None:
        """Forget the captured step, if there is one, and give its memory back."""
        if self._entry is None:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        entry, self._entry = self._entry, None
        self.drops[why] += 1
        entry.captured.reset()
        self.note(f"step graph: dropped, {why}")

    def summary(self) -> str:
        if self.off:
            return f"step graph: steps are eager: {self.off}"
        text = f"step graph: {self.replayed} micro-batches replayed of {self.captured} captures, {self.eager} eager"
        return text if self.captured else f"{text}: no shape came twice in a row"

    def _eagerly(self, there: Batch, denominator: int, compute: Compute) -> Tensor:
        self.eager += 1
        return compute(there, _scalar(denominator, there))

    def _turn_off(self, why: str) -> None:
        self.off = why
        self.note(f"step graph: steps stay eager: {why}")

    def _begin(self, key: StepKey, there: Batch, denominator: int, compute: Compute) -> str:
        """Capture a step, or say why it cannot be. Leaves gradients and generators as they were either way."""
        device = there.input_ids.device
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        before, random = [p.grad for p in trained], random_state(device)
        try:
            self._entry, why = attempt(
                lambda: _Entry.of(key, there, denominator, compute, trained, self._capture), "a captured step"
            )
        finally:
            for p, grad in zip(trained, before, strict=True):
                p.grad = grad
            set_random_state(random, device)
        if self._entry is None:
            return why
        head = getattr(self.model, "lm_head", None)  # what a sliced loss reads must have no hooks
        watched = [m for m in self.model.modules() if m is not head]
        self._hooks = [m.register_forward_pre_hook(self._outside) for m in watched]
        self.captured += 1
        size = self._entry.captured.pool_bytes / 2**20
        self.note(f"step graph: captured {batch_text(key)}; its pool holds {size:.1f} MiB")
        return ""

    def _outside(self, module, args) -> None:
        """A forward of the model that is not the captured one."""
        self.drop("the model ran outside of it" if self.model.training else "the model ran in evaluation mode")


class _Entry:
    """A captured step and the memory that it reads and writes."""

    def __init__(self, key: StepKey, inputs: Batch, denominator: Tensor):
        self.key, self.inputs, self.denominator = key, inputs, denominator
        self.grads: list[tuple[Tensor, Tensor]] = []
        self.captured: Captured

    @classmethod
    def of(cls, key, there: Batch, denominator: int, compute: Compute, trained: list[Tensor], capture: Capture):
        copies: dict[str, Any] = {n: None if (t := getattr(there, n)) is None else t.clone() for n in FIELDS}
        geometry = Geometry(copies.pop("positions"), copies.pop("cu_seqlens"), there.max_seqlen)
        made = cls(key, replace(there, geometry=geometry, **copies), _scalar(denominator, there))
        for p in trained:
            p.grad = None
        compute(made.inputs, made.denominator)  # which parameters have a gradient at all
        reached = [p for p in trained if p.grad is not None]
        for p in reached:
            p.grad = torch.zeros_like(p)
        made.grads = [(p, p.grad) for p in reached if p.grad is not None]
        made.captured = capture(lambda: compute(made.inputs, made.denominator), there.input_ids.device)
        return made

    def replay(self, there: Batch, denominator: int) -> Tensor:
        for name in FIELDS:
            static = getattr(self.inputs, name)
            if static is not None:
                static.copy_(getattr(there, name))
        self.denominator.fill_(denominator)
        held = [p.grad for p, _ in self.grads]
        fresh = [g for (_, g), before in zip(self.grads, held) if before is None]
        if fresh:
            torch._foreach_zero_(fresh)
        for (p, g), before in zip(self.grads, held):
            if before is not g:
                if before is not None:  # from an eager micro-batch of this step
                    g.copy_(before)
                p.grad = g
        self.captured.replay()
        return self.captured.output.clone()


def _scalar(value: int, like: Batch) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.input_ids.device)


def batch_text(key: StepKey) -> str:
    return f"{key.tokens[0]} tokens in up to {key.documents} documents, up to {key.labelled} labels"
