"""Inputs of linear + cross-entropy for the conformance test and the bench.

B, T leading dimensions; C hidden size; V vocabulary; R rank of the head's adapter; k labels a row.
"""

import torch
from torch import Tensor

from .._cases import Case
from ..nf4.quantize import quantize_nf4
from ..nf4.weight import NF4Weight
from . import spec
from .checks import taken_apart
from .op import denominator_of, linear_cross_entropy
from .problem import Problem

GRADS = ("x", "weight", "bias", "lora_a", "lora_b")
# 16-bit operands inside: logits; their gradient and, for d_x, the result before it is scaled by the upstream gradient
ROUNDINGS = {"loss": 1, "lse": 1, "d_x": 4, "d_weight": 2, "d_bias": 2, "d_lora_a": 4, "d_lora_b": 4, "entropy": 2}
ROUNDINGS |= {"log_prob": 1}
EVERY = dict(label_smoothing=0.1, z_loss=0.02, softcap=20.0, logit_scale=0.7, class_weighted=True, weighted=True)
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
    Case("labels lie together", dict(B=2, T=9, C=12, V=50), dict(together=True, slice_bytes=1500)),
    Case("two blocks of V", dict(B=2, T=8, C=24, V=4100), dict(bias=True, slice_bytes=1 << 20)),
    Case("every option", dict(B=2, T=8, C=24, V=41), dict(EVERY, bias=True, slice_bytes=9000)),
    Case("every option, none", dict(B=2, T=8, C=24, V=41), dict(EVERY, slice_bytes=9000, reduction="none")),
    Case("class weights", dict(B=2, T=8, C=16, V=35), dict(class_weighted=True, slice_bytes=5000, checkpoint=True)),
    Case("metrics", dict(B=2, T=8, C=16, V=35), dict(return_metrics=True, slice_bytes=9000)),
    Case("adapter", dict(B=2, T=9, C=24, V=37, R=5), dict(bias=True, slice_bytes=3000)),
    Case("adapter, frozen head", dict(B=2, T=9, C=24, V=37, R=3), dict(frozen=True, slice_bytes=3000, softcap=5.0)),
    Case("adapter on NF4", dict(B=2, T=9, C=64, V=37, R=4), dict(nf4=True, slice_bytes=3000, reduction="sum")),
    Case("NF4", dict(B=2, T=9, C=24, V=70), dict(nf4=True, bias=True, slice_bytes=4000)),
    Case("NF4 scratch", dict(B=1, T=75, C=64, V=70), dict(nf4=True)),
    Case("top-k", dict(B=2, T=8, C=16, V=35, k=3), dict(slice_bytes=2000)),
    Case("top-k, softcap, none", dict(B=2, T=8, C=16, V=35, k=4), dict(softcap=4.0, weighted=True, reduction="none")),
    Case("one class left", dict(B=2, T=5, C=8, V=12), dict(slice_bytes=700, z_loss=0.1)),
)
SMOLLM2, LLAMA_1B = dict(B=1, T=8192, C=576, V=49152), dict(B=2, T=8192, C=2048, V=128256)
LLAMA_8B, GEMMA_2B = dict(B=1, T=8192, C=4096, V=128256), dict(B=1, T=8192, C=2304, V=256000)
EVERY_ROW = dict(together=True)  # carries a loss but a few at the ends, as in pretraining
FROZEN, NARROW = dict(EVERY_ROW, frozen=True), dict(EVERY_ROW, narrow_sum=True)
GPT2 = dict(B=8, T=1024, C=768, V=50257)
HEADS = (
    Case("Llama 3 8B", LLAMA_8B, EVERY_ROW),
    Case("Llama 3 8B frozen", LLAMA_8B, FROZEN),
    Case("Gemma 2 2B", GEMMA_2B, EVERY_ROW),
    Case("Gemma 2 2B frozen", GEMMA_2B, FROZEN),
    Case("Llama 3 1B", LLAMA_1B, EVERY_ROW),
    Case("SmolLM2 frozen", SMOLLM2, FROZEN),
    Case("Llama 3 8B, bfloat16 dW", LLAMA_8B, NARROW),
    Case("Gemma 2 2B, bfloat16 dW", GEMMA_2B, NARROW),
    Case("Llama 3 1B, bfloat16 dW", LLAMA_1B, NARROW),
)
# heads at the memory that Liger takes beside the gradients
AS_LIGER = {"Llama 3 8B frozen": 63, "Llama 3 8B, bfloat16 dW": 63, "Gemma 2 2B frozen": 63, "SmolLM2 frozen": 12}
AS_LIGER |= {"Gemma 2 2B, bfloat16 dW": 63, "Llama 3 1B, bfloat16 dW": 125}
BENCH = (
    *HEADS,
    Case("GPT-2", GPT2, EVERY_ROW),
    Case("Llama 3 8B, a row without a label", LLAMA_8B),
    Case("Llama 3 8B frozen, LoRA 16", {**LLAMA_8B, "R": 16}, FROZEN),
    Case("Llama 3 8B NF4", LLAMA_8B, dict(EVERY_ROW, nf4=True)),
    Case("Llama 3 8B NF4, LoRA 16", {**LLAMA_8B, "R": 16}, dict(EVERY_ROW, nf4=True)),
    *(
        Case(f"{head.name}, {mib} MiB", head.shape, {**head.options, "slice_bytes": mib << 20})
        for head in HEADS
        for mib in (64, 128, 256, 512, 1024)
    ),
    *(
        Case(f"{head.name}, as Liger", head.shape, {**head.options, "slice_bytes": AS_LIGER[head.name] << 20})
        for head in HEADS
        if head.name in AS_LIGER
    ),
)
LORA_SCALE = 0.75
INPUT_OPTIONS = ("weighted", "bias", "int32", "frozen", "nf4", "class_weighted", "together", "narrow_sum")


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    o, shape = case.options, case.shape
    B, T, C, V = (shape[k] for k in "BTCV")

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    k = (shape["k"],) if "k" in shape else ()
    x, weight, target = normal(B, T, C), normal(V, C) * (2 / C**0.5), None
    target = torch.randint(0, V, (B, T, *k), generator=generator)
    if B * T > 2:
        rows = target.view(B * T, -1)
        rows[1] = o.get("ignore_index", -100)
        rows[-1] = -1
        if o.get("together"):
            rows[:4] = -1
            rows[4:] = rows[4:].clamp(min=0)
            rows[-2:] = -1
        rows[0, -1] = rows[0, 0]  # equal labels, where there are several
    inputs = {"x": x, "weight": weight, "target": target.int() if o.get("int32") else target}
    if o.get("frozen"):
        inputs["frozen_weight"] = inputs.pop("weight")
    if o.get("nf4"):
        q = quantize_nf4(inputs.pop("weight").float())
        inputs |= {"codes": q.codes, "absmax": q.scale}
    if o.get("bias"):
        inputs["bias"] = normal(V)
    if "R" in shape:
        inputs |= {"lora_a": normal(shape["R"], C) / C**0.5, "lora_b": normal(V, shape["R"])}
    if o.get("class_weighted"):
        inputs["class_weight"] = torch.rand(V, generator=generator) + 0.1
    if k:
        inputs["topk"] = torch.rand(B, T, *k, generator=generator)
    if o.get("weighted"):
        row_weight = torch.rand(B, T, generator=generator) * 2
        row_weight.view(-1)[2] = 0.0
        inputs["row_weight"] = row_weight
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    labelled = inputs["target"] >= 0
    return bool(labelled.any()) and (inputs["target"].numel() == 1 or not bool(labelled.all()))


