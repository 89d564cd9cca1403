"""A small decoder trained from scratch on a text of this file: the shortest whole run, for checking a machine.

It shows that everything is wired; what it learns is that one text.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from dataclasses import dataclass

import numpy as np
import torch

from .. import tpu
from ..adapters import LoraSpec, apply_lora, save_adapter
from ..data import TokenArrays, TokenLoader
from ..models import Decoder, DecoderConfig, save_hf
from ..models.decoder import ACTIVATION_CHECKPOINTING, ATTENTION
from ..models.load import quantize_blocks
from ..models.rotary import Rope
from ..optim import Adam
from .config import METHODS, ConfigError
from .evaluate import evaluate
from .loop import Trainer
from .metrics import Evaluation, TrainingMetric
from .run import Reporter
from .schedule import Schedule
from .step_graph import StepGraph

BACKENDS = {"cpu": "cpu", "cuda": "cuda", "metal": "mps", "tpu": tpu.DEVICE_TYPE}
REMEDY = {
    "cuda": "PyTorch sees no CUDA device here; install a CUDA build of PyTorch and look at nvidia-smi, or use cpu",
    "metal": "PyTorch sees no Metal device here; run it on Apple silicon, or use cpu",
}
NOT_VALIDATED = ("metal", "tpu")
CONTEXT, ROWS = 32, 8
CORPUS = (
    "The fox walks in the wood. The owl sits on the oak. The hare runs to the hill. The crow calls from the mill. "
    "The boat lies in the bay. The gull rests on the mast. The crab digs in the sand. The seal swims to the land. "
) * 6
RATE = {"full": 3e-3, "lora": 2e-2, "qlora": 2e-2}


@dataclass(frozen=True)
class TinyRun:
    """Settings of `riftco train-tiny`. None but the seeds changes the model's saved config."""

    steps: int = 200
    backend: str = "cpu"
    attention: str = "materialized"
    activation_checkpointing: str = "disabled"
    method: str = "full"
    seed: int = 0
    model_seed: int = 0
    output: str | None = None
    step_graph: bool = False

    def __post_init__(self) -> None:
        accepted = {
            "backend": tuple(BACKENDS),
            "attention": ATTENTION,
            "activation_checkpointing": ACTIVATION_CHECKPOINTING,
            "method": METHODS,
        }
        for name, values in accepted.items():
            value = getattr(self, name)
            if value not in values:
                raise ConfigError(f"--{name.replace('_', '-')} must be one of {', '.join(values)}; got {value!r}")
        if not 1 <= self.steps < 2**24:
            raise ConfigError(f"--steps must be a whole number of 1 or more, below 2^24; got {self.steps}")
        if self.output is not None and pathlib.Path(self.output).exists():
            raise ConfigError(f"--output {self.output} is already there; name a new folder")


@dataclass(frozen=True)
class TinyResult:
    before: Evaluation
    after: Evaluation
    metrics: tuple[TrainingMetric, ...]


def device_of(backend: str) -> torch.device:
    """The device of a backend, or a refusal that says what to do."""
    here = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "metal": torch.backends.mps.is_available(),
        "tpu": not tpu.why_not(),
    }
    if not here[backend]:
        remedy = f"{tpu.why_not()}, or use cpu" if backend == "tpu" else REMEDY[backend]
        raise ConfigError(f"--backend {backend}: {remedy}")
    return tpu.device() if backend == "tpu" else torch.device(BACKENDS[backend])


def tiny_config() -> DecoderConfig:
    """What is saved; no option of a run appears in it."""
    return DecoderConfig("llama", 256, 64, 128, 2, 4, 2, 16, CONTEXT, Rope(16, 1e4), tie_word_embeddings=True)


def train_tiny(run: TinyRun, reporter: Reporter | None = None) -> TinyResult:
    """Train, evaluate on the text's end that was held out, and save where `output` is given.

    Raises:
        ConfigError: a backend that is not here; nothing was written.
    """
    reporter = reporter or Reporter()
    device = device_of(run.backend)
    if run.backend in NOT_VALIDATED:
        reporter.note(f"{run.backend}: this run has not been validated on such hardware")
    corpus = np.frombuffer(CORPUS.encode(), np.uint8)
    cut = len(corpus) * 4 // 5
    held_out = corpus[cut : cut + (len(corpus) - cut) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    source = TokenLoader(TokenArrays(corpus[:cut]), CONTEXT * ROWS, run.seed, context=CONTEXT)
    torch.manual_seed(run.model_seed)
    model, spec = _model(run, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    schedule = Schedule(RATE[run.method], run.steps, "wsd", warmup=min(10, run.steps))
    metrics: list[TrainingMetric] = []
    optimizer = Adam(trained, lr=schedule.lr, gradient_clip=1.0)
    graph = StepGraph(model, optimizer, note=reporter.note) if run.step_graph else None
    sinks = (metrics.append, reporter.metric)
    trainer = Trainer(model, optimizer, source, schedule, device=device, sinks=sinks, step_graph=graph)
    batches = [TokenArrays(held_out).batch(slice(None))]
    before = evaluate(model, batches, device)
    reporter.evaluation("before training", before)
    reporter.begin(0, run.steps)
    with contextlib.ExitStack() as stack:
        stack.callback(reporter.end)
        trainer.run()
    if graph is not None:
        reporter.note(graph.summary())
        graph.drop("the training is done")
    after = evaluate(model, batches, device)
    reporter.evaluation("after training", after)
    if run.output is not None:
        _save(model, spec, run.output)
    return TinyResult(before, after, tuple(metrics))


def _model(run: TinyRun, device: torch.device) -> tuple[Decoder, LoraSpec | None]:
    model = Decoder(tiny_config(), activation_checkpointing=run.activation_checkpointing, attention=run.attention)
    if run.method == "full":
        return model.to(device), None
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(10)  # an adapter steers what the frozen weights make; those of a new model make next to nothing
    if run.method == "qlora":
        quantize_blocks(model)
    model = model.to(tpu.made_on(device))
    spec = LoraSpec(rank=16, alpha=32)
    apply_lora(model, spec, seed=run.model_seed)
    return model.to(device), spec


def _save(model: Decoder, spec: LoraSpec | None, output: str | os.PathLike[str]) -> None:
    if spec is None:
        save_hf(model, pathlib.Path(output))
    else:
        save_adapter(model, spec, output)
