"""Inputs of layer normalisation for the conformance test and the bench. B, T leading dimensions; C hidden size."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import layer_norm

GRADS = ("x", "weight", "bias", "residual")
# x + residual is rounded before it is normalised
ROUNDINGS = {"y": 1, "d_x": 1, "d_residual": 1, "d_weight": 1}
CASES = (
    Case("two columns", dict(B=1, T=3, C=2)),
    Case("odd sizes", dict(B=3, T=5, C=33)),
    Case("no weight, no bias", dict(B=2, T=7, C=48), dict(without=("weight", "bias"))),
    Case("no bias", dict(B=2, T=9, C=64), dict(without=("bias",), eps=1e-3)),
    Case("residual", dict(B=2, T=7, C=40), dict(residual=True)),
    Case("mean far from zero", dict(B=2, T=3, C=65), dict(mean=30.0)),
    Case("more columns than registers hold", dict(B=1, T=2, C=16390)),
    Case("residual, long rows", dict(B=2, T=1, C=16400), dict(residual=True)),
    Case("many short rows", dict(B=2, T=601, C=9)),
)
BENCH = (
    Case("GPT-2 XL", dict(B=4, T=2048, C=1600)),
    Case("4096", dict(B=8, T=2048, C=4096)),
    Case("8192", dict(B=8, T=2048, C=8192)),
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    B, T, C = (case.shape[k] for k in "BTC")
    x = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    if "mean" in case.options:
        x += case.options["mean"]
    else:
        x *= torch.logspace(-2, 1, B * T, dtype=torch.float64).view(B, T, 1)  # rows of very different size
    inputs = {"x": x}
    if case.options.get("residual"):
        inputs["residual"] = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    for name in ("weight", "bias"):
        if name not in case.options.get("without", ()):
            inputs[name] = torch.randn(C, generator=generator, dtype=torch.float64)
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    present = {"weight", "bias"} - set(case.options.get("without", ()))
    return bool((inputs["x"].var(-1) > 0).all()) and present <= inputs.keys()


def _outputs(result) -> dict[str, Tensor]:
    return {"y": result} if isinstance(result, Tensor) else dict(zip(("y", "total"), result))


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    affine, eps = (inputs.get("weight"), inputs.get("bias")), case.options.get("eps", 1e-5)
    if "residual" in inputs:
        return _outputs(layer_norm(inputs["x"], *affine, eps, residual=inputs["residual"]))
    return _outputs(layer_norm(inputs["x"], *affine, eps))


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    residual, weight, bias = (inputs.get(name) for name in ("residual", "weight", "bias"))
    y, total, *_ = spec.forward(inputs["x"], residual, weight, bias, case.options.get("eps", 1e-5))
    return _outputs((y, total) if "residual" in inputs else y)


def flops(case: Case) -> int:
    """About six an element forward, fourteen backward with the gradients of weight and bias."""
    return 20 * case.shape["B"] * case.shape["T"] * case.shape["C"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: x read and y written forward; d_y and x read, d_x written backward."""
    return 5 * dtype.itemsize * case.shape["B"] * case.shape["T"] * case.shape["C"]
