"""TPU through torch_xla: launchers named after the ops, in plain torch that XLA compiles into one graph.

The only place that knows what PyTorch calls the device. torch_xla says "xla" (dispatch key XLA, the name in every
op's launcher table); TorchTPU, its successor, says "tpu".
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

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


def functionalized(launcher: Callable) -> Callable:
    """`launcher` with its writes in place, through views too, turned into values: XLA tensors have no storage.

    PyTorch does this for XLA tensors above its dispatcher and switches it off inside an operator, where a write
    through a view would be lost without an error. torch.func.functionalize cannot stand in: views of columns fail.
    """

    @functools.wraps(launcher)
    def wrapper(*args, **kwargs):
        args, kwargs = tree_map_only(Tensor, torch._to_functional_tensor, (args, kwargs))
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize, False):
            outputs = launcher(*args, **kwargs)
        return tree_map_only(Tensor, _value, outputs)

    return wrapper


def _value(t: Tensor) -> Tensor:
    torch._sync(t)
    return torch._from_functional_tensor(t)
