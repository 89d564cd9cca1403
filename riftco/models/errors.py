"""What models refuse, in one line each."""

import importlib
from typing import Any


class ModelError(ValueError):
    """A model file, folder or request that cannot be served; the message says what came and what is accepted."""


def package(name: str) -> Any:
    """The optional package `name`, or how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as why:
        raise ModelError(f"reading this needs the package {name}; run: pip install 'riftco[finetune]'") from why
