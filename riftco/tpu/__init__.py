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
NAMES = ("tpu", "xla")  # what users may call it


def why_not() -> str:
    """Why this process has no TPU runtime; "" when it has one."""
    if importlib.util.find_spec("torch_xla"):
        return ""
    return (
        f"torch_xla is not installed beside torch {torch.__version__}; install torch==2.9.1 and torch_xla==2.9.0 in an "
        "environment of their own, as `make tpu-env` does"
    )


def device() -> torch.device:
    """The device of this process: a TPU core, or the CPU under PJRT_DEVICE=CPU. Importing torch_xla registers it.

    Raises:
        RuntimeError: torch_xla is not installed.
    """
    if reason := why_not():
        raise RuntimeError(f"no TPU: {reason}")
    return importlib.import_module("torch_xla").device()


def number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number that changes from step to step, as an input of the graph: Python's numbers become part of it.

    Not a scalar while it travels: torch_xla would share the input of another scalar that happens to be equal.
    """
    return torch.tensor([value], dtype=dtype).to(device).reshape(())


def read(*scalars: Tensor) -> list[float]:
    """Run what has been recorded as one graph, and fetch these numbers in one transfer."""
    values = torch.stack([s.detach().reshape(()).float() for s in scalars])
    importlib.import_module("torch_xla").sync()
    return values.cpu().tolist()


def checkpoint(layer: Callable, *args, use_reentrant: bool = False):
    """torch.utils.checkpoint for XLA: torch_xla's own, which keeps the compiler from merging both runs of the layer.

    It is re-entrant, whatever is asked for: one of `args` must require a gradient.
    """
    return importlib.import_module("torch_xla.utils.checkpoint").checkpoint(layer, *args, use_reentrant=True)


def rng_state() -> Tensor:
    """The state of the device's generator."""
    state = importlib.import_module("torch_xla.core.xla_model").get_rng_state()  # unsigned
    return torch.tensor([state - (1 << 64) if state >> 63 else state])


def set_rng_state(state: Tensor) -> None:
    importlib.import_module("torch_xla.core.xla_model").set_rng_state(int(state) % (1 << 64))


def made_on(device: torch.device) -> torch.device:
    """Where to make what `device` will hold: on XLA each random draw and each quantisation would be a program of its
    own, and another generator would draw."""
    return torch.device("cpu") if device.type == DEVICE_TYPE else device


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
