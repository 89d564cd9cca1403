"""Inputs of cross-entropy for the conformance test and the bench. B, T leading dimensions; V vocabulary."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import cross_entropy, reduce

GRADS = ("logits",)
ROUNDINGS: dict[str, int] = {}
CASES = (
    Case("one row of two classes", dict(B=1, T=1, V=2)),
    Case("odd sizes", dict(B=3, T=5, V=33), dict(reduction="none")),
    Case("row weights with zeros", dict(B=2, T=7, V=50), dict(weighted=True)),
    Case("row weights, none", dict(B=2, T=7, V=50), dict(weighted=True, reduction="none")),
    Case("own denominator", dict(B=2, T=4, V=17), dict(denominator=3)),
    Case("ignore_index 0, int32", dict(B=2, T=6, V=9), dict(ignore_index=0, int32=True, reduction="sum")),
    Case("several blocks of V", dict(B=1, T=3, V=9001), dict(reduction="none")),
)
BENCH = (
    Case("SmolLM2", dict(B=4, T=2048, V=49152)),
    Case("Llama 2", dict(B=4, T=2048, V=32000)),
    Case("Llama 3", dict(B=4, T=2048, V=128256)),
    Case("Qwen 2.5", dict(B=2, T=2048, V=151936)),
    Case("Gemma 3", dict(B=2, T=2048, V=262144)),
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    B, T, V = (case.shape[k] for k in "BTV")
    logits = 4 * torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    target = torch.randint(0, V, (B, T), generator=generator)
    if B * T > 2:
        target.view(-1)[1] = case.options.get("ignore_index", -100)
        target.view(-1)[-1] = -1
    y = int(target[0, 0])
    logits[0, 0, y] = logits[0, 0].max() + 9  # one confident row: p - 1 must not be lost to rounding
    inputs = {"logits": logits, "target": target.int() if case.options.get("int32") else target}
    if case.options.get("weighted"):
        weight = torch.rand(B, T, generator=generator) * 2
        weight.view(-1)[2] = 0.0
        inputs["row_weight"] = weight
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    labelled = inputs["target"] >= 0
    return bool(labelled.any()) and (inputs["target"].numel() == 1 or not bool(labelled.all()))


def _options(case: Case) -> dict:
    return {k: v for k, v in case.options.items() if k in ("reduction", "ignore_index", "denominator")}


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    loss, lse = cross_entropy(
        inputs["logits"], inputs["target"], row_weight=inputs.get("row_weight"), return_lse=True, **_options(case)
    )
    return {"loss": loss, "lse": lse}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    o = _options(case)
    ignore_index = o.get("ignore_index", -100)
    loss, lse = spec.forward(inputs["logits"], inputs["target"], inputs.get("row_weight"), ignore_index)
    loss = reduce(loss, inputs["target"], ignore_index, o.get("reduction", "mean"), o.get("denominator"))
    return {"loss": loss, "lse": lse.detach()}


def flops(case: Case) -> int:
    """About eight a logit: max, subtract, exp, add; then subtract, exp, subtract, multiply."""
    return 8 * case.shape["B"] * case.shape["T"] * case.shape["V"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: logits read once, gradient written once."""
    return 2 * dtype.itemsize * case.shape["B"] * case.shape["T"] * case.shape["V"]