def _weight(inputs: dict[str, Tensor], case: Case):
    if case.options.get("nf4"):
        return NF4Weight(inputs["codes"], inputs["absmax"], (case.shape["V"], case.shape["C"]))
    return inputs["weight"] if "weight" in inputs else inputs["frozen_weight"]


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    options = {k: v for k, v in case.options.items() if k not in INPUT_OPTIONS}
    if case.options.get("narrow_sum"):
        options["accum_dtype"] = inputs["x"].dtype
    lora = (inputs["lora_a"], inputs["lora_b"], LORA_SCALE) if "lora_a" in inputs else None
    loss, lse, *metrics = linear_cross_entropy(
        inputs["x"], _weight(inputs, case), inputs["target"], inputs.get("bias"), row_weight=inputs.get("row_weight"),
        class_weight=inputs.get("class_weight"), topk=inputs.get("topk"), lora=lora, return_lse=True, **options,
    )  # fmt: skip
    more = {k: v for m in metrics for k, v in m._asdict().items() if k in ("log_prob", "entropy")}
    return {"loss": loss, "lse": lse, **more}


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    o, weight = case.options, _weight(inputs, case)
    ignore_index, target, row_weight = o.get("ignore_index", -100), inputs["target"], inputs.get("row_weight")
    if o.get("shift"):
        target = torch.cat([target[:, 1:], torch.full_like(target[:, :1], ignore_index)], 1)
        if row_weight is not None:
            row_weight = torch.cat([row_weight[:, 1:], row_weight[:, :1] * 0], 1)
    packed, absmax, kind, block = taken_apart(weight)
    p = Problem(
        inputs["x"], packed, absmax, target, inputs.get("bias"),
        row_weight, inputs.get("class_weight"), inputs.get("topk"), inputs.get("lora_a"), inputs.get("lora_b"),
        case.shape["V"], kind, block, LORA_SCALE, ignore_index, o.get("label_smoothing", 0.0),
        o.get("z_loss", 0.0), o.get("softcap", 0.0), o.get("logit_scale", 1.0), bool(o.get("return_metrics")), 1, None,
    )  # fmt: skip
    loss, lse, log_prob, entropy, _ = spec.forward(*p)
    reduction = o.get("reduction", "mean")
    total = loss if reduction == "none" else loss.sum()
    if reduction == "mean":
        total = total / denominator_of(p, o.get("denominator"))
    if not p.metrics:
        return {"loss": total, "lse": lse.detach()}
    return {"loss": total, "lse": lse.detach(), "log_prob": log_prob, "entropy": entropy}


def flops(case: Case) -> int:
    """Three matmuls, or two where the head is frozen."""
    B, T, C, V = (case.shape[k] for k in "BTCV")
    return (4 if case.options.get("frozen") or case.options.get("nf4") else 6) * B * T * C * V


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: x and weight read once, each gradient written once."""
    B, T, C, V = (case.shape[k] for k in "BTCV")
    return 2 * dtype.itemsize * B * T * C + (1 if case.options.get("frozen") else 2) * dtype.itemsize * V * C
