"""A fine-tuning run from files to files.

    output/run.json       the settings, the base model's and the data's digests, the step of the result
    output/tokenizer/     the tokenizer, converted once
    output/checkpoints/   the newest checkpoints
    output/adapter/       the result, a PEFT folder (full fine-tuning: output/model/, a Hugging Face folder)

`prepare` reads and checks everything and writes nothing; `Run.train` trains and writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .. import __version__
from ..adapters import LoraSpec, apply_lora, load_adapter, save_adapter
from ..data import Batch, DataError, Dataset, Example, Loader, StreamLoader, load_examples
from ..functional import attention_backward
from ..models import Decoder, Tokenizer, base_digest, load_model, load_tokenizer, save_hf
from ..models.config import DecoderConfig
from ..models.load import open_source
from ..models.tokenizer import SOURCE
from ..optim import Adam
from .checkpoint import check_base, checkpoints, open_checkpoint, save_checkpoint, sweep, write_file
from .config import ConfigError, FinetuneConfig, configured, pick_device
from .duty import DutyCycle
from .evaluate import evaluate
from .failures import StepAbandoned
from .interrupt import Interrupt, stop_signals
from .loop import Trainer
from .metrics import Evaluation, Progress, TrainingMetric, peak_bytes
from .schedule import Schedule

FORMAT = 1
RUN, TOKENIZER, CHECKPOINTS, ADAPTER, MODEL = "run.json", "tokenizer", "checkpoints", "adapter", "model"
FULL_WEIGHTS = "trainable.safetensors"


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

    def train(self) -> Result:
        """Train to the horizon or a signal; writes checkpoints on the way and the result at the end."""
        output, started = pathlib.Path(self.config.output), time.perf_counter()
        self._open(output)
        with stop_signals() as asked:
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

    def _open(self, output: pathlib.Path) -> None:
        output.mkdir(parents=True, exist_ok=True)
        sweep(output / CHECKPOINTS)
        write_file(output / RUN, json.dumps(self.record, indent=2) + "\n")  # first: without it nothing can be resumed
        folder = output / TOKENIZER
        if not (folder / SOURCE).exists():
            self.tokenizer.save(folder)
            write_file(folder / SOURCE, json.dumps({"digest": self.record["base_digest"]}))

    def _train(self, asked: Interrupt) -> tuple[TrainingMetric, ...]:
        trainer, config = self.trainer, self.config
        metrics: list[TrainingMetric] = []

        def goes_on(_: Progress) -> bool:
            return not asked

        trainer.on_progress = goes_on
        trainer.sinks = (self.reporter.metric, metrics.append)
        if trainer.limiter is not None:
            trainer.limiter.stopped = lambda: bool(asked)
        self.reporter.begin(trainer.step, trainer.schedule.steps)
        try:
            while trainer.step < trainer.schedule.steps and not asked:
                done = trainer.run(_until(trainer.step, config.save_every, config.eval_every))
                self._save()
                if asked or not done.metrics:
                    break
                if config.eval_every and trainer.step % config.eval_every == 0 and self.held_out:
                    self._evaluate(f"step {trainer.step}", asked)
        except StepAbandoned as error:
            self._save()
            output = pathlib.Path(config.output)
            raise StepAbandoned(
                f"{error}; {trainer.step} steps are saved, go on with: riftco finetune --resume --output {output}"
            ) from error
        finally:
            self.reporter.end()
        if isinstance(trainer.source, StreamLoader) and trainer.source.skipped:
            first = trainer.source.skipped_lines[:1]
            self.reporter.note(
                f"skipped {trainer.source.skipped} bad lines{'; the first: ' if first else ''}{''.join(first)}"
            )
        return tuple(metrics)

    def _save(self) -> None:
        if not self.trainer.step:
            return
        state, tensors = self.trainer.state_dict()
        before = None if self.before is None else self.before.asdict()
        state |= {"base_digest": self.record["base_digest"], "before": before}
        root = pathlib.Path(self.config.output) / CHECKPOINTS
        save_checkpoint(root, state, tensors, self._write_weights, keep=self.config.keep)

    def _write_weights(self, folder: pathlib.Path) -> None:
        if self.spec is not None:
            save_adapter(self.model, self.spec, folder, base=self.config.model, base_weights=self._base_weights())
        else:
            trained = {n: p.detach().cpu().contiguous() for n, p in self.model.named_parameters()}
            save_file(trained, folder / FULL_WEIGHTS)

    def _base_weights(self) -> str | None:
        return "nf4" if self.config.method == "qlora" else None

    def _result(self, output: pathlib.Path) -> pathlib.Path:
        weights = self._write_result(output)
        self.record["result_step"] = self.trainer.step  # a result on disk may be that of an earlier, interrupted call
        write_file(output / RUN, json.dumps(self.record, indent=2) + "\n")
        return weights

    def _write_result(self, output: pathlib.Path) -> pathlib.Path:
        if self.spec is not None:
            save_adapter(
                self.model, self.spec, output / ADAPTER, base=self.config.model, base_weights=self._base_weights()
            )
            return output / ADAPTER
        if (output / MODEL).exists():
            shutil.rmtree(output / MODEL)
        save_hf(self.model, output / MODEL)
        self.tokenizer.save(output / MODEL)
        return output / MODEL

    def _evaluate(self, name: str, asked: Interrupt) -> Evaluation | None:
        """None when a signal comes before its end."""
        try:
            result = evaluate(self.model, _unless(asked, self.held_out), self.device)
        except _Stopped:
            return None
        self.reporter.evaluation(name, result)
        return result


def prepare(given: Mapping[str, Any], *, resume: bool = False, reporter: Reporter | None = None) -> Run:
    """Read and check everything that a run needs; nothing is written.

    Args:
        given: fields of FinetuneConfig; None means not given.
        resume: continue the run in `output`: its settings are those of the run, `given` may repeat them.
        reporter: hears what happens.

    Raises:
        ValueError: in one line, what is wrong with a setting, a file or the output folder, and what to do.
    """
    reporter = reporter or Reporter()
    if not given.get("output"):
        raise ConfigError("--output is missing; name the folder that the run writes")
    output = pathlib.Path(given["output"])
    stored = read_run(output) if resume else None
    if not resume:
        _refuse_used(output)
    config = configured(given, stored and stored["config"])
    device = pick_device(config.device)
    source = open_source(config.model)
    digest = base_digest(source.path)
    saved = _latest(output, config, digest) if resume else None
    tokenizer = load_tokenizer(source.path, cache_dir=output / TOKENIZER if resume else None, source=source)
    context = source.config.max_position_embeddings
    loader, held_out = _data(config, tokenizer, context, reporter)
    record = {
        "format": FORMAT,
        "riftco": __version__,
        "config": config.asdict(),
        "base_digest": digest,
        "data_digest": base_digest(config.data) if config.stream else _digest(config.data),
        "result_step": stored["result_step"] if stored else 0,
    }
    if stored and stored["data_digest"] != record["data_digest"]:
        raise ConfigError(
            f"{config.data} is not what the run was trained on; restore the file, or use another --output"
        )
    schedule = _schedule(config, loader)
    result = output / (MODEL if config.method == "full" else ADAPTER)
    if saved is not None and saved.step >= schedule.steps and saved.step == record["result_step"] and result.exists():
        raise ConfigError(
            f"{output}: this run is finished ({saved.step} of {schedule.steps} steps), its result is {result}; "
            "raise --steps to go on, or use another --output"
        )
    model, spec = _model(config, device, saved)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = Adam(
        trained,
        lr=config.rate,
        weight_decay=config.weight_decay,
        gradient_clip=config.gradient_clip,
        state=config.moments,
    )
    trainer = Trainer(
        model,
        optimizer,
        loader,
        schedule,
        accumulate=config.accumulate,
        device=device,
        auto_micro_batch=config.auto_micro_batch,
        limiter=DutyCycle(config.duty_cycle) if config.duty_cycle < 1 else None,
    )
    torch.manual_seed(config.seed)
    if saved is not None:
        trainer.load_state_dict(saved.state, saved.tensors)
        reporter.note(f"resuming at step {saved.step} of {schedule.steps}")
    before = saved.state.get("before") if saved is not None else None
    return Run(
        config=config,
        model=model,
        tokenizer=tokenizer,
        trainer=trainer,
        held_out=Loader(held_out, _longest(held_out, config), 0).sequential() if held_out else [],
        spec=spec,
        device=device,
        reporter=reporter,
        record=record,
        before=None if before is None else Evaluation(**before),
    )


def head_shape(config: DecoderConfig) -> tuple[int, int, int]:
    """Query heads, key heads, head dim."""
    return config.num_heads, config.num_kv_heads, config.head_dim


def read_run(output: pathlib.Path) -> dict[str, Any]:
    """run.json of a run's folder."""
    file = output / RUN
    if not file.is_file():
        raise ConfigError(f"{output} holds no run to resume: it has no {RUN}; leave --resume out to start one")
    try:
        record = json.loads(file.read_text())
        if record["format"] != FORMAT:
            raise ConfigError(f"{file}: format {record['format']!r} is not supported; this riftco reads {FORMAT}")
        return {
            "config": dict(record["config"]),
            "data_digest": str(record["data_digest"]),
            "result_step": int(record.get("result_step", 0)),  # 0: unknown, so that it is written again
        }
    except (ValueError, KeyError, TypeError) as bad:
        if isinstance(bad, ConfigError):
            raise
        raise ConfigError(f"{file} cannot be read ({bad!r}); use another --output") from None


