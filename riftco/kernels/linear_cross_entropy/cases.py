"""Inputs of linear + cross-entropy for the conformance test and the bench.

B, T leading dimensions; C hidden size; V vocabulary.
"""

import torch
from torch import Tensor

from .._cases import Case
from ..cross_entropy.op import reduce
from . import spec
from .op import linear_cross_entropy

GRADS = ("x", "weight", "bias")
# 16-bit operands inside: logits; their gradient and, for d_x, the result before it is scaled by the upstream gradient
ROUNDINGS = {"loss": 1, "lse": 1, "d_x": 3, "d_weight": 2, "d_bias": 2}
CASES = (
    Case("two classes", dict(B=2, T=3, C=3, V=2)),
    Case("one slice", dict(B=2, T=5, C=24, V=33), dict(reduction="none")),
    Case("many slices", dict(B=3, T=7, C=16, V=65), dict(slice_bytes=4096)),
    Case("a row a slice", dict(B=4, T=7, C=24, V=40), dict(slice_bytes=1, reduction="none")),
    Case("row weights and bias", dict(B=2, T=9, C=12, V=50), dict(weighted=True, bias=True, slice_bytes=3000)),
    Case("row weights, none", dict(B=2, T=9, C=12, V=50), dict(weighted=True, slice_bytes=3000, reduction="none")),
    Case("shift", dict(B=3, T=6, C=12, V=30), dict(shift=True, weighted=True, slice_bytes=2000)),
    Case("own denominator", dict(B=2, T=4, C=8, V=17), dict(denominator=3)),
    Case("ignore_index 0, int32", dict(B=2, T=6, C=8, V=9), dict(ignore_index=0, int32=True, reduction="sum")),
    Case("n_labelled", dict(B=2, T=8, C=16, V=31), dict(n_labelled=15, slice_bytes=900)),
    Case("two blocks of V", dict(B=2, T=8, C=24, V=4100), dict(bias=True, slice_bytes=1 << 20)),
)
BENCH = (
    Case("SmolLM2", dict(B=1, T=8192, C=576, V=49152)),
    Case("SmolLM2 frozen", dict(B=1, T=8192, C=576, V=49152), dict(frozen=True)),
    Case("Llama 3 1B", dict(B=2, T=8192, C=2048, V=128256)),
    Case("Llama 3 8B", dict(B=1, T=8192, C=4096, V=128256)),
    Case("Llama 3 8B frozen", dict(B=1, T=8192, C=4096, V=128256), dict(frozen=True)),
    Case("Gemma 2 2B", dict(B=1, T=8192, C=2304, V=256000)),
    Case("Gemma 2 2B frozen", dict(B=1, T=8192, C=2304, V=256000), dict(frozen=True)),
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    B, T, C, V = (case.shape[k] for k in "BTCV")
    x = torch.randn(B, T, C, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, C, generator=generator, dtype=torch.float64) * (2 / C**0.5)
    target = torch.randint(0, V, (B, T), generator=generator)
    if B * T > 2:
        target.view(-1)[1] = case.options.get("ignore_index", -100)
        target.view(-1)[-1] = -1
    inputs = {"x": x, "weight": weight, "target": target.int() if case.options.get("int32") else target}
    if case.options.get("frozen"):
        inputs["frozen_weight"] = inputs.pop("weight")
    if case.options.get("bias"):
        inputs["bias"] = torch.randn(V, generator=generator, dtype=torch.float64)
    if case.options.get("weighted"):
        row_weight = torch.rand(B, T, generator=generator) * 2
        row_weight.view(-1)[2] = 0.0
        inputs["row_weight"] = row_weight
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    labelled = inputs["target"] >= 0
    return bool(labelled.any()) and (inputs["target"].numel() == 1 or not bool(labelled.all()))


def _weight(inputs: dict[str, Tensor]) -> Tensor:
    return inputs["weight"] if "weight" in inputs else inputs["frozen_weight"]


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    options = {k: v for k, v in case.options.items() if k not in ("weighted", "bias", "int32", "frozen")}
    loss, lse = linear_cross_entropy(
        inputs["x"], _weight(inputs), inputs["target"], inputs.get("bias"),
        row_weight=inputs.get("row_weight"), return_lse=True, **options,
    )  # fmt: skip
    return {"loss": loss, "lse": lse}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    o = case.options
    ignore_index, target, row_weight = o.get("ignore_index", -100), inputs["target"], inputs.get("row_weight")
    if o.get("shift"):
        target = torch.cat([target[:, 1:], torch.full_like(target[:, :1], ignore_index)], 1)
        if row_weight is not None:
            row_weight = torch.cat([row_weight[:, 1:], row_weight[:, :1] * 0], 1)
    loss, lse = spec.forward(
        inputs["x"], _weight(inputs), target, inputs.get("bias"), row_weight, ignore_index, 1, None
    )  # fmt: skip
    loss = reduce(loss, target, ignore_index, o.get("reduction", "mean"), o.get("denominator"))
    return {"loss": loss, "lse": lse.detach()}


def flops(case: Case) -> int:
    """Three matmuls, or two where the head is frozen."""
    B, T, C, V = (case.shape[k] for k in "BTCV")
    return (4 if case.options.get("frozen") else 6) * B * T * C * V


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: x and weight read once, each gradient written once."""
    B, T, C, V = (case.shape[k] for k in "BTCV")
    return 2 * dtype.itemsize * B * T * C + (1 if case.options.get("frozen") else 2) * dtype.itemsize * V * C
