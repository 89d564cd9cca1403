"""Inputs of RMS normalisation for the conformance test and the bench. B, T leading dimensions; C hidden size."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import rms_norm

GRADS = ("x", "weight")
ROUNDINGS: dict[str, int] = {}
CASES = (
    Case("one element", dict(B=1, T=1, C=1)),
    Case("odd sizes", dict(B=3, T=5, C=33)),
    Case("no weight", dict(B=2, T=7, C=48), dict(weightless=True)),
    Case("Gemma offset", dict(B=2, T=9, C=64), dict(offset=1.0, eps=1e-5)),
    Case("more columns than a block", dict(B=1, T=3, C=4099)),
    Case("many short rows", dict(B=2, T=601, C=9)),
)
BENCH = (
    Case("SmolLM2", dict(B=4, T=2048, C=576)),
    Case("Llama 3 8B", dict(B=4, T=2048, C=4096)),
    Case("Qwen 3 q-norm", dict(B=4, T=2048 * 32, C=128)),
    Case("Llama 3 70B", dict(B=4, T=2048, C=8192)),
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    B, T, C = (case.shape[k] for k in "BTC")
    x = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    x *= torch.logspace(-2, 1, B * T, dtype=torch.float64).view(B, T, 1)  # rows of very different size
    if B * T > 1:
        x[0, 0] *= 1e-2  # a row whose mean square is near eps
    if case.options.get("weightless"):
        return {"x": x}
    return {"x": x, "weight": torch.randn(C, generator=generator, dtype=torch.float64)}


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    return bool((inputs["x"] != 0).any()) and ("weight" in inputs) != bool(case.options.get("weightless"))


def _options(case: Case) -> tuple[float, float]:
    return case.options.get("eps", 1e-6), case.options.get("offset", 0.0)


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    eps, offset = _options(case)
    return {"y": rms_norm(inputs["x"], inputs.get("weight"), eps, offset=offset)}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    eps, offset = _options(case)
    return {"y": spec.forward(inputs["x"], inputs.get("weight"), eps, offset)[0]}


def flops(case: Case) -> int:
    """About four an element forward, ten backward with the weight's gradient."""
    return 14 * case.shape["B"] * case.shape["T"] * case.shape["C"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: x read and y written forward; d_y and x read, d_x written backward."""
    return 5 * dtype.itemsize * case.shape["B"] * case.shape["T"] * case.shape["C"]
