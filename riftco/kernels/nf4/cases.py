"""Inputs of NF4 products for the conformance test and the bench. M rows, N output features, K input features."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import nf4_linear
from .quantize import quantize_nf4
from .weight import NF4Weight

GRADS = ("x", "bias")
ROUNDINGS = {"y": 1, "d_x": 1}  # W, to x's dtype
CASES = (
    Case("one row, one output", dict(M=1, N=1, K=64)),
    Case("blocks across rows", dict(M=5, N=7, K=37), dict(bias=True)),
    Case("odd K, double quant", dict(M=3, N=70, K=131), dict(double_quant=True)),
    Case("several tiles", dict(M=40, N=130, K=192), dict(bias=True)),
    Case("many rows", dict(M=70, N=130, K=83), dict(bias=True, double_quant=True)),
    Case("one row, whole blocks", dict(M=1, N=21, K=192), dict(bias=True, double_quant=True)),
    Case("one row, blocks of 32", dict(M=1, N=9, K=96), dict(block_size=32)),
    Case("few rows, whole blocks", dict(M=3, N=70, K=128), dict(bias=True)),
    Case("many rows, whole blocks", dict(M=66, N=35, K=192), dict(bias=True)),
    Case("block 32", dict(M=4, N=9, K=96), dict(block_size=32)),
    Case("block 4096 larger than W", dict(M=4, N=9, K=20), dict(block_size=4096)),
    Case("zero rows of W", dict(M=17, N=6, K=128), dict(zero=True, double_quant=True, bias=True)),
)
BENCH = tuple(
    Case(f"{name}, {M} rows", dict(M=M, N=N, K=K), dict(double_quant=True))
    for M in (1, 16, 4096)
    for name, N, K in (("SmolLM2 up", 1536, 576), ("Llama 3 up", 14336, 4096), ("Llama 3 down", 4096, 14336))
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    M, N, K = (case.shape[k] for k in "MNK")
    w = torch.randn(N, K, generator=generator) / K**0.5
    if case.options.get("zero"):
        w[1:3] = 0
    q = quantize_nf4(w, block_size=_block(case), double_quant=case.options.get("double_quant", False))
    x = torch.randn(M, K, generator=generator, dtype=torch.float64)
    inputs = {"x": x, "codes": q.codes, "absmax": q.scale}
    if case.options.get("bias"):
        inputs["bias"] = torch.randn(N, generator=generator, dtype=torch.float64)
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    return bool((inputs["absmax"] > 0).any()) and bool((inputs["codes"] != inputs["codes"][0]).any())


def _block(case: Case) -> int:
    return case.options.get("block_size", 64)


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    q = NF4Weight(inputs["codes"], inputs["absmax"], (case.shape["N"], case.shape["K"]), _block(case))
    return {"y": nf4_linear(inputs["x"], q, inputs.get("bias"))}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    sizes = (case.shape["N"], case.shape["K"], _block(case))
    return {"y": spec.forward(inputs["x"], inputs["codes"], inputs["absmax"], inputs.get("bias"), *sizes)}


def flops(case: Case) -> int:
    """Two products of 2 M N K."""
    return 4 * case.shape["M"] * case.shape["N"] * case.shape["K"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: packed weight read twice; x, d_y read and y, d_x written once."""
    M, N, K = (case.shape[k] for k in "MNK")
    return 2 * (N * K // 2 + 4 * N * K // _block(case)) + 2 * dtype.itemsize * M * (N + K)
