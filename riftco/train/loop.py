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

from .. import tpu
from ..data import Batch, Buckets, RowPlan, Staging, nothing
from .chunked import walk_batch
from .duty import DutyCycle
from .failures import OutOfMemory, StepAbandoned, TrainerPoisoned, Verdict, device_failed, diagnostic, out_of_memory
from .metrics import Progress, RunReport, TrainingMetric, peak_bytes
from .offload import Offload
from .ranks import NEWS, PeerLost, Ranks
from .schedule import Schedule
from .state import Writes, flatten_optimizer, random_state, set_random_state, unflatten_optimizer
from .step_graph import StepGraph

PARTLY = "parameters may be partly written"
MOST_STEPS = 2**24  # the optimizer counts its steps in float32

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
        accumulate: micro-batches of one optimizer step, over all processes. The loss is normalised over the labelled
            tokens of the whole step, so that any way of cutting a step into micro-batches gives the same update.
        device: where the model is.
        sinks: each is handed every metric.
        on_progress: called after each micro-batch; False asks to stop. A finished step stays, an unfinished one is
            discarded as if it had never begun.
        auto_micro_batch: on running out of memory halve every micro-batch, by documents, and compute the step again:
            the same update, up to rounding. It stays halved.
        limiter: leaves a part of the time to others.
        chunk: micro-batches with a longer document are trained in chunks of so many rows, exactly (see `walk`): memory
            is one chunk's graph.
        step_graph: captures a step, for micro-batches padded to one shape; not together with `chunk` or `offload`.
        offload: keeps saved activations in host memory; not together with `chunk`.
        ranks: the processes that share each step's micro-batches; every one draws all of them from a source of its own,
            which must be the same, and computes its share. Losses and gradients are sums over all. A model that is cut
            over the processes (train.sharding.Sharded) goes with none of `auto_micro_batch`, `chunk`, `step_graph` and
            `offload`.
        seed: of the dropout of processes beside the first.

    Attributes:
        step: completed optimizer steps.
        abandoned: the diagnostics of steps that were dropped.
        halvings: how often micro-batches are halved.

    Raises:
        OverflowError: a horizon beyond the optimizer's step counter.
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
        auto_micro_batch: bool = False,
        limiter: DutyCycle | None = None,
        chunk: int | None = None,
        step_graph: StepGraph | None = None,
        offload: Offload | None = None,
        ranks: Ranks | None = None,
        seed: int = 0,
    ):
        self.ranks, self.seed = ranks or Ranks(), seed
        self._sharded = getattr(model, "sharded", False)
        if accumulate < 1:
            raise ValueError(f"accumulate must be 1 or more; got {accumulate}")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be 1 or more; got {chunk}")
        chosen = {"chunk": chunk, "step_graph": step_graph, "offload": offload}
        if len(given := [name for name, value in chosen.items() if value is not None]) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; give one of them")
        if self._sharded and (given := [n for n, v in {**chosen, "auto_micro_batch": auto_micro_batch}.items() if v]):
            raise ValueError(f"{', '.join(given)}: not for weights that are cut over processes; leave it out")
        if accumulate < self.ranks.world:
            raise ValueError(
                f"accumulate={accumulate} micro-batches a step leave some of {self.ranks.world} processes without one; "
                f"give {self.ranks.world} or more"
            )
        if schedule.steps > MOST_STEPS:
            raise OverflowError(f"a horizon of {schedule.steps} steps does not fit the optimizer's counter")
        self.model, self.optimizer, self.source, self.schedule = model, optimizer, source, schedule
        self.accumulate, self.device = accumulate, torch.device(device)
        self.sinks, self.on_progress = tuple(sinks), on_progress
        self.auto_micro_batch, self.limiter, self.chunk = auto_micro_batch, limiter, chunk
        self.step_graph, self.offload = step_graph, offload
        self._on_tpu = self.device.type == tpu.DEVICE_TYPE
        if self._on_tpu and chunk is not None:
            raise ValueError(f"chunk={chunk} is not made for {tpu.NAMES[0]}, whose steps are one graph; leave it out")
        self._staging = Staging(self.device) if self.device.type == "cuda" else None
        self._buckets = self._new_buckets()
        self.step, self.halvings = 0, 0
        self.abandoned: list[str] = []
        self._parts: tuple[int, ...] = ()  # tokens of this process's micro-batches in the step that runs
        self._poison = ""

    def run(self, steps: int | None = None) -> RunReport:
        """Train until the horizon, the end of the data, a stop, or for `steps` more steps.

        Raises:
            StepAbandoned: this step is dropped, earlier ones stand; calling run again goes on.
            TrainerPoisoned: build the trainer again and restore a checkpoint.
        """
        self._refuse_poisoned()
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
        self.ranks.draw(self.seed, self.step)
        committed = False
        try:
            with self._agreed(data, random), self._guard(data, random):
                batches = [b for b in (self.source.next() for _ in range(self.accumulate)) if b is not None]
            plan = RowPlan.of(batches, self.accumulate)
            self.ranks.same("the step and its data", self.step, plan.labelled_tokens, plan.physical_tokens)
            if not batches:
                return None, True
            mine = self.ranks.share(batches)
            if self._sharded:  # gathering is everyone's: each process computes as often as the others
                mine += [nothing()] * (self.ranks.most_of(batches) - len(mine))
            with self._agreed(data, random, together=self._sharded) as verdict:
                loss = self._compute(mine, plan, data, random)
                verdict.stop = loss is None
            if verdict.stop or loss is None:
                self._stop()
                self._restore(data, random)
                return None, False
            mean, norm, clip_scale = self._commit(loss, data, random)
            committed = True
            goes_on = self._tell(len(self._parts))
            peak, stops = self.ranks.largest(peak_bytes(self.device), not goes_on)
            metric = self._metric(plan, mean, norm, clip_scale, started, data, int(peak))
            for sink in self.sinks:
                sink(metric)
            if stops:
                self._stop()
            return metric, not stops
        except (StepAbandoned, TrainerPoisoned):
            self._drop_graph("a failed step")
            raise
        except BaseException:  # an interrupt or a caller's own error: undo the unfinished step and pass it on
            self._drop_graph("an interrupted step")
            if not committed:
                self._restore(data, random)
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _compute(
        self, batches: list[Batch], plan: RowPlan, data: Mapping[str, Any], random: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Forward and backward of this process's micro-batches: their share of the step's mean loss; None where a stop
        was asked for."""
        while True:
            parts = halved(batches, self.halvings)
            self._parts = tuple(part.physical_tokens for part in parts)
            smaller = self.auto_micro_batch and len(halved(parts, 1)) > len(parts)
            loss = torch.zeros((), device=self.device)
            try:
                for i, part in enumerate(parts, 1):
                    with self._guard(data, random, retry=smaller, together=self._sharded):
                        loss += self._micro_batch(part, plan)
                    if i < len(parts) and self._asks_to_stop(i):
                        return None
                return loss
            except OutOfMemory:
                self.halvings += 1
            self._drop_graph("memory ran out")
            self._buckets = self._new_buckets()
            # out of the except block, whose traceback holds what the failed micro-batch had made
            self.optimizer.zero_grad(set_to_none=True)
            set_random_state(random, self.device)
            self.ranks.draw(self.seed, self.step)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _new_buckets(self) -> Buckets | None:
        """For what computes micro-batches of few shapes alone; it has seen none yet."""
        if self._on_tpu:
            return Buckets.of(self.source)
        if self.step_graph is None:
            return None
        context = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        return Buckets(fine=True, context=context)

    def _micro_batch(self, batch: Batch, plan: RowPlan) -> Tensor:
        """Forward and backward; the micro-batch's share of the step's mean loss."""
        if self.limiter is not None:
            self.limiter.wait()
        started = time.perf_counter()
        if self._buckets is not None and (self.step_graph is None or self.step_graph.captures(self.device)):
            batch = self._buckets(batch)
        there = batch.to(self.device) if self._staging is None else self._staging(batch)
        loss = self._loss(batch, there, plan)
        if self.limiter is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.limiter.worked(time.perf_counter() - started)
        return loss

    def _loss(self, batch: Batch, there: Batch, plan: RowPlan) -> Tensor:
        """The loss, detached; its gradients are the parameters' by then."""
        if self.chunk is not None and batch.max_seqlen > self.chunk:
            if there.topk_ids is not None:
                raise ValueError(f"positions of several labels are not trained in chunks of {self.chunk}")
            return walk_batch(self.model, batch, there, self.chunk, plan.denominator)
        if self.step_graph is not None:
            return self.step_graph(batch, there, plan.denominator, self._graph)
        if self._on_tpu:
            return self._graph(there, tpu.number(plan.denominator, torch.float32, self.device))
        return self._graph(there, plan.denominator)

    def _graph(self, there: Batch, denominator: int | Tensor) -> Tensor:
        """Forward and backward as one graph of autograd."""
        where = {"positions": there.positions, "cu_seqlens": there.cu_seqlens, "max_seqlen": there.max_seqlen}
        with contextlib.nullcontext() if self.offload is None else self.offload:
            if there.topk_ids is None:
                loss = self.model.loss(
                    there.input_ids, there.target, there.row_weight, there.n_labelled, denominator, **where
                )
            else:
                loss = self.model.head_loss(
                    self.model.hidden(there.input_ids, **where),
                    there.topk_ids,
                    topk=there.topk_weights,
                    row_weight=there.row_weight,
                    denominator=denominator,
                )
        # on XLA, what another thread has not let go of yet would be part of the step's graph
        with torch.autograd.set_multithreading_enabled(not self._on_tpu):
            loss.backward()
        return loss.detach().float()

    @contextlib.contextmanager
    def _guard(
        self, data: Mapping[str, Any], random: Mapping[str, Tensor], *, retry: bool = False, together: bool = False
    ) -> Iterator[None]:
        """Before the commit: which class an error belongs to. A data error moves past its batch; running out of
        memory comes back to it. Where processes compute `together`, one that fails leaves the others waiting: that ends
        all."""
        try:
            yield
        except Exception as error:
            if lost := self.ranks.lost(NEWS if together else 0.0):  # it was waiting for a process that has ended
                raise lost from error
            memory = out_of_memory(error)
            if device_failed(error) or together:
                what = "while all processes compute together" if together else PARTLY
                raise self._poisoned(error, data, what, "lower --batch-tokens and " if memory else "") from error
            if memory and retry:
                raise OutOfMemory from error
            raise self._abandoned(error, data if memory else self.source.state_dict(), random, memory) from error

    @contextlib.contextmanager
    def _agreed(self, data: Mapping[str, Any], random: Mapping[str, Tensor], *, together: bool = False):
        """The processes end the block alike: what is worst for one of them holds for all."""
        verdict, failed = Verdict(), None
        try:
            yield verdict
        except (StepAbandoned, TrainerPoisoned) as error:
            if together:  # the others wait inside the block
                raise
            failed = error
        mine = verdict.code(failed)
        worst, who, why = self.ranks.agree(mine, str(failed or ""))
        if failed is not None and worst == mine:
            failed.of_another = who != self.ranks.rank
        if worst > mine:
            failed = self._of_another(worst, f"process {who}: {why}", data, random)
        verdict.stop = worst == Verdict.STOP
        if failed is not None:
            raise failed

    def _of_another(self, code: int, why: str, data, random) -> StepAbandoned | TrainerPoisoned | None:
        if code == Verdict.STOP:
            return None
        if code == Verdict.POISONED:
            self._poison = why
            return TrainerPoisoned(why, of_another=True)
        past_batch = code == Verdict.PAST_BATCH  # all have drawn the same batches: they are behind them already
        self._restore(self.source.state_dict() if past_batch else data, random)
        self.abandoned.append(why)
        return StepAbandoned(why, past_batch=past_batch, of_another=True)

    def _abandoned(self, error: Exception, data, random, memory: bool) -> StepAbandoned:
        self._restore(data, random)
        then = "the batch after it comes next"
        if memory:
            then = "the same batch comes next; lower --batch-tokens" + (
                ", or --max-length: it is one document" if self.auto_micro_batch else ", or give --auto-micro-batch"
            )
        why = f"step {self.step + 1} abandoned, {then}: {diagnostic(error)}"
        self.abandoned.append(why)
        return StepAbandoned(why, past_batch=not memory)

    def _commit(self, loss: Tensor, data: Mapping[str, Any], random: Mapping[str, Tensor]) -> tuple[float, ...]:
        """Clip and Adam, all or nothing: (loss, norm, clip scale). A gradient that is not finite leaves everything as
        it was."""
        lr = self.schedule.at(self.step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        writes = Writes()
        try:
            # a dispatch mode cannot watch XLA's tensors: there every fault in the optimizer counts as one in writing
            writes.begun = self._on_tpu
            self.ranks.sum_gradients([p for p in self._trained() if not hasattr(p, "placements")])
            self.ranks.sum_(loss)
            with contextlib.nullcontext() if self._on_tpu else writes:
                results = loss, *self.optimizer.step()
            mean, norm, clip_scale = tpu.read(*results) if self._on_tpu else map(float, results)
        except PeerLost:
            raise
        except BaseException as error:  # an interrupt inside the commit leaves parameters as doubtful as a fault
            undone = not writes.begun and self.ranks.alone  # clipping, or its buffers; other processes may have written
            if isinstance(error, Exception) and out_of_memory(error) and undone:
                raise self._abandoned(error, data, random, memory=True) from error
            raise self._poisoned(error, data) from error
        if not math.isfinite(norm):
            why = (
                f"step {self.step + 1} abandoned: the gradient is not finite (loss {mean:g}, norm {norm:g}); "
                "parameters are unchanged; lower the learning rate or look at this batch"
            )
            self.abandoned.append(why)
            raise StepAbandoned(why, of_another=not self.ranks.main)
        self.step += 1
        return mean, norm, clip_scale

    def _trained(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _metric(self, plan: RowPlan, loss, norm, clip_scale, started, data, peak: int) -> TrainingMetric:
        physical = plan.physical_tokens
        return TrainingMetric(
            step=self.step,
            loss=loss,
            gradient_norm=norm,
            clip_scale=clip_scale,
            lr=self.schedule.at(self.step),
            tokens=plan.labelled_tokens,
            physical_tokens=physical,
            tokens_per_s=physical / max(time.perf_counter() - started, 1e-9),
            peak_bytes=peak,
            epoch=data.get("epoch", 0),
        )

    def _asks_to_stop(self, done: int) -> bool:
        """Whether somebody asks to stop behind a micro-batch that is not the last."""
        stop = not self._tell(done)
        return self.ranks.any(stop) if self._sharded else stop

    def _tell(self, done: int) -> bool:
        """Report a finished micro-batch; False when the caller asks to stop."""
        micro = len(self._parts)
        step = self.step if done == micro else self.step + 1
        progress = Progress(step, self.schedule.steps, done, micro, self._parts[done - 1])
        _PROGRESS.set(progress)
        return self.on_progress is None or self.on_progress(progress) is not False

    def _drop_graph(self, why: str) -> None:
        if self.step_graph is not None:
            self.step_graph.drop(why)

    def _stop(self) -> None:
        if self.limiter is not None:
            self.limiter.drop()

    def _restore(self, data: Mapping[str, Any], random: Mapping[str, Tensor]) -> None:
        self.source.load_state_dict(data)
        set_random_state(random, self.device)

    def _poisoned(
        self, error: BaseException, data: Mapping[str, Any], what: str = PARTLY, first: str = ""
    ) -> TrainerPoisoned:
        self.source.load_state_dict(data)
        self._poison = f"step {self.step + 1} failed, {what}: {diagnostic(error)}"
        return TrainerPoisoned(f"{self._poison}; {first}restore a checkpoint")

    def _refuse_poisoned(self) -> None:
        if self._poison:
            raise TrainerPoisoned(
                f"this trainer is unusable since: {self._poison}; build it again and restore a checkpoint"
            )

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Everything but the weights: JSON values, and tensors by name. All processes must ask; the first one gets the
        optimizer's tensors."""
        self._refuse_poisoned()
        optimizer, tensors = flatten_optimizer(self.optimizer.state_dict(), keep=self.ranks.main)
        state = {
            "step": self.step,
            "halvings": self.halvings,
            "data": self.source.state_dict(),
            "optimizer": optimizer,
        }
        if self._buckets is not None:
            state["shapes"] = self._buckets.state_dict()
        return state, tensors | {f"random.{k}": v for k, v in random_state(self.device).items()}

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken."""
        self._refuse_poisoned()
        self._drop_graph("a loaded state")
        self.source.load_state_dict(state["data"])
        self.optimizer.load_state_dict(unflatten_optimizer(state["optimizer"], tensors))
        self.step, self.halvings = state["step"], state["halvings"]
        self._buckets = self._new_buckets()
        if self._buckets is not None and "shapes" in state:  # not of a run that padded nothing
            self._buckets.load_state_dict(state["shapes"])
        set_random_state({k[7:]: v for k, v in tensors.items() if k.startswith("random.")}, self.device)


def halved(batches: list[Batch], times: int) -> list[Batch]:
    """Every batch in up to 2 ** times batches of whole documents."""
    for _ in range(times):
        batches = [half for b in batches for half in b.halves()]
    return batches
