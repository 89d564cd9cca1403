"""Inputs of GGUF products for the conformance test and the bench. M rows, N output features, K input features."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .formats import FORMATS
from .op import gguf_linear
from .weight import GGUFWeight

DEVICES = ("cpu", "cpu-triton", "mps-emulated", "cuda")  # torch_xla sends the bitcast of the scales back to the CPU
GRADS = ("x", "bias")
ROUNDINGS = {"y": 1, "d_x": 1}  # W, to x's dtype
CASES = (
    *(Case(f"{f.name}, two blocks", dict(M=5, N=7, K=2 * f.block), dict(format=f.name)) for f in FORMATS.values()),
    *(
        Case(f"{name}, three rows", dict(M=3, N=5, K=blocks * FORMATS[name].block), dict(format=name, bias=bias))
        for name, blocks, bias in (
            ("Q4_0", 2, False),
            ("Q4_1", 65, True),
            ("Q5_0", 2, True),
            ("Q5_1", 3, False),
            ("Q8_0", 33, False),
            ("Q4_K", 2, True),
            ("Q5_K", 2, False),
            ("Q6_K", 2, False),
        )
    ),
    Case("one row, three outputs", dict(M=1, N=3, K=32), dict(format="Q4_0")),
    Case("one row, several tiles", dict(M=1, N=130, K=288), dict(format="Q4_1", bias=True)),
    Case("five rows, parts", dict(M=5, N=130, K=288), dict(format="Q4_1", bias=True)),
    Case("several tiles", dict(M=40, N=130, K=160), dict(format="Q5_1", bias=True)),
    Case("many rows", dict(M=70, N=67, K=96), dict(format="Q5_0", bias=True)),
    Case("many rows, super-blocks", dict(M=70, N=35, K=256), dict(format="Q6_K")),
)
BENCH = tuple(
    Case(f"{name}, {format}, {M} rows", dict(M=M, N=N, K=K), dict(format=format))
    for M in (1, 16, 1024, 4096)
    for format in ("Q4_1", "Q4_K")
    for name, N, K in (("1536 x 1536", 1536, 1536), ("Llama 3 up", 14336, 4096))
) + tuple(
    Case(f"{N} x {K}, Q4_K, 1024 rows", dict(M=1024, N=N, K=K), dict(format="Q4_K"))
    for N, K in ((8960, 1536), (1536, 8960))
)


def random_blocks(format: str, n: int, generator: torch.Generator) -> Tensor:
    """uint8 [n, bytes]: any bits, but for float16 fields between 1/256 and 1/32 of either sign."""
    f = FORMATS[format]
    blocks = torch.randint(0, 256, (n, f.bytes), dtype=torch.uint8, generator=generator)
    for at in f.halves:
        exponent = torch.randint(7, 10, (n,), generator=generator)
        sign = torch.randint(0, 2, (n,), generator=generator)
        blocks[:, at + 1] = (sign << 7 | exponent << 2 | blocks[:, at + 1] & 3).to(torch.uint8)
    return blocks


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    M, N, K = (case.shape[k] for k in "MNK")
    f = FORMATS[case.options["format"]]
    inputs = {
        "x": torch.randn(M, K, generator=generator, dtype=torch.float64),
        "packed": random_blocks(f.name, N * K // f.block, generator).view(N, f.row_bytes(K)),
    }
    if case.options.get("bias"):
        inputs["bias"] = torch.randn(N, generator=generator, dtype=torch.float64)
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    w = spec.dequantize(inputs["packed"], case.options["format"], case.shape["N"], case.shape["K"], torch.float32)
    return bool(w.isfinite().all()) and bool((w > 0).any()) and bool((w < 0).any())


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    w = GGUFWeight(inputs["packed"], case.options["format"], (case.shape["N"], case.shape["K"]))
    return {"y": gguf_linear(inputs["x"], w, inputs.get("bias"))}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    sizes = (case.options["format"], case.shape["N"], case.shape["K"])
    return {"y": spec.forward(inputs["x"], inputs["packed"], inputs.get("bias"), *sizes)}


def flops(case: Case) -> int:
    """Two products of 2 M N K."""
    return 4 * case.shape["M"] * case.shape["N"] * case.shape["K"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: packed weight read twice; x, d_y read and y, d_x written once."""
    M, N, K = (case.shape[k] for k in "MNK")
    return 2 * N * FORMATS[case.options["format"]].row_bytes(K) + 2 * dtype.itemsize * M * (N + K)
