"""Inputs of gated linear units for the conformance test and the bench. B, T leading dimensions; F feed-forward size."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import geglu, swiglu

GRADS = ("gate", "up", "both")
ROUNDINGS: dict[str, int] = {}
CASES = (
    Case("one element", dict(B=1, T=1, F=1)),
    Case("odd sizes", dict(B=3, T=5, F=33)),
    Case("several stretches of a row", dict(B=1, T=2, F=2050)),
    Case("large inputs", dict(B=1, T=3, F=40), dict(large=True)),
    Case("one tensor", dict(B=2, T=3, F=50), dict(fused=True)),
    Case("one tensor, gelu_tanh", dict(B=2, T=3, F=33), dict(fused=True, activation="gelu_tanh")),
    Case("gelu", dict(B=2, T=3, F=50), dict(activation="gelu")),
    Case("gelu, large inputs", dict(B=2, T=3, F=50), dict(activation="gelu", large=True)),
    Case("gelu_tanh, large inputs", dict(B=2, T=3, F=50), dict(activation="gelu_tanh", large=True)),
    Case("gelu_tanh", dict(B=2, T=3, F=50), dict(activation="gelu_tanh")),
)
BENCH = (
    Case("SmolLM2", dict(B=4, T=2048, F=1536)),
    Case("Llama 3 8B", dict(B=4, T=2048, F=14336)),
    Case("Gemma 3 4B", dict(B=4, T=2048, F=10240), dict(activation="gelu_tanh")),
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    B, T, F = (case.shape[k] for k in "BTF")
    gate, up = (3 * torch.randn(B, T, F, generator=generator, dtype=torch.float64) for _ in range(2))
    if case.options.get("large"):  # where exp(-gate) or gate^3 would be infinite; products stay below half's 65504
        gate[..., ::3] = torch.where(gate[..., ::3] < 0, -60000.0, 3000.0)
        gate[..., 1::3] *= 20
    return {"both": torch.cat((gate, up), -1)} if case.options.get("fused") else {"gate": gate, "up": up}


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    gate = inputs["both" if "both" in inputs else "gate"]
    both_ends = bool((gate.min() < -100) & (gate.max() > 100))
    return both_ends if case.options.get("large") else bool((gate != 0).any())


def _tensors(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    return (inputs["both"], None) if "both" in inputs else (inputs["gate"], inputs["up"])


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    activation = case.options.get("activation", "silu")
    if activation == "silu":
        return {"out": swiglu(*_tensors(inputs))}
    return {"out": geglu(*_tensors(inputs), approximate="tanh" if activation == "gelu_tanh" else "none")}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    return {"out": spec.forward(*_tensors(inputs), case.options.get("activation", "silu"))}


def flops(case: Case) -> int:
    """About five an element forward, twelve backward."""
    return 17 * case.shape["B"] * case.shape["T"] * case.shape["F"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: two read and one written forward; three read and two written backward."""
    return 8 * dtype.itemsize * case.shape["B"] * case.shape["T"] * case.shape["F"]
