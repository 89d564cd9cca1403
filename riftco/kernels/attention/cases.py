"""Inputs of attention for the conformance test and the bench. B, T, S, H, K, D, DV as in op.py."""

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .op import attention

GRADS = ("q", "k", "v")
# P enters two matmuls in the inputs' 16 bits (out, d_v), dS two (d_q, d_k); D = sum(dO O) reads the stored, rounded O
ROUNDINGS = {"out": 1, "d_v": 1, "d_q": 2, "d_k": 2}
CASES = (
    Case("one row", dict(B=1, T=1, S=3, H=1, K=1, D=8, DV=8)),
    Case("odd sizes", dict(B=2, T=37, S=41, H=3, K=1, D=24, DV=24)),
    Case("causal, several tiles", dict(B=1, T=150, S=150, H=2, K=1, D=64, DV=64), dict(causal=True)),
    Case("causal, more keys", dict(B=1, T=35, S=99, H=2, K=2, D=16, DV=16), dict(causal=True, scale=0.5)),
    Case("causal, rows without keys", dict(B=1, T=70, S=20, H=2, K=1, D=32, DV=32), dict(causal=True)),
    Case("head dims differ", dict(B=1, T=20, S=33, H=2, K=1, D=12, DV=40), dict(causal=True)),
    Case("head dim 7", dict(B=1, T=18, S=18, H=5, K=1, D=7, DV=7)),
    Case("head dim 256", dict(B=1, T=33, S=50, H=2, K=1, D=256, DV=256), dict(causal=True)),
    Case("a row at a time", dict(B=1, T=5, S=7, H=2, K=1, D=520, DV=264), dict(causal=True)),
    Case(
        "packed, more keys",
        dict(T=60, S=80, H=4, K=2, D=16, DV=16),
        dict(causal=True, cu_q=(0, 9, 9, 10, 50, 60), cu_k=(0, 30, 35, 35, 75, 80)),
    ),
    Case(
        "one-token documents",  # and a few of five: a softmax over one key has no gradient
        dict(T=150, S=150, H=2, K=1, D=8, DV=8),
        dict(cu_q=(*range(130), 130, 135, 140, 145, 150), int64=True),
    ),
    Case(
        "packed, spare rows of NaN",
        dict(T=140, S=140, H=6, K=2, D=16, DV=16),
        dict(causal=True, cu_q=(0, 1, 2, 3, 70, 70, 131), spoil=True),
    ),
)
BENCH = (
    Case("SmolLM2", dict(B=4, T=2048, S=2048, H=9, K=3, D=64, DV=64), dict(causal=True)),
    Case("Llama 3 8B", dict(B=1, T=8192, S=8192, H=32, K=8, D=128, DV=128), dict(causal=True)),
    Case("Gemma 3", dict(B=1, T=4096, S=4096, H=8, K=4, D=256, DV=256), dict(causal=True)),
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    T, S, H, K, D, DV = (case.shape[n] for n in ("T", "S", "H", "K", "D", "DV"))
    lead = (case.shape["B"],) if "B" in case.shape else ()
    shapes = {"q": (*lead, T, H, D), "k": (*lead, S, K, D), "v": (*lead, S, K, DV)}
    inputs = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    for name in ("cu_q", "cu_k"):
        if name in case.options:
            dtype = torch.int64 if case.options.get("int64") else torch.int32
            inputs[name] = torch.tensor(case.options[name], dtype=dtype)
    if case.options.get("spoil"):
        for name, cu in (("q", "cu_q"), ("k", "cu_k"), ("v", "cu_k")):
            inputs[name][int(inputs.get(cu, inputs["cu_q"])[-1]) :] = torch.nan
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    """Rows see keys; causal and packed cases hide some keys from some rows."""
    see = spec.visible(case.shape["T"], case.shape["S"], *_documents(inputs), _causal(case), inputs["q"].device)
    limited = _causal(case) or "cu_q" in inputs
    return bool(see.any()) and bool(see.all()) != limited


def _documents(inputs: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    return inputs.get("cu_q"), inputs.get("cu_k")


def _causal(case: Case) -> bool:
    return bool(case.options.get("causal", False))


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    out, lse = attention(
        inputs["q"], inputs["k"], inputs["v"], causal=_causal(case), scale=case.options.get("scale"),
        cu_seqlens_q=inputs.get("cu_q"), cu_seqlens_k=inputs.get("cu_k"), return_lse=True,
    )  # fmt: skip
    return {"out": out, "lse": lse}


class _Spec(torch.autograd.Function):
    """The spec with its closed-form backward, which gradcheck proves: what that loses in float32 (D = sum(dO O) does
    not cancel against dP as in autograd's softmax) is what the budgets are measured by."""

    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, causal, scale):
        out, lse = spec.forward(q, k, v, cu_q, cu_k, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.mark_non_differentiable(lse)
        ctx.causal, ctx.scale = causal, scale
        return out, lse

    @staticmethod
    def backward(ctx, d_out, _d_lse):
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        grads = spec.backward(d_out, q, k, v, out, lse, cu_q, cu_k, ctx.causal, ctx.scale, True, True, True)
        return *grads, None, None, None, None


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    cu = _documents(inputs)
    out, lse = _Spec.apply(inputs["q"], inputs["k"], inputs["v"], *cu, _causal(case), case.options.get("scale"))
    return {"out": out, "lse": lse}


def flops(case: Case) -> int:
    """Two matmuls forward and five backward over the scores that the mask leaves."""
    c = case.shape
    scores = c.get("B", 1) * c["H"] * c["T"] * c["S"] // (2 if _causal(case) else 1)
    return scores * (2 * (c["D"] + c["DV"]) + 2 * (3 * c["D"] + 2 * c["DV"]))


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: q, k, v, out forward; those, d_out and three gradients backward."""
    c = case.shape
    rows, keys = c.get("B", 1) * c["T"] * c["H"], c.get("B", 1) * c["S"] * c["K"]
    once = rows * (c["D"] + c["DV"]) + keys * (c["D"] + c["DV"])
    return dtype.itemsize * (3 * once + rows * c["DV"])
