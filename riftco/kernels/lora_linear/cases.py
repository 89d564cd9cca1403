"""Inputs of lora_linear for the conformance test and the bench.

M rows, N output features, C input features, R adapter rank.
"""

import torch
from torch import Tensor

from .._cases import Case
from ..nf4.quantize import quantize_nf4
from . import op, spec

GRADS = ("x", "weight", "bias", "lora_a", "lora_b")
# y: W (NF4), x A^T, the base product before the adapter is added; d_x likewise with d_y B; d_A: d_y B; d_B: x A^T
ROUNDINGS = {"y": 3, "d_x": 3, "d_lora_a": 1, "d_lora_b": 1}
CASES = (
    Case("rank 1", dict(M=1, N=1, C=5, R=1)),
    Case("odd sizes, bias", dict(M=7, N=13, C=37, R=3), dict(bias=True)),
    Case("several tiles", dict(M=70, N=130, C=67, R=33), dict(bias=True)),
    Case("rank 130", dict(M=35, N=20, C=24, R=130)),
    Case("NF4 base", dict(M=9, N=14, C=40, R=4), dict(nf4=True, bias=True)),
    Case("rows", dict(M=40, N=14, C=40, R=4), dict(rows=True)),
    Case("NF4 base, rows, dropout", dict(M=40, N=14, C=33, R=8), dict(nf4=True, rows=True, dropout=0.3)),
    Case("float32 adapters", dict(M=20, N=14, C=33, R=8), dict(mixed=True)),
    Case("dropout", dict(M=300, N=14, C=33, R=8), dict(dropout=0.4, bias=True)),
)
BENCH = tuple(
    Case(f"{name}, {M} rows", dict(M=M, N=N, C=C, R=16), dict(nf4=True, mixed=True))
    for M in (512, 4096)
    for name, N, C in (("SmolLM2 up", 1536, 576), ("Llama 3 up", 14336, 4096))
)
SCALE = 1.75


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    M, N, C, R = (case.shape[k] for k in "MNCR")
    o = case.options

    def normal(*shape, dtype=torch.float64):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    inputs = {"x": normal(M, C)}
    if o.get("nf4"):
        q = quantize_nf4((normal(N, C) / C**0.5).float(), double_quant=False)
        inputs |= {"codes": q.codes, "absmax": q.scale}
    else:
        inputs["weight"] = normal(N, C) / C**0.5
    adapter = torch.float32 if o.get("mixed") else torch.float64
    inputs["lora_a"] = normal(R, C, dtype=adapter) / C**0.5
    inputs["lora_b"] = normal(N, R, dtype=adapter) / R**0.5
    if o.get("bias"):
        inputs["bias"] = normal(N)
    if o.get("dropout"):
        inputs["keep"] = torch.rand(M, C, generator=generator) >= o["dropout"]
    if o.get("rows"):
        inputs["rows"] = torch.randperm(M, generator=generator)[: M // 3]
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    keep, rows = inputs.get("keep"), inputs.get("rows")
    mixed = keep is None or (bool(keep.any()) and not bool(keep.all()))
    return mixed and (rows is None or 0 < rows.numel() < case.shape["M"]) and bool(inputs["lora_b"].any())


def _args(inputs: dict[str, Tensor], case: Case) -> tuple:
    get = inputs.get
    weight = inputs["codes"] if "codes" in inputs else inputs["weight"]
    p = case.options.get("dropout", 0.0)
    return (
        inputs["x"], weight, get("absmax"), 64 if "codes" in inputs else 0, get("bias"),
        inputs["lora_a"], inputs["lora_b"], SCALE, get("keep"), p, get("rows"),
    )  # fmt: skip


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Through the Function, as the public function draws the mask itself."""
    return {"y": op.LoRAProduct.apply(*_args(inputs, case))[0]}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    return {"y": spec.forward(*_args(inputs, case))[0]}


def flops(case: Case) -> int:
    """Base forward and d_x, and three adapter products each way (x A^T and d_y B are shared)."""
    M, N, C, R = (case.shape[k] for k in "MNCR")
    return 4 * M * N * C + 6 * M * R * (N + C)


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: x, d_y read twice, y, d_x written once, the weight read twice."""
    M, N, C, _ = (case.shape[k] for k in "MNCR")
    per_weight = 0.5625 if case.options.get("nf4") else dtype.itemsize
    return int(dtype.itemsize * 3 * M * (N + C) + 2 * per_weight * N * C)
