"""Inputs of taking and replacing rows for the conformance test and the bench. V rows, C values, n ids."""

import torch
from torch import Tensor

from .._cases import Case
from . import op

GRADS = ("x", "rows")
ROUNDINGS: dict[str, int] = {}
CASES = (
    Case("one row", dict(V=1, C=1, n=1)),
    Case("odd sizes", dict(V=7, C=33, n=25)),
    Case("no ids", dict(V=3, C=5, n=0)),
    Case("few rows of many", dict(V=300, C=20, n=3)),
    Case("one id many times", dict(V=3, C=5, n=60), dict(hot=True)),
    Case("padding", dict(V=5, C=9, n=31), dict(padding_idx=2)),
    Case("by frequency", dict(V=5, C=1030, n=12), dict(scale_grad_by_freq=True)),
    Case("replaced rows", dict(V=11, C=7, n=6), dict(scatter=True)),
    Case("all replaced", dict(V=4, C=70, n=4), dict(scatter=True, once=True)),
)
BENCH = (
    Case("SmolLM2", dict(V=49152, C=576, n=8192)),
    Case("Llama 3 8B", dict(V=128256, C=4096, n=8192)),
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    V, C, n = (case.shape[k] for k in "VCn")
    ids = torch.randint(V, (n,), generator=generator)
    if case.options.get("hot"):
        ids[: n - 2] = 1
    if case.options.get("once"):
        ids = torch.randperm(V, generator=generator)[:n]
    inputs = {"x": torch.randn(V, C, generator=generator, dtype=torch.float64), "ids": ids}
    if case.options.get("scatter"):
        inputs["rows"] = torch.randn(n, C, generator=generator, dtype=torch.float64)
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    ids, padding = inputs["ids"], case.options.get("padding_idx")
    repeated = len(ids.unique()) < len(ids)
    if padding is not None:
        return repeated and bool((ids == padding).any())
    return repeated if case.options.get("hot") or case.options.get("scale_grad_by_freq") else bool(inputs["x"].any())


def _run(inputs: dict[str, Tensor], case: Case, impl: str | None) -> dict[str, Tensor]:
    if case.options.get("scatter"):
        return {"out": op.scatter_rows(inputs["x"], inputs["ids"], inputs["rows"], impl=impl)}
    options = {k: v for k, v in case.options.items() if k in ("padding_idx", "scale_grad_by_freq")}
    if not options:
        return {"out": op.gather_rows(inputs["x"], inputs["ids"], impl=impl)}
    return {"out": op.embedding(inputs["ids"], inputs["x"], impl=impl, **options)}


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    return _run(inputs, case, None)


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    return _run(inputs, case, "spec")


def flops(case: Case) -> int:
    return case.shape["n"] * case.shape["C"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: n rows read and written forward, read backward, and the whole gradient written."""
    return dtype.itemsize * case.shape["C"] * (3 * case.shape["n"] + case.shape["V"])
