"""The two classes of failure in a step, and which error belongs to which."""

from __future__ import annotations

import torch


class StepAbandoned(RuntimeError):
    """The step was dropped before the optimizer wrote anything; earlier steps stand and the trainer goes on.

    Attributes:
        past_batch: the batch was at fault, and the one after it comes next.
        of_another: another process of the run abandoned it, and says why.
    """

    def __init__(self, why: str, *, past_batch: bool = False, of_another: bool = False):
        super().__init__(why)
        self.past_batch, self.of_another = past_batch, of_another


class TrainerPoisoned(RuntimeError):
    """The device failed, or the optimizer failed while writing: parameters may be partly written.

    Every later call is refused. Build the trainer again and restore a checkpoint.

    Attributes:
        of_another: another process of the run failed, and says why.
    """

    def __init__(self, why: str, *, of_another: bool = False):
        super().__init__(why)
        self.of_another = of_another


class Verdict:
    """How a process ends a part of a step; of several processes' codes the largest holds for all.

    Attributes:
        stop: somebody asks to stop.
    """

    FINE, STOP, PAST_BATCH, SAME_BATCH, POISONED = range(5)

    def __init__(self) -> None:
        self.stop = False

    def code(self, failed: BaseException | None) -> int:
        if isinstance(failed, StepAbandoned):
            return self.PAST_BATCH if failed.past_batch else self.SAME_BATCH
        return self.POISONED if failed is not None else self.STOP if self.stop else self.FINE


class OutOfMemory(Exception):
    """A step that can be computed again in smaller micro-batches."""


NO_MEMORY = (  # in the words of PyTorch's CPU and MPS allocators, the CUDA runtime, Triton's launcher and cuBLAS
    "can't allocate memory",
    "MPS backend out of memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
DEVICE = ("CUDA error", "Triton Error [CUDA]", "cuDNN error", "HIP error", "MPS backend")


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def device_failed(error: BaseException) -> bool:
    """Whether `error` is an accelerator's own error, after which none of its memory can be trusted."""
    if out_of_memory(error):
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in DEVICE)


def diagnostic(error: BaseException) -> str:
    """The error's own words, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}" if str(error) else type(error).__name__
