"""A run that is ready to train: the loop around the loop, its checkpoints, evaluations and result."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..adapters import LoraSpec, save_adapter
from ..adapters.peft_files import WEIGHTS as ADAPTER_WEIGHTS
from ..adapters.peft_files import load_adapter_state
from ..data import Batch, StreamLoader, nothing
from ..functional import attention_backward
from ..models import Decoder, Tokenizer, save_hf
from ..models.config import DecoderConfig
from ..models.tokenizer import SOURCE
from .checkpoint import folder_of, save_checkpoint, sweep, write_file
from .config import FinetuneConfig
from .evaluate import evaluate
from .failures import StepAbandoned
from .gather import gathered, gathered_model, scatter
from .interrupt import Interrupt, stop_signals
from .loop import Trainer
from .metrics import Evaluation, Progress, RunReport, TrainingMetric, peak_bytes
from .ranks import Ranks
from .sinks import Jsonl, Sink, TensorBoard, WandB

FORMAT = 1
RUN, TOKENIZER, CHECKPOINTS, ADAPTER, MODEL = "run.json", "tokenizer", "checkpoints", "adapter", "model"
FULL_WEIGHTS = "trainable.safetensors"
BAD_BATCHES = 10  # in a row that end a run


class Reporter:
    """Hears what a run does; the commands print it. This one is silent."""

    def note(self, text: str) -> None: ...

    def begin(self, step: int, total: int) -> None: ...

    def metric(self, metric: TrainingMetric) -> None: ...

    def evaluation(self, name: str, result: Evaluation) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """What `Run.train` did.

    Attributes:
        weights: the adapter's or the model's folder.
        before, after: None without held-out data, or where a signal came first.
        metrics: of the steps of this call; a resumed run's earlier ones are not among them.
        stopped: by a signal.
        seconds, peak_bytes: of this call.
    """

    output: pathlib.Path
    weights: pathlib.Path
    step: int
    total_steps: int
    before: Evaluation | None
    after: Evaluation | None
    metrics: tuple[TrainingMetric, ...]
    stopped: bool
    seconds: float
    peak_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Physical tokens a second over the steps of this call."""
        seconds = sum(m.physical_tokens / m.tokens_per_s for m in self.metrics)
        return sum(m.physical_tokens for m in self.metrics) / seconds if seconds else 0.0


@dataclass
class Judged:
    """What the evaluations on the way said.

    Attributes:
        step: of the last one; best, loss: the step with the lowest loss; worse: how many came since.
    """

    step: int = 0
    best: int | None = None
    loss: float = math.inf
    worse: int = 0

    def hears(self, step: int, loss: float) -> None:
        self.step = step
        if loss < self.loss:
            self.best, self.loss, self.worse = step, loss, 0
        else:
            self.worse += 1


