"""TPU through torch_xla: launchers named after the ops, in plain torch that XLA compiles into one graph.

The only place that knows what PyTorch calls the device. torch_xla says "xla" (dispatch key XLA, the name in every
op's launcher table); TorchTPU, its successor, says "tpu".
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

DEVICE_TYPE = "xla"


def why_not() -> str:
    """Why this process has no TPU runtime; "" when it has one."""
    if importlib.util.find_spec("torch_xla"):
        return ""
    return (
        f"torch_xla is not installed beside torch {torch.__version__}; torch_xla 2.9 needs torch 2.9 and so an "
        "environment of its own, which `make tpu-env` makes"
    )


def device() -> torch.device:
    """The device of this process: a TPU core, or the CPU under PJRT_DEVICE=CPU. Importing torch_xla registers it.

    Raises:
        RuntimeError: torch_xla is not installed.
    """
    if reason := why_not():
        raise RuntimeError(f"no TPU: {reason}")
    return importlib.import_module("torch_xla").device()
