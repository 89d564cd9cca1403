"""riftco: fine-tuning kernels for PyTorch on NVIDIA, Apple, TPU and CPU.

``import riftco`` imports torch and nothing else; every public part is loaded when it is first named.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = (
    "functional", "nn", "optim", "models", "adapters", "data", "train", "serve", "integrations", "memory", "doctor",
    "bench",
)  # fmt: skip
_NAMES = {
    "explain": "riftco.kernels._contract",
    "patch": "riftco.integrations.transformers",
    "unpatch": "riftco.integrations.transformers",
}

__all__ = ["__version__", *_SUBMODULES, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"riftco.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'riftco' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