@dataclass
class Run:
    """A run that was read and checked, ready to train."""

    config: FinetuneConfig
    model: Decoder
    tokenizer: Tokenizer
    trainer: Trainer
    held_out: list[Batch]
    spec: LoraSpec | None
    device: torch.device
    reporter: Reporter
    record: dict[str, Any]
    before: Evaluation | None = None
    judged: Judged = field(default_factory=Judged)
    ranks: Ranks = field(default_factory=Ranks)
    sinks: list[Sink] = field(default_factory=list)

    def train(self) -> Result:
        """Train to the horizon or a signal; writes checkpoints on the way and the result at the end.

        Of several processes all must call it; the first one prints and writes.
        """
        output, started = pathlib.Path(self.config.output), time.perf_counter()
        self._open(output)
        with stop_signals() as asked, self._metrics():
            if self.held_out and self.before is None:
                self.before = self._evaluate("before training", asked)
            with self._attention():
                metrics = self._train(asked)
            weights = self._result(output) if self.trainer.step else output
            after = self._evaluate("after training", asked) if self.held_out else None
        return Result(
            output=output,
            weights=weights,
            step=self.trainer.step,
            total_steps=self.trainer.schedule.steps,
            before=self.before,
            after=after,
            metrics=metrics,
            stopped=bool(asked),
            seconds=time.perf_counter() - started,
            peak_bytes=peak_bytes(self.device),
        )

    @contextlib.contextmanager
    def _attention(self) -> Iterator[None]:
        """The attention backward of this call: picked once, over the device that computes, reported and fixed."""
        if self.config.attention != "flash" or self.trainer.step >= self.trainer.schedule.steps:
            yield
            return
        with attention_backward([self.device], self.model.dtype, *head_shape(self.model.config), packed=True) as choice:
            self.reporter.note(f"attention backward: {choice.path} ({choice.why})")
            yield

    @contextlib.contextmanager
    def _metrics(self) -> Iterator[None]:
        config = self.config
        with contextlib.ExitStack() as stack:
            if self.ranks.main and config.metrics:
                self.sinks.append(Jsonl(config.metrics))
            if self.ranks.main and config.tensorboard:
                self.sinks.append(TensorBoard(config.tensorboard))
            if self.ranks.main and config.wandb:
                self.sinks.append(WandB(config.wandb, config.asdict()))
            for sink in self.sinks:
                stack.callback(sink.close)
            yield
        self.sinks.clear()

    def _open(self, output: pathlib.Path) -> None:
        if self.ranks.main:
            output.mkdir(parents=True, exist_ok=True)
            sweep(output / CHECKPOINTS)
            # first: without it nothing can be resumed
            write_file(output / RUN, json.dumps(self.record, indent=2) + "\n")
            folder = output / TOKENIZER
            if not (folder / SOURCE).exists():
                self.tokenizer.save(folder)
                write_file(folder / SOURCE, json.dumps({"digest": self.record["base_digest"]}))
        self.ranks.wait()

    def _train(self, asked: Interrupt) -> tuple[TrainingMetric, ...]:
        trainer, config = self.trainer, self.config
        metrics: list[TrainingMetric] = []

        def goes_on(_: Progress) -> bool:
            return not asked

        trainer.on_progress = goes_on
        trainer.sinks = (self.reporter.metric, metrics.append, *self.sinks)
        if trainer.limiter is not None:
            trainer.limiter.stopped = lambda: bool(asked)
        self.reporter.begin(trainer.step, trainer.schedule.steps)
        try:
            self._judge(asked)  # a run may have been stopped before its last step's evaluation
            while trainer.step < trainer.schedule.steps and not asked.agreed(self.ranks) and not self._exhausted():
                done = self._steps()
                self._judge(asked)
                self._save()
                if not done.metrics:
                    break
        except StepAbandoned as error:
            self._save()
            output = pathlib.Path(config.output)
            raise StepAbandoned(
                f"{error}; {trainer.step} steps are saved, go on with: riftco finetune --resume --output {output}",
                of_another=error.of_another,
            ) from error
        finally:
            self.reporter.end()
        if trainer.step_graph is not None:
            self.reporter.note(trainer.step_graph.summary())
            trainer.step_graph.drop("the training is done")
        if isinstance(trainer.source, StreamLoader) and trainer.source.skipped:
            first = trainer.source.skipped_lines[:1]
            self.reporter.note(
                f"skipped {trainer.source.skipped} bad lines{'; the first: ' if first else ''}{''.join(first)}"
            )
        return tuple(metrics)

    def _steps(self) -> RunReport:
        """Train until something is due; a batch that cannot be trained on is named and passed over, but not many in a
        row."""
        trainer, config = self.trainer, self.config
        bad, at = 0, trainer.step
        while True:
            try:
                return trainer.run(_until(trainer.step, config.save_every, config.eval_every))
            except StepAbandoned as error:
                bad, at = bad + 1 if trainer.step == at else 1, trainer.step
                if not error.past_batch or bad == BAD_BATCHES:
                    raise
                self.reporter.note(str(error))

    def _judge(self, asked: Interrupt) -> None:
        """Evaluate where it is due."""
        step, every = self.trainer.step, self.config.eval_every
        if not (every and self.held_out and step and step % every == 0 and self.judged.step != step):
            return
        if asked.agreed(self.ranks):
            return
        result = self._evaluate(f"step {step}", asked)
        if result is not None:
            self.judged.hears(step, result.loss)
            if self._exhausted():
                self.reporter.note(
                    f"stopped early at step {step}: held-out loss {self.judged.loss:.4f} of step {self.judged.best} "
                    f"was not reached in {self.judged.worse} evaluations"
                )

    def _exhausted(self) -> bool:
        return 0 < self.config.early_stopping <= self.judged.worse

    def _save(self) -> None:
        if not self.trainer.step:
            return
        state, tensors = self.trainer.state_dict()
        before = None if self.before is None else self.before.asdict()
        state |= {"base_digest": self.record["base_digest"], "before": before, "judged": asdict(self.judged)}
        root = pathlib.Path(self.config.output) / CHECKPOINTS
        trained = {} if self.spec is not None else gathered(self.model, self.ranks.main)

        def write_weights(folder: pathlib.Path) -> None:
            if self.spec is None:
                save_file(trained, folder / FULL_WEIGHTS)
            else:
                save_adapter(self.model, self.spec, folder, base=self.config.model, base_weights=self._base_weights())

        if self.ranks.main:
            with self.ranks.undisturbed():
                save_checkpoint(root, state, tensors, write_weights, keep=self.config.keep, protect=self._best())
        self.ranks.wait()

    def _read_weights(self, folder: pathlib.Path) -> None:
        if self.spec is not None:
            load_adapter_state(self.model, load_file(folder / ADAPTER_WEIGHTS), str(folder))
        else:
            scatter(self.model, load_file(folder / FULL_WEIGHTS))

    def _base_weights(self) -> str | None:
        return self.config.held if self.config.held in ("nf4", "packed") else None

    def _best(self) -> int | None:
        return self.judged.best if self.config.keep_best else None

    def _result(self, output: pathlib.Path) -> pathlib.Path:
        folder = folder_of(output / CHECKPOINTS, self._best())
        if folder is not None and self.judged.best != self.trainer.step:
            self._read_weights(folder)
            self.reporter.note(f"the result is that of step {self.judged.best}, held-out loss {self.judged.loss:.4f}")
        weights = self._write_result(output)
        self.record["result_step"] = self.trainer.step  # a result on disk may be that of an earlier, interrupted call
        if self.ranks.main:
            write_file(output / RUN, json.dumps(self.record, indent=2) + "\n")
        self.ranks.wait()
        return weights

    def _write_result(self, output: pathlib.Path) -> pathlib.Path:
        if self.spec is not None:
            if self.ranks.main:
                save_adapter(
                    self.model, self.spec, output / ADAPTER, base=self.config.model, base_weights=self._base_weights()
                )
            return output / ADAPTER
        whole = self.model if self.ranks.alone else gathered_model(self.model, self.ranks.main)
        if whole is not None and self.ranks.main:
            if (output / MODEL).exists():
                shutil.rmtree(output / MODEL)
            save_hf(whole, output / MODEL)
            self.tokenizer.save(output / MODEL)
        return output / MODEL

    def _evaluate(self, name: str, asked: Interrupt) -> Evaluation | None:
        """None when a signal comes before its end."""
        try:
            mine = self.ranks.share(self.held_out)
            mine += [nothing()] * (self.ranks.most_of(self.held_out) - len(mine))  # all compute equally often
            result = evaluate(self.trainer.model, _unless(asked, mine, self.ranks), self.device, self.ranks)
        except _Stopped:
            return None
        self.reporter.evaluation(name, result)
        for sink in self.sinks:
            sink.evaluation(self.trainer.step, result)
        return result


def head_shape(config: DecoderConfig) -> tuple[int, int, int]:
    """Query heads, key heads, head dim."""
    return config.num_heads, config.num_kv_heads, config.head_dim


class _Stopped(Exception):
    """A signal came in the middle of an evaluation."""


def _unless(asked: Interrupt, batches: list[Batch], ranks: Ranks) -> Iterator[Batch]:
    for batch in batches:
        if asked.agreed(ranks):
            raise _Stopped
        yield batch


def _until(step: int, *periods: int) -> int:
    """Steps to the next multiple of any period."""
    return min(p - step % p for p in periods if p)
