"""The peak of a training step before it runs: the step is traced on meta tensors, and nothing is allocated.

A deep model is traced with few layers, twice: in each part of the step every kind of memory grows by the same with each
layer, so that two depths give all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..adapters import apply_lora
from ..models import Decoder
from ..models.config import DecoderConfig
from ..nn import NF4Linear
from ..optim import Adam
from ..train.config import DTYPES, ConfigError, FinetuneConfig
from .meta import TARGETS, MetaTrace
from .report import MemoryReport, size
from .trace import Storage

DEPTHS = 2, 4  # layers of the two traces
ERROR = 0.10  # what a prediction may be off
BLOCK = 512  # bytes: the CUDA allocator gives multiples
LIBRARIES = 32 << 20  # bytes of cuBLAS's workspace, which lies in the allocator's memory
CHECKPOINTING = ("disabled", "selective", "block")  # ever less memory
PARTS = (
    "weights", "adapters", "gradients", "optimizer", "inputs", "activations", "loss head", "workspaces",
    "allocator's slack",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Bytes at the peak of a step.

    Attributes:
        phase: the part of the step that the peak lies in.
        parts: name of PARTS -> bytes.
    """

    phase: str
    parts: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    def lines(self) -> Iterable[str]:
        yield f"predicted peak {size(self.peak_bytes)} in the {self.phase}, within {ERROR:.0%}"
        for name in PARTS:
            if self.parts[name]:
                yield f"  {size(self.parts[name]):>16s}  {name}"


def predict(
    config: DecoderConfig, settings: FinetuneConfig, *, tokens: int, batch: int = 1, target: str = "cuda"
) -> Prediction:
    """The peak of a step of `riftco finetune` with these settings on a micro-batch of `batch` rows of `tokens`.

    Args:
        target: the device's type, "cpu" or "cuda"; it need not be here.
    """
    if target not in TARGETS:
        raise ConfigError(f"a step on {target} cannot be predicted; accepted: {', '.join(TARGETS)}")
    if tokens > config.max_position_embeddings:
        raise ConfigError(f"{tokens} tokens are longer than this model's context of {config.max_position_embeddings}")
    layers = config.num_layers
    if layers <= DEPTHS[1]:
        return max(_measured(config, settings, tokens, batch, target).values(), key=lambda p: p.peak_bytes)
    few, more = (_measured(_with_layers(config, n), settings, tokens, batch, target) for n in DEPTHS)
    factor = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
    phases = []
    for phase in more:
        a, b = few[phase].parts, more[phase].parts
        phases.append(Prediction(phase, {n: max(0, round(a[n] + factor * (b[n] - a[n]))) for n in PARTS}))
    return max(phases, key=lambda p: p.peak_bytes)


def _with_layers(config: DecoderConfig, count: int) -> DecoderConfig:
    """The first `count` layers; of those that the config lists, the ones among them."""
    listed = {name: getattr(config, name) for name in ("no_rope_layers", "sliding_layers")}
    kept = {name: type(layers)(i for i in layers if i < count) for name, layers in listed.items()}
    return dataclasses.replace(config, num_layers=count, **kept)


def _measured(
    config: DecoderConfig, settings: FinetuneConfig, tokens: int, batch: int, target: str
) -> dict[str, Prediction]:
    """Part of the step -> its peak, by one trace of the whole model on meta tensors."""
    model, optimizer = _built(config, settings, target)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for p in trained:
        p.grad = torch.empty_like(p)
    optimizer.step()  # its state is there before the step that is traced
    if settings.accumulate == 1:
        optimizer.zero_grad()
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    target_ids = torch.zeros_like(ids)
    trace = MetaTrace(target, model, optimizer, {"input_ids": ids, "target": target_ids})
    late = trace.phase("end of the backward")

    def halfway(grad: torch.Tensor) -> None:
        if not trace.is_late:
            trace.is_late = True
            late.__enter__()

    # a hook that is given what a block returns would be a reader of it, in replays too
    behind_middle = [*model.model.layers, model.model.norm][(config.num_layers + 1) // 2]
    hook = behind_middle.register_forward_pre_hook(lambda module, args: args[0].register_hook(halfway) and None)
    with trace:
        with trace.phase("forward"):
            loss = model.loss(ids, target_ids, n_labelled=batch * (tokens - 1))
        with trace.phase("backward"):
            loss.backward()
            if trace.is_late:
                late.__exit__(None, None, None)
        del loss
        with trace.phase("optimizer step"):
            optimizer.step()
    hook.remove()
    return {
        phase: _sorted(trace.report(0, phase=phase), trace.alive(phase), settings, target)
        for phase in trace.peaks
        if phase != "step"
    }


def _sorted(report: MemoryReport, alive: list[Storage], settings: FinetuneConfig, target: str) -> Prediction:
    """A phase's peak by what it is for."""
    kinds = report.kinds
    trained, frozen = kinds.get("parameter", 0), kinds.get("frozen weight", 0)
    full = settings.method == "full"
    head = sum(s.nbytes for s in alive if not s.labels and s.where.startswith("kernels/linear_cross_entropy"))
    slack = 0
    if target == "cuda":
        slack = LIBRARIES + sum(-s.nbytes % BLOCK for s in alive)
    parts = {
        "weights": frozen + full * trained,
        "adapters": 0 if full else trained,
        "gradients": kinds.get("gradient", 0),
        "optimizer": kinds.get("optimizer state", 0),
        "inputs": kinds.get("input", 0),
        "activations": kinds.get("saved for backward", 0),
        "loss head": min(head, kinds.get("other", 0)),
        "workspaces": max(kinds.get("other", 0) - head, 0),
        "allocator's slack": slack,
    }
    return Prediction(report.phase, parts)


def _built(config: DecoderConfig, settings: FinetuneConfig, target: str) -> tuple[Decoder, Adam]:
    """Model and optimizer as a run makes them, on the meta device."""
    if settings.held == "packed":
        raise ValueError(
            "memory --predict: what a GGUF file's own blocks take is not predicted; ask for nf4, bf16 or fp32"
        )
    named = settings.weights if settings.weights in ("bf16", "fp32") else settings.dtype
    given = DTYPES[named]
    small = torch.float32 if target == "cpu" or settings.method == "full" else torch.bfloat16
    meta = torch.device("meta")
    with meta:
        model = Decoder(config, activation_checkpointing=settings.activation_checkpointing).to(given or small)
    model.attention = settings.attention
    if settings.held == "nf4":
        for name, child in [*model.model.layers.named_modules()]:
            if isinstance(child, torch.nn.Linear):
                made = NF4Linear(child.in_features, child.out_features, device=meta, dtype=child.weight.dtype)
                made.bias = child.bias
                model.model.layers.set_submodule(name, made)
    if settings.method != "full":
        with meta:
            apply_lora(model, settings.lora_spec(), seed=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model.train(), Adam(trained, lr=1e-4, state=settings.moments)
