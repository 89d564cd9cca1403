"""A fine-tuning run from files to files.

    output/run.json       the settings, the base model's and the data's digests, the step of the result
    output/tokenizer/     the tokenizer, converted once
    output/checkpoints/   the newest checkpoints
    output/adapter/       the result, a PEFT folder (full fine-tuning: output/model/, a Hugging Face folder)

`prepare` reads and checks everything and writes nothing; `Run.train` trains and writes.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from .. import __version__, tpu
from ..adapters import LoraSpec, apply_lora, load_adapter, shared_where_tied, unmatched
from ..adapters.plan import EMBEDDING, LINEAR
from ..data import DataError, Dataset, Example, Loader, StreamLoader, TokenLoader, load_examples, load_tokens
from ..data.tokens import SUFFIXES
from ..functional import describe_head
from ..models import Decoder, Tokenizer, base_digest, load_model, load_tokenizer
from ..models.config import DecoderConfig
from ..models.load import open_source
from ..optim import Adam
from .checkpoint import Checkpoint, check_base, checkpoints, open_checkpoint, sha256_of
from .config import DTYPES, ConfigError, FinetuneConfig, configured, device_of_process
from .duty import DutyCycle
from .loop import Trainer
from .metrics import Evaluation
from .offload import Offload, offload_for
from .ranks import Ranks
from .run import ADAPTER, CHECKPOINTS, FORMAT, FULL_WEIGHTS, MODEL, RUN, TOKENIZER, Judged, Reporter, Run
from .schedule import Schedule
from .sinks import package
from .step_graph import StepGraph

LAYERS = (*LINEAR, *EMBEDDING)  # what can carry an adapter


def prepare(
    given: Mapping[str, Any], *, resume: bool = False, reporter: Reporter | None = None, ranks: Ranks | None = None
) -> Run:
    """Read and check everything that a run needs; nothing is written.

    Args:
        given: fields of FinetuneConfig; None means not given.
        resume: continue the run in `output`: its settings are those of the run, `given` may repeat them.
        reporter: hears what happens; the first process's only.
        ranks: the processes of the run, all of which prepare it; None: this one alone.

    Raises:
        ValueError: in one line, what is wrong with a setting, a file or the output folder, and what to do.
    """
    ranks = ranks or Ranks()
    reporter = (ranks.main and reporter) or Reporter()
    with ranks.alike():
        found = _read_all(given, resume, reporter, ranks)
    ranks.same("their settings, model and data", _number_of(found.record))
    config, saved = found.config, found.saved
    if config.idle:
        reporter.note(f"{', '.join(config.idle)}: of an adapter, which --method full has none of")
    with ranks.alike():
        model, spec = _model(config, ranks, saved)
    runs = _over(model, config, ranks)
    trained = [p for p in model.parameters() if p.requires_grad]
    ranks.copy_of_first([p for p in trained if not hasattr(p, "placements")])
    on_tpu = ranks.device.type == tpu.DEVICE_TYPE
    optimizer = Adam(
        trained,
        lr=config.rate,
        weight_decay=config.weight_decay,
        gradient_clip=config.gradient_clip,
        state="contiguous" if on_tpu and config.optimizer_state == "auto" else config.moments,
    )
    trainer = Trainer(
        runs,
        optimizer,
        found.loader,
        found.schedule,
        accumulate=config.accumulate,
        device=ranks.device,
        auto_micro_batch=config.auto_micro_batch,
        chunk=config.chunk,
        limiter=DutyCycle(config.duty_cycle) if config.duty_cycle < 1 else None,
        step_graph=StepGraph(model, optimizer, note=reporter.note) if config.step_graph else None,
        offload=_offload(config, model, ranks.device, reporter),
        ranks=ranks,
        seed=config.seed,
    )
    torch.manual_seed(config.seed)
    if saved is not None:
        trainer.load_state_dict(saved.state, saved.tensors)
        reporter.note(f"resuming at step {saved.step} of {found.schedule.steps}")
    before = saved.state.get("before") if saved is not None else None
    return Run(
        config=config,
        model=model,
        tokenizer=found.tokenizer,
        trainer=trainer,
        held_out=Loader(found.held_out, _longest(found.held_out, config), 0).sequential() if found.held_out else [],
        spec=spec,
        device=ranks.device,
        reporter=reporter,
        record=found.record,
        before=None if before is None else Evaluation(**before),
        judged=Judged(**saved.state["judged"]) if saved is not None else Judged(),
        ranks=ranks,
    )


@dataclass(frozen=True)
class _Found:
    """Everything that a run needs but the model: read and checked."""

    config: FinetuneConfig
    saved: Checkpoint | None
    tokenizer: Tokenizer
    loader: Loader | StreamLoader | TokenLoader
    held_out: list[Example]
    schedule: Schedule
    record: dict[str, Any]


def _read_all(given: Mapping[str, Any], resume: bool, reporter: Reporter, ranks: Ranks) -> _Found:
    if not given.get("output"):
        raise ConfigError("--output is missing; name the folder that the run writes")
    output = pathlib.Path(given["output"])
    stored = read_run(output) if resume else None
    if not resume:
        _refuse_used(output)
        if given.get("accumulate") is None:
            given = {**given, "accumulate": ranks.world}
    config = configured(given, stored and stored["config"])
    config.check_processes(ranks.world)
    for option in ("tensorboard", "wandb"):
        if ranks.main and getattr(config, option):
            package(option)
    ranks.on(device_of_process(config.device))
    source = open_source(config.model)
    reporter.note(f"loading {config.model}")
    digest = base_digest(source.path)
    saved = _latest(output, config, digest) if resume else None
    tokenizer = load_tokenizer(source.path, cache_dir=output / TOKENIZER if resume else None, source=source)
    loader, held_out = _data(config, tokenizer, source.config, reporter)
    record = {
        "format": FORMAT,
        "riftco": __version__,
        "config": config.asdict(),
        "base_digest": digest,
        "data_digest": base_digest(config.data) if config.stream or is_tokens(config.data) else sha256_of(config.data),
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
    judged = Judged(**saved.state["judged"]) if saved is not None else Judged()
    if 0 < config.early_stopping <= judged.worse and result.exists():
        raise ConfigError(f"{output}: this run stopped early at step {judged.step}, its result is {result}")
    return _Found(config, saved, tokenizer, loader, held_out, schedule, record)


def _over(model: Decoder, config: FinetuneConfig, ranks: Ranks) -> Any:
    """What the trainer calls: the model, or the model cut over the processes."""
    if ranks.alone or not config.cut:
        return model
    from .sharding import Sharded

    return Sharded(model, ranks)


def _number_of(record: Mapping[str, Any]) -> int:
    """A number that differs where what decides the losses does."""
    text = json.dumps({k: record[k] for k in ("config", "base_digest", "data_digest")}, sort_keys=True)
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def _offload(config: FinetuneConfig, model: Decoder, device: torch.device, reporter: Reporter) -> Offload | None:
    if not config.offload_activations:
        return None
    return offload_for(model, device, reporter.note, config.offload_bytes)


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
    if output.is_dir() and any(f.name != f".{RUN}.writing" for f in output.iterdir()):  # left by one that was killed
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
    config: FinetuneConfig, tokenizer: Tokenizer, of: DecoderConfig, reporter: Reporter
) -> tuple[Loader | StreamLoader | TokenLoader, list[Example]]:
    """What is trained on, and what is held out."""
    context = of.max_position_embeddings
    held_out: list[Example] = []
    if config.eval:
        held_out = list(_read(config.eval, tokenizer, config, context, reporter).examples)
    if is_tokens(config.data):
        return _tokens(config, _check_length(config, context), of.vocab_size), held_out
    if config.stream:
        _check_length(config, context)
        return _stream(config, tokenizer, context), held_out
    train = list(_read(config.data, tokenizer, config, context, reporter).examples)
    if config.eval_split:
        train, held_out = _split(train, config)
    return _loader(config.data, train, config), held_out


def is_tokens(path: str) -> bool:
    return pathlib.Path(path).suffix in SUFFIXES


def _tokens(config: FinetuneConfig, longest: int, vocabulary: int) -> TokenLoader:
    """A token file's rows, or windows of its corpus of `--max-length` tokens."""
    if config.stream or config.eval_split:
        raise ConfigError("--stream and --eval-split are for JSONL; a token file is mapped, hold one out with --eval")
    arrays = load_tokens(config.data, vocabulary=vocabulary)
    if arrays.topk_ids is not None and config.chunk is not None:
        raise ConfigError(f"{config.data} has topk_ids: positions of several labels are not trained in chunks; "
                          "leave --chunk out")  # fmt: skip
    corpus = arrays.ids.ndim == 1
    if corpus and config.steps is None:
        raise ConfigError(f"{config.data} is one corpus, drawn in windows without end; give --steps")
    if not corpus and arrays.sequence_ids is None and arrays.ids.shape[1] > longest:
        raise ConfigError(f"{config.data}: rows of {arrays.ids.shape[1]} tokens are longer than the {longest} allowed")
    epochs = None if config.steps is not None else config.epochs or 1
    window = min(longest, config.batch_tokens) if corpus else None
    try:
        return TokenLoader(arrays, config.batch_tokens, config.seed, context=window, epochs=epochs)
    except DataError as bad:
        raise DataError(f"{config.data}: {bad}") from None


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


