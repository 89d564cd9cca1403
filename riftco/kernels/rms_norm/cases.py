"""Inputs of RMS normalisation for the conformance test and the bench. B, T leading dimensions; C hidden size."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import rms_norm

GRADS = ("x", "weight", "residual")
# x + residual is rounded before it is normalised
ROUNDINGS = {"y": 1, "d_x": 1, "d_residual": 1, "d_weight": 1}
CASES = (
    Case("one element", dict(B=1, T=1, C=1)),
    Case("odd sizes", dict(B=3, T=5, C=33)),
    Case("no weight", dict(B=2, T=7, C=48), dict(weightless=True)),
    Case("Gemma offset", dict(B=2, T=9, C=64), dict(offset=1.0, eps=1e-5)),
    Case("two blocks of registers", dict(B=1, T=3, C=4099)),
    Case("more columns than registers hold", dict(B=1, T=2, C=16390)),
    Case("residual", dict(B=2, T=7, C=40), dict(residual=True)),
    Case("residual, long rows", dict(B=2, T=1, C=16400), dict(residual=True)),
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
    inputs = {"x": x}
    if case.options.get("residual"):
        inputs["residual"] = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    if not case.options.get("weightless"):
        inputs["weight"] = torch.randn(C, generator=generator, dtype=torch.float64)
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    return bool((inputs["x"] != 0).any()) and ("weight" in inputs) != bool(case.options.get("weightless"))


def _options(case: Case) -> tuple[float, float]:
    return case.options.get("eps", 1e-6), case.options.get("offset", 0.0)


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    eps, offset = _options(case)
    if "residual" not in inputs:
        return {"y": rms_norm(inputs["x"], inputs.get("weight"), eps, offset=offset)}
    y, total = rms_norm(inputs["x"], inputs["weight"], eps, residual=inputs["residual"], offset=offset)
    return {"y": y, "total": total}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    eps, offset = _options(case)
    y, total, _ = spec.forward(inputs["x"], inputs.get("residual"), inputs.get("weight"), eps, offset)
    return {"y": y, "total": total} if "residual" in inputs else {"y": y}


def flops(case: Case) -> int:
    """About four an element forward, ten backward with the weight's gradient."""
    return 14 * case.shape["B"] * case.shape["T"] * case.shape["C"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: x read and y written forward; d_y and x read, d_x written backward."""
    return 5 * dtype.itemsize * case.shape["B"] * case.shape["T"] * case.shape["C"]
