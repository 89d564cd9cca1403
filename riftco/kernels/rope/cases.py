"""Inputs of rotary position embedding for the conformance test and the bench.

B sequences of T tokens; H query and K key heads; D head dim, R rotary dim.
"""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import rope
from .tables import rope_tables

GRADS = ("q", "k")
ROUNDINGS: dict[str, int] = {}
CASES = (
    Case("smallest", dict(B=1, T=2, H=1, K=1, D=2, R=2)),
    Case("half, grouped heads", dict(B=2, T=5, H=6, K=2, D=16, R=16)),
    Case("interleaved", dict(B=2, T=5, H=3, K=1, D=12, R=12), dict(interleaved=True)),
    Case("partial", dict(B=1, T=4, H=3, K=3, D=20, R=6)),
    Case("partial interleaved, positions", dict(B=2, T=4, H=2, K=1, D=70, R=10), dict(interleaved=True, given=True)),
    Case("packed, positions", dict(B=1, T=9, H=2, K=2, D=8, R=8), dict(packed=True, given=True)),
    Case("more heads than a block", dict(B=1, T=2, H=34, K=17, D=256, R=256), dict(given=True)),
)
BENCH = (
    Case("SmolLM2", dict(B=4, T=2048, H=9, K=3, D=64, R=64)),
    Case("Llama 3 8B", dict(B=4, T=2048, H=32, K=8, D=128, R=128)),
    Case("Gemma 3 4B", dict(B=4, T=2048, H=8, K=4, D=256, R=256)),
)
MAX_POSITION = 40


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    B, T, H, K, D, R = (case.shape[k] for k in "BTHKDR")
    tokens = (T,) if case.options.get("packed") else (B, T)
    cos, sin = rope_tables(R, max(T, MAX_POSITION), theta=100.0)
    inputs = {
        "q": torch.randn(*tokens, H, D, generator=generator, dtype=torch.float64),
        "k": torch.randn(*tokens, K, D, generator=generator, dtype=torch.float64),
        "cos": 1.1 * cos,  # as with YaRN's factor, so that the transposed rotation is not the inverse one
        "sin": 1.1 * sin,
    }
    if case.options.get("given"):
        inputs["positions"] = torch.randint(0, MAX_POSITION, tokens, generator=generator)
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    return bool((inputs["sin"].abs() > 0.1).any()) and inputs["q"].shape[-3] > 1


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    q, k = rope(
        inputs["q"],
        inputs["k"],
        inputs["cos"],
        inputs["sin"],
        positions=inputs.get("positions"),
        interleaved=case.options.get("interleaved", False),
    )
    return {"q": q, "k": k}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    pair, tables = [inputs["q"], inputs["k"]], (inputs["cos"], inputs["sin"])
    q, k = spec.forward(pair, *tables, inputs.get("positions"), case.options.get("interleaved", False), False)
    return {"q": q, "k": k}


def _elements(case: Case) -> int:
    s = case.shape
    return s["B"] * s["T"] * (s["H"] + s["K"]) * s["D"]


def flops(case: Case) -> int:
    """Three an element, forward and backward."""
    return 6 * _elements(case)


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: q and k read and written, forward and backward; the tables stay in the cache."""
    return 4 * dtype.itemsize * _elements(case)