def _endings(model: Decoder) -> str:
    """Which layers a model has, as adapters name them."""
    found = {n.rpartition(".")[2] for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, LAYERS)}
    return f"there are: {', '.join(sorted(found))}"


def _schedule(config: FinetuneConfig, loader: Loader | StreamLoader | TokenLoader) -> Schedule:
    steps = config.steps
    if steps is None:
        assert not isinstance(loader, StreamLoader)  # FinetuneConfig refuses a stream without
        steps = -(-loader.count() // config.accumulate)
    return Schedule(config.rate, steps, config.schedule, min(config.warmup, steps))


def _model(config: FinetuneConfig, ranks: Ranks, saved: Checkpoint | None) -> tuple[Decoder, LoraSpec | None]:
    """The model with its adapter, on the device; on the host where it will be cut over processes, as one device may not
    have room for it."""
    dtype = DTYPES[config.dtype]
    weights, device = config.held, ranks.device
    if device.type == tpu.DEVICE_TYPE and weights == "packed":
        raise ConfigError("--weights packed: GGUF's blocks have no kernel for tpu; use --weights nf4, or bf16")
    if device.type == tpu.DEVICE_TYPE and config.dtype == "auto":  # made on the CPU, whose default is another
        weights, dtype = "bf16" if weights == "auto" else weights, torch.bfloat16
    place = tpu.made_on(device)
    cut = config.cut and not ranks.alone
    if cut:
        place = torch.device("cpu")
        if device.type != "cpu" and config.dtype == "auto":
            weights, dtype = "bf16" if weights == "auto" else weights, torch.bfloat16
    model, _ = load_model(
        config.model,
        weights=weights,
        dtype=dtype if weights in ("nf4", "packed") else None,
        device=place,
        activation_checkpointing=config.activation_checkpointing,
        with_tokenizer=False,
    )
    model.attention = config.attention
    if config.method == "full":
        if saved is not None:
            model.load_state_dict(load_file(saved.folder / FULL_WEIGHTS), strict=False)
        return (model if cut else model.to(device)), None
    spec = config.lora_spec()
    if saved is not None:
        spec = load_adapter(model, saved.folder)
    else:
        spec = shared_where_tied(model, spec)
        for name, missing in unmatched(model, spec).items():
            raise ConfigError(
                f"--{name.replace('_', '-')}: no {'adapted ' * name.endswith('pattern')}layer of this model is named "
                f"{', '.join(missing)}; {_endings(model)}"
            )
        apply_lora(model, spec, seed=config.seed)
    try:
        describe_head(model.lm_head)
    except ValueError as refused:
        raise ConfigError(f"--target-modules: {refused}") from None
    return (model if cut else model.to(device)), spec
