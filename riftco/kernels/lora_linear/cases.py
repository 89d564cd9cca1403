"""Inputs of lora_linear for the conformance test and the bench.

M rows, N output features, C input features, R adapter rank; of a group, N and R are those of the first member, and the
others have other ones.
"""

import torch
from torch import Tensor

from .._cases import Case
from ..nf4.quantize import quantize_nf4
from . import dora, dropout, op, spec

GROUP = 3
GRADS = ("x", "gain", *(f"{name}{i}" for name in ("weight", "bias", "lora_a", "lora_b") for i in range(GROUP)))
# y: W (NF4), x A^T, and the first of base product and adapter's part before the other is added; d_x likewise with
# d_y B, and once more for each other member; d_A: d_y B; d_B: x A^T; DoRA: z, and d_z for what comes before it
ROUNDINGS = {"d_x": 5, "d_gain": 3} | {
    f"{k}{i}": n for i in range(GROUP) for k, n in (("y", 3), ("d_lora_a", 2), ("d_lora_b", 2), ("d_weight", 1))
}
CASES = (
    Case("rank 1", dict(M=1, N=1, C=5, R=1)),
    Case("odd sizes, bias", dict(M=7, N=13, C=37, R=3), dict(bias=True)),
    Case("several tiles", dict(M=70, N=130, C=67, R=66), dict(bias=True)),
    Case("rank 130", dict(M=35, N=20, C=24, R=130)),
    Case("NF4 base", dict(M=9, N=14, C=40, R=4), dict(nf4=True, bias=True)),
    Case("rows", dict(M=40, N=14, C=40, R=4), dict(rows=True)),
    Case("NF4 base, rows, dropout", dict(M=40, N=14, C=33, R=8), dict(nf4=True, rows=True, dropout=0.3)),
    Case("float32 adapters", dict(M=20, N=14, C=33, R=8), dict(mixed=True)),
    Case("dropout", dict(M=300, N=14, C=33, R=8), dict(dropout=0.4, bias=True)),
    Case("group", dict(M=9, N=14, C=40, R=4), dict(members=3, bias=True)),
    Case("group of several tiles", dict(M=70, N=140, C=67, R=33), dict(members=2, mixed=True)),
    Case("group, NF4 base, dropout", dict(M=20, N=14, C=33, R=5), dict(members=3, nf4=True, dropout=0.3, mixed=True)),
    Case("group, rows", dict(M=40, N=14, C=40, R=4), dict(members=2, rows=True, dropout=0.2)),
    Case("group, many rows", dict(M=200, N=20, C=24, R=4), dict(members=3, nf4=True, dropout=0.3, bias=True)),
    Case("DoRA", dict(M=300, N=140, C=24, R=4), dict(gain=True, bias=True)),
    Case("few rows, many features", dict(M=3, N=530, C=600, R=6), dict(members=2, mixed=True)),
)
BENCH = tuple(
    Case(f"{name}, {M} rows", dict(M=M, N=N, C=C, R=16), dict(nf4=True, mixed=True, members=members))
    for M in (512, 4096)
    for name, N, C, members in (
        ("SmolLM2 up", 1536, 576, 1),
        ("Llama 3 up", 14336, 4096, 1),
        ("Llama 3 gate and up", 14336, 4096, 2),
        ("Llama 3 q, k, v", 4096, 4096, 3),
    )
)
SCALES = (1.75, 0.5, 3.0)


