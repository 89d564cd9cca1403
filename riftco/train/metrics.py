"""What a run reports: plain immutable records. Who prints or stores them is the caller's affair."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TrainingMetric:
    """One optimizer step.

    Attributes:
        step: 1 for the first.
        loss: the mean over the step's labelled tokens before the update, unscaled, whatever the accumulation.
        gradient_norm: the global norm before clipping.
        clip_scale: 1 within the limit, else clip / norm.
        lr: the learning rate that this step used.
        tokens: labelled tokens; physical_tokens: tokens executed.
        tokens_per_s: physical tokens a second, data preparation included.
        peak_bytes: most memory so far: of the device's allocator, or of the process on a CPU.
        epoch: passes over the data when the step's batch was drawn, from 0.
    """

    step: int
    loss: float
    gradient_norm: float
    clip_scale: float
    lr: float
    tokens: int
    physical_tokens: int
    tokens_per_s: float
    peak_bytes: int
    epoch: int

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """Loss (mean over labelled tokens), perplexity and token accuracy on held-out examples."""

    loss: float
    perplexity: float
    accuracy: float
    tokens: int

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Progress:
    """Handed to on_progress after each micro-batch; returning False asks the run to stop.

    Attributes:
        step: the optimizer step that this micro-batch belongs to.
        micro_batch: 1 to `micro_batches`; the last one's step is already applied.
    """

    step: int
    total_steps: int
    micro_batch: int
    micro_batches: int
    physical_tokens: int


@dataclass(frozen=True)
class RunReport:
    """What `Trainer.run` did. `epoch_complete` is False when a callback stopped it: metrics tell what ran."""

    metrics: tuple[TrainingMetric, ...]
    epoch_complete: bool


def peak_bytes(device: torch.device) -> int:
    """Most bytes held so far: by the allocator of an accelerator, by the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, Linux KiB
