"""Inputs of cross-entropy for the conformance test and the bench. B, T leading dimensions; V vocabulary."""

import torch
from torch import Tensor

from .._cases import Case
from .op import cross_entropy

GRADS = ("logits",)
ROUNDINGS = {"d_logits": 1}  # made in the forward, and rounded again where the upstream gradient is not 1
ALL = dict(label_smoothing=0.1, z_loss=1e-2, softcap=5.0, logit_scale=0.7, class_weights=True, weighted=True)
PLAIN = (
    Case("one row of two classes", dict(B=1, T=1, V=2)),
    Case("odd sizes", dict(B=3, T=5, V=33), dict(reduction="none")),
    Case("row weights with zeros", dict(B=2, T=7, V=50), dict(weighted=True)),
    Case("row weights, none", dict(B=2, T=7, V=50), dict(weighted=True, reduction="none")),
    Case("own denominator", dict(B=2, T=4, V=17), dict(denominator=3)),
    Case("ignore_index 0, int32", dict(B=2, T=6, V=9), dict(ignore_index=0, int32=True, reduction="sum")),
    Case("several blocks of V", dict(B=1, T=3, V=9001), dict(reduction="none")),
    Case("several blocks of V, mean", dict(B=1, T=3, V=9001)),
)
OPTIONS = (
    Case("lse", dict(B=2, T=4, V=40), dict(return_lse=True, reduction="none")),
    Case("class weights", dict(B=3, T=5, V=33), dict(class_weights=True)),
    Case("class weights, none", dict(B=3, T=5, V=33), dict(class_weights=True, reduction="none")),
    Case("smoothing", dict(B=3, T=5, V=33), dict(label_smoothing=0.2)),
    Case("smoothing, none", dict(B=3, T=5, V=300), dict(label_smoothing=1.0, reduction="none")),
    Case("smoothing and class weights", dict(B=3, T=5, V=70), dict(label_smoothing=0.1, class_weights=True)),
    Case("z_loss", dict(B=2, T=6, V=50), dict(z_loss=0.1)),
    Case("z_loss, none", dict(B=2, T=6, V=50), dict(z_loss=0.1, reduction="none")),
    Case("softcap", dict(B=2, T=6, V=50), dict(softcap=4.0)),
    Case("softcap, none", dict(B=2, T=6, V=700), dict(softcap=4.0, reduction="none")),
    Case("logit_scale", dict(B=2, T=6, V=50), dict(logit_scale=0.25)),
    Case("logit_scale, none, lse", dict(B=2, T=6, V=50), dict(logit_scale=2.5, reduction="none", return_lse=True)),
    Case("inplace", dict(B=2, T=6, V=50), dict(inplace=True, weighted=True)),
    Case("metrics", dict(B=2, T=6, V=50), dict(return_metrics=True, weighted=True)),
    Case("metrics, several blocks", dict(B=2, T=3, V=9001), dict(return_metrics=True, logit_scale=0.5)),
    Case("all options", dict(B=2, T=7, V=51), dict(ALL, return_metrics=True)),
    Case(
        "all options, none", dict(B=2, T=6, V=9001), dict(ALL, reduction="none", return_metrics=True, return_lse=True)
    ),
)
CASES = PLAIN + OPTIONS
REFUSED = {"xla": ("inplace",)}  # device -> options that its kernel refuses by name
BENCH = (
    Case("SmolLM2", dict(B=4, T=2048, V=49152)),
    Case("Llama 2", dict(B=4, T=2048, V=32000)),
    Case("Llama 3", dict(B=4, T=2048, V=128256)),
    Case("Qwen 2.5", dict(B=2, T=2048, V=151936)),
    Case("Gemma 3", dict(B=2, T=2048, V=262144)),
    Case("Llama 3, one sequence", dict(B=1, T=1024, V=128256)),
    Case("Gemma 3, one sequence", dict(B=1, T=1024, V=262144)),
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
    if case.options.get("class_weights"):
        inputs["class_weight"] = torch.rand(V, generator=generator) + 0.1
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    labelled = inputs["target"] >= 0
    return bool(labelled.any()) and (inputs["target"].numel() == 1 or not bool(labelled.all()))


def _options(case: Case) -> dict:
    return {k: v for k, v in case.options.items() if k not in ("weighted", "int32", "class_weights")}


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    options, logits = _options(case), inputs["logits"]
    if options.get("inplace"):
        logits = logits.clone()  # a leaf cannot be written over
    out = cross_entropy(
        logits, inputs["target"], inputs.get("class_weight"), row_weight=inputs.get("row_weight"), **options
    )
    if isinstance(out, Tensor):
        return {"loss": out}
    named = {"loss": out[0]}
    if options.get("return_lse"):
        named["lse"] = out[1]
    return named | ({f"row_{k}": v for k, v in out[-1]._asdict().items()} if options.get("return_metrics") else {})


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    options = {k: v for k, v in _options(case).items() if k != "inplace"}
    plain = Case(case.name, case.shape, {**options, "impl": "spec"})
    return call(inputs, plain)


def flops(case: Case) -> int:
    """About eight a logit: max, subtract, exp, add; then subtract, exp, subtract, multiply."""
    return 8 * case.shape["B"] * case.shape["T"] * case.shape["V"]


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: logits read once, gradient written once."""
    return 2 * dtype.itemsize * case.shape["B"] * case.shape["T"] * case.shape["V"]
