"""The training loop: sample, forward, loss, backward, clip and Adam, one immutable metric.

Python owns the policy; the ops own the arithmetic. A step is all or nothing: whatever stops it before the optimizer
commits drops its gradients and puts the data position and the random state back.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..data import Batch
from .failures import StepAbandoned, TrainerPoisoned, device_failed, diagnostic, out_of_memory
from .metrics import Progress, RunReport, TrainingMetric, peak_bytes
from .schedule import Schedule

_PROGRESS: contextvars.ContextVar[Progress | None] = contextvars.ContextVar("riftco_progress", default=None)


def current_progress() -> Progress | None:
    """The progress of the run around the caller; None outside of one."""
    return _PROGRESS.get()


class Source(Protocol):
    """Where micro-batches come from; riftco.data.Loader is one."""

    def next(self) -> Batch | None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Trainer:
    """Trains the parameters of `optimizer` on micro-batches of `source`.

    Args:
        model: has `loss(input_ids, target, row_weight, n_labelled, denominator, positions=, cu_seqlens=,
            max_seqlen=)`, as riftco.models.Decoder.
        optimizer: riftco.optim.Adam, whose step() clips, commits all or nothing and returns (gradient norm, clip
            scale) of that update.
        source: micro-batches in their order.
        schedule: learning rates; its horizon ends the run.
        accumulate: micro-batches of one optimizer step. The loss is normalised over the labelled tokens of the whole
            step, so that any way of cutting a step into micro-batches gives the same update.
        device: where the model is.
        sinks: each is handed every metric.
        on_progress: called after each micro-batch; False asks to stop. A finished step stays, an unfinished one is
            discarded as if it had never begun.

    Attributes:
        step: completed optimizer steps.
        abandoned: the diagnostics of steps that were dropped.
    """

    def __init__(
        self,
        model,
        optimizer,
        source: Source,
        schedule: Schedule,
        *,
        accumulate: int = 1,
        device: torch.device | str = "cpu",
        sinks: Iterable[Callable[[TrainingMetric], None]] = (),
        on_progress: Callable[[Progress], bool | None] | None = None,
    ):
        if accumulate < 1:
            raise ValueError(f"accumulate must be 1 or more; got {accumulate}")
        self.model, self.optimizer, self.source, self.schedule = model, optimizer, source, schedule
        self.accumulate, self.device = accumulate, torch.device(device)
        self.sinks, self.on_progress = tuple(sinks), on_progress
        self.step = 0
        self.abandoned: list[str] = []
        self._poison = ""

    def run(self, steps: int | None = None) -> RunReport:
        """Train until the horizon, the end of the data, a stop, or for `steps` more steps.

        Raises:
            StepAbandoned: this step is dropped, earlier ones stand; calling run again goes on.
            TrainerPoisoned: build the trainer again and restore a checkpoint.
        """
        if self._poison:
            raise TrainerPoisoned(f"this trainer is unusable since: {self._poison}; restore a checkpoint")
        last = self.schedule.steps if steps is None else min(self.step + steps, self.schedule.steps)
        metrics: list[TrainingMetric] = []
        scope = _PROGRESS.set(None)
        training = self.model.training
        self.model.train()
        try:
            while self.step < last:
                metric, goes_on = self._step()
                if metric is not None:
                    metrics.append(metric)
                if not goes_on:
                    return RunReport(tuple(metrics), epoch_complete=False)
                if metric is None:  # the data ended
                    break
            return RunReport(tuple(metrics), epoch_complete=True)
        finally:
            self.model.train(training)
            _PROGRESS.reset(scope)

    def _step(self) -> tuple[TrainingMetric | None, bool]:
        """One optimizer step: its metric (None if there was none) and whether to go on."""
        started = time.perf_counter()
        data, random = self.source.state_dict(), random_state(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        committed = False
        try:
            with self._guard(data, random):
                batches = [b for b in (self.source.next() for _ in range(self.accumulate)) if b is not None]
            if not batches:
                return None, True
            labelled = sum(b.n_labelled for b in batches)
            loss = torch.zeros((), device=self.device)
            for i, batch in enumerate(batches, 1):
                with self._guard(data, random):
                    loss += self._micro_batch(batch, labelled)
                if i < len(batches) and not self._tell(i, batches):
                    self._restore(data, random)
                    return None, False
            norm, clip_scale = self._commit(loss, data)
            committed = True
            metric = self._metric(batches, labelled, float(loss), norm, clip_scale, started, data)
            for sink in self.sinks:
                sink(metric)
            return metric, self._tell(len(batches), batches)
        except (StepAbandoned, TrainerPoisoned):
            raise
        except BaseException:  # an interrupt or a caller's own error: undo the unfinished step and pass it on
            if not committed:
                self._restore(data, random)
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _micro_batch(self, batch: Batch, labelled: int) -> Tensor:
        """Forward and backward; the micro-batch's share of the step's mean loss."""
        there = batch.to(self.device)
        loss = self.model.loss(
            there.input_ids,
            there.target,
            there.row_weight,
            there.n_labelled,
            max(labelled, 1),
            positions=there.positions,
            cu_seqlens=there.cu_seqlens,
            max_seqlen=there.max_seqlen,
        )
        loss.backward()
        return loss.detach().float()

    @contextlib.contextmanager
    def _guard(self, data: Mapping[str, Any], random: Mapping[str, Tensor]) -> Iterator[None]:
        """Before the commit: which class an error belongs to. A data error moves past its batch; running out of
        memory comes back to it."""
        try:
            yield
        except Exception as error:
            if device_failed(error):
                raise self._poisoned(error, data) from error
            memory = out_of_memory(error)
            self._restore(data if memory else self.source.state_dict(), random)
            then = "the same batch comes next; lower --batch-tokens" if memory else "the batch after it comes next"
            why = f"step {self.step + 1} abandoned, {then}: {diagnostic(error)}"
            self.abandoned.append(why)
            raise StepAbandoned(why) from error

    def _commit(self, loss: Tensor, data: Mapping[str, Any]) -> tuple[float, float]:
        """Clip and Adam, all or nothing. A gradient that is not finite leaves everything as it was."""
        lr = self.schedule.at(self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        try:
            norm, clip_scale = (float(v) for v in self.optimizer.step())
        except BaseException as error:  # an interrupt inside the commit leaves parameters as doubtful as a fault
            raise self._poisoned(error, data) from error
        if not math.isfinite(norm):
            why = (
                f"step {self.step + 1} abandoned: the gradient is not finite (loss {float(loss):g}, norm {norm:g}); "
                "parameters are unchanged; lower the learning rate or look at this batch"
            )
            self.abandoned.append(why)
            raise StepAbandoned(why)
        self.step += 1
        return norm, clip_scale

    def _metric(self, batches, labelled, loss, norm, clip_scale, started, data) -> TrainingMetric:
        physical = sum(b.physical_tokens for b in batches)
        return TrainingMetric(
            step=self.step,
            loss=loss,
            gradient_norm=norm,
            clip_scale=clip_scale,
            lr=self.schedule.at(self.step),
            tokens=labelled,
            physical_tokens=physical,
            tokens_per_s=physical / max(time.perf_counter() - started, 1e-9),
            peak_bytes=peak_bytes(self.device),
            epoch=data.get("epoch", 0),
        )

    def _tell(self, done: int, batches: list[Batch]) -> bool:
        """Report a finished micro-batch; False when the caller asks to stop."""
        step = self.step if done == len(batches) else self.step + 1
        progress = Progress(step, self.schedule.steps, done, len(batches), batches[done - 1].physical_tokens)
        _PROGRESS.set(progress)
        return self.on_progress is None or self.on_progress(progress) is not False

    def _restore(self, data: Mapping[str, Any], random: Mapping[str, Tensor]) -> None:
        self.source.load_state_dict(data)
        set_random_state(random, self.device)

    def _poisoned(self, error: BaseException, data: Mapping[str, Any]) -> TrainerPoisoned:
        self.source.load_state_dict(data)
        self._poison = f"step {self.step + 1} failed, parameters may be partly written: {diagnostic(error)}"
        return TrainerPoisoned(f"{self._poison}; restore a checkpoint")

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything but the weights: JSON values, and tensors by name."""
        optimizer, tensors = flatten_optimizer(self.optimizer.state_dict())
        state = {"step": self.step, "data": self.source.state_dict(), "optimizer": optimizer}
        return state, tensors | {f"random.{k}": v for k, v in random_state(self.device).items()}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken."""
        self.source.load_state_dict(state["data"])
        self.optimizer.load_state_dict(unflatten_optimizer(state["optimizer"], tensors))
        self.step = state["step"]
        set_random_state({k[7:]: v for k, v in tensors.items() if k.startswith("random.")}, self.device)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's generators that a step draws from (dropout)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
    elif device.type == "mps" and "mps" in states:
        torch.mps.set_rng_state(states["mps"])


def flatten_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """torch's optimizer state_dict as JSON values and tensors named "optimizer.<parameter>.<slot>"."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for parameter, slots in state["state"].items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{parameter}.{slot}"] = value.detach().to("cpu", copy=True).contiguous()
            else:
                values.setdefault(str(parameter), {})[slot] = value
    return {"param_groups": state["param_groups"], "values": values}, tensors


def unflatten_optimizer(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    slots: dict[int, dict[str, Any]] = {int(p): dict(v) for p, v in state["values"].items()}
    for parameter, slot, tensor in _named(tensors):
        slots.setdefault(parameter, {})[slot] = tensor
    groups = [{k: tuple(v) if k == "betas" else v for k, v in g.items()} for g in state["param_groups"]]
    return {"state": slots, "param_groups": groups}


def _named(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, parameter, slot = name.split(".", 2)
            yield int(parameter), slot, tensor