def _refuse_used(output: pathlib.Path) -> None:
    if (output / RUN).exists():
        raise ConfigError(f"{output} already holds a run; go on with --resume, or name another --output")
    if output.is_file():
        raise ConfigError(f"--output {output} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"--output {output} is not empty; name a new folder")


def _latest(output: pathlib.Path, config: FinetuneConfig, digest: str):
    """The newest checkpoint, or None where the run was stopped before its first step was saved."""
    found = checkpoints(output / CHECKPOINTS)
    if not found:
        return None
    saved = open_checkpoint(found[-1])
    check_base(saved, digest, config.model)
    return saved


def _data(
    config: FinetuneConfig, tokenizer: Tokenizer, context: int, reporter: Reporter
) -> tuple[Loader | StreamLoader, list[Example]]:
    """What is trained on, and what is held out."""
    held_out: list[Example] = []
    if config.eval:
        held_out = list(_read(config.eval, tokenizer, config, context, reporter).examples)
    if config.stream:
        _check_length(config, context)
        return _stream(config, tokenizer, context), held_out
    train = list(_read(config.data, tokenizer, config, context, reporter).examples)
    if config.eval_split:
        train, held_out = _split(train, config)
    return _loader(config.data, train, config), held_out


def _stream(config: FinetuneConfig, tokenizer: Tokenizer, context: int) -> StreamLoader:
    loader = StreamLoader(
        config.data,
        tokenizer,
        config.batch_tokens,
        config.seed,
        max_length=config.max_length or context,
        truncate=config.truncate,
        skip_bad=config.skip_bad,
    )
    start = loader.state_dict()
    loader.next()  # a file that cannot be trained on is refused before anything is written
    loader.load_state_dict(start)
    return loader


def _check_length(config: FinetuneConfig, context: int) -> int:
    longest = config.max_length or context
    if longest > context:
        raise ConfigError(f"--max-length {longest} is longer than this model's context of {context} tokens")
    return longest


def _read(path: str, tokenizer: Tokenizer, config: FinetuneConfig, context: int, reporter: Reporter) -> Dataset:
    longest = _check_length(config, context)
    data = load_examples(path, tokenizer, max_length=longest, truncate=config.truncate, skip_bad=config.skip_bad)
    if data.skipped:
        reporter.note(f"{path}: skipped {len(data.skipped)} bad lines; the first: {data.skipped[0]}")
    if data.truncated:
        reporter.note(f"{path}: cut {data.truncated} examples to {longest} tokens")
    return data


def _split(examples: list[Example], config: FinetuneConfig) -> tuple[list[Example], list[Example]]:
    count = round(len(examples) * config.eval_split)
    if not 0 < count < len(examples):
        raise ConfigError(
            f"--eval-split {config.eval_split} of {len(examples)} examples leaves "
            f"{'none to evaluate on' if count == 0 else 'none to train on'}"
        )
    chosen = set(random.Random(config.seed).sample(range(len(examples)), count))
    return [e for i, e in enumerate(examples) if i not in chosen], [examples[i] for i in sorted(chosen)]


def _loader(path: str, examples: list[Example], config: FinetuneConfig) -> Loader:
    epochs = None if config.steps is not None else config.epochs or 1
    try:
        return Loader(examples, config.batch_tokens, config.seed, epochs)
    except DataError as bad:
        raise DataError(f"{path}: {bad}") from None


def _longest(examples: list[Example], config: FinetuneConfig) -> int:
    """Held-out examples may be longer than a training micro-batch: nothing is kept for a backward."""
    return max(config.batch_tokens, max(len(e) for e in examples))


def _schedule(config: FinetuneConfig, loader: Loader | StreamLoader) -> Schedule:
    if isinstance(loader, StreamLoader):
        assert config.steps is not None  # FinetuneConfig refuses a stream without
        steps = config.steps
    else:
        steps = config.steps or -(-loader.count() // config.accumulate)
    return Schedule(config.rate, steps, config.schedule, min(config.warmup, steps))


def _model(config: FinetuneConfig, device: torch.device, saved) -> tuple[Decoder, LoraSpec | None]:
    weights = "fp32" if config.method == "full" and config.dtype == "auto" else config.dtype
    dtype = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
    model, _ = load_model(
        config.model,
        weights="nf4" if config.method == "qlora" else weights,
        dtype=dtype if config.method == "qlora" else None,
        device=device,
        activation_checkpointing=config.activation_checkpointing,
        with_tokenizer=False,
    )
    model.attention = config.attention
    if config.method == "full":
        if saved is not None:
            model.load_state_dict(load_file(saved.folder / FULL_WEIGHTS), strict=False)
        return model, None
    targets = config.target_modules
    names: str | tuple[str, ...] = targets if targets == "all-linear" else tuple(targets.split(","))
    spec = LoraSpec(rank=config.rank, alpha=config.alpha, target_modules=names, dropout=config.dropout)
    if saved is not None:
        spec = load_adapter(model, saved.folder)
    else:
        apply_lora(model, spec, seed=config.seed)
    return model, spec


class _Stopped(Exception):
    """A signal came in the middle of an evaluation."""


def _unless(asked: Interrupt, batches: list[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if asked:
            raise _Stopped
        yield batch


def _until(step: int, *periods: int) -> int:
    """Steps to the next multiple of any period."""
    return min(p - step % p for p in periods if p)


def _digest(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
