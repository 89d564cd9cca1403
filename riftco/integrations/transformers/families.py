"""The families that riftco.patch knows, and what their modules are called."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Family:
    name: str
    prefix: str  # of its classes
    norm_offset: float = 0.0  # added to the norms' weights


FAMILIES = (
    Family("llama", "Llama"),
    Family("mistral", "Mistral"),
    Family("qwen2", "Qwen2"),
    Family("qwen3", "Qwen3"),
    Family("smollm3", "SmolLM3"),
    Family("gemma2", "Gemma2", 1.0),
    Family("gemma3", "Gemma3", 1.0),
    Family("phi3", "Phi3"),
)
SUFFIXES = {
    "norm": "RMSNorm",
    "mlp": "MLP",
    "rotary": "RotaryEmbedding",
    "attention": "Attention",
    "loss": "ForCausalLM",
}


def known() -> dict[type[nn.Module], tuple[Family, str]]:
    """Class -> (family, kind of module), of the families whose code transformers has loaded."""
    found = {}
    for family in FAMILIES:
        module = sys.modules.get(f"transformers.models.{family.name}.modeling_{family.name}")
        for kind, suffix in SUFFIXES.items() if module else ():
            found[getattr(module, family.prefix + suffix)] = family, kind
    return found