def widths(case: Case) -> list[tuple[int, int]]:
    """(N, R) of the members: gate and up are alike, k and v smaller than q."""
    N, R, members = case.shape["N"], case.shape["R"], case.options.get("members", 1)
    return [(N, R), *[(N if members == 2 else max(N // 4, 1), R + (i if R < 16 else 0)) for i in range(1, members)]]


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    M, C = case.shape["M"], case.shape["C"]
    o = case.options

    def normal(*shape, dtype=torch.float64):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    adapter = torch.float32 if o.get("mixed") else torch.float64
    inputs = {"x": normal(M, C)}
    for i, (N, R) in enumerate(widths(case)):
        if o.get("nf4"):
            q = quantize_nf4((normal(N, C) / C**0.5).float(), double_quant=False)
            inputs |= {f"codes{i}": q.codes, f"absmax{i}": q.scale}
        else:
            inputs[f"weight{i}"] = normal(N, C) / C**0.5
        inputs[f"lora_a{i}"] = normal(R, C, dtype=adapter) / C**0.5
        inputs[f"lora_b{i}"] = normal(N, R, dtype=adapter) / R**0.5
        if o.get("bias"):
            inputs[f"bias{i}"] = normal(N)
    if o.get("gain"):
        inputs["gain"] = normal(case.shape["N"])
    if o.get("dropout"):
        inputs["seed"] = torch.randint(1 << 62, (1,), generator=generator)
    if o.get("rows"):
        inputs["rows"] = torch.randperm(M, generator=generator)[: M // 3]
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    rows, shape = inputs.get("rows"), (case.shape["M"], case.shape["C"])
    if (seed := inputs.get("seed")) is not None:
        keep = dropout.keep(seed, torch.arange(shape[0], device=seed.device), shape[1], case.options["dropout"])
        if bool(keep.all()) or not bool(keep.any()):
            return False
    return (rows is None or 0 < rows.numel() < shape[0]) and bool(inputs["lora_b0"].any())


def _args(inputs: dict[str, Tensor], case: Case) -> dict:
    members = case.options.get("members", 1)

    def each(name: str) -> list:
        return [inputs.get(f"{name}{i}") for i in range(members)]

    C, nf4 = case.shape["C"], bool(case.options.get("nf4"))
    weights = [t for pair in zip(each("codes"), each("absmax")) for t in pair] if nf4 else each("weight")
    return dict(
        kinds=["nf4_linear" if nf4 else "dense"] * members,
        weights=weights,
        counts=[1 + nf4] * members,
        sizes=[n for N, _ in widths(case) for n in (N, C, 64)] if nf4 else [],
        biases=each("none" if case.options.get("gain") else "bias"),
        lora_a=each("lora_a"),
        lora_b=each("lora_b"),
        scales=list(SCALES[:members]),
        seed=inputs.get("seed"),
        dropout_p=case.options.get("dropout", 0.0),
        rows=inputs.get("rows"),
    )


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    """Through the Function, as the public function draws the seed itself."""
    a = _args(inputs, case)
    options = (a[k] for k in ("kinds", "sizes", "counts", "scales", "seed", "dropout_p", "rows"))
    *ys, _ = op.LoRAGroup.apply(inputs["x"], *options, *a["weights"], *a["biases"], *a["lora_a"], *a["lora_b"])
    if "gain" in inputs:
        ys = [dora.rescale(ys[0], inputs["gain"], inputs["bias0"])]
    return {f"y{i}": y for i, y in enumerate(ys)}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    a = _args(inputs, case)
    del a["counts"]
    ys = spec.forward(inputs["x"], **a)[0]
    if "gain" in inputs:
        ys = [dora.rescale(ys[0], inputs["gain"], inputs["bias0"], impl="spec")]
    return {f"y{i}": y for i, y in enumerate(ys)}


def flops(case: Case) -> int:
    """Base forward and d_x, and three adapter products each way (x A^T and d_y B are shared)."""
    M, C = case.shape["M"], case.shape["C"]
    return sum(4 * M * N * C + 6 * M * R * (N + C) for N, R in widths(case))


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: x read twice, d_x written once; each y, d_y read twice, the weight read twice."""
    M, C = case.shape["M"], case.shape["C"]
    per_weight = 0.5625 if case.options.get("nf4") else dtype.itemsize
    total = dtype.itemsize * 3 * M * C
    return int(total + sum(dtype.itemsize * 3 * M * N + 2 * per_weight * N * C for N, _ in widths(case)))
