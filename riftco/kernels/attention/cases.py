"""Inputs of attention for the conformance test and the bench. B, T, S, H, K, D, DV as in op.py."""

import dataclasses
from unittest import mock

import torch
from torch import Tensor

from .._cases import Case
from . import op, spec
from .op import attention

GRADS = ("q", "k", "v", "bias", "sinks")
# P enters two matmuls in the inputs' 16 bits (out, d_v), dS two (d_q, d_k); D = sum(dO O) reads the stored, rounded O
ROUNDINGS = {"out": 1, "d_v": 1, "d_q": 2, "d_k": 2, "d_bias": 1, "d_sinks": 1}
PLAIN_CASES = (
    Case("one row", dict(B=1, T=1, S=3, H=1, K=1, D=8, DV=8)),
    Case("odd sizes", dict(B=2, T=37, S=41, H=3, K=1, D=24, DV=24)),
    Case("causal, several tiles", dict(B=1, T=150, S=150, H=2, K=1, D=64, DV=64), dict(causal=True)),
    Case("causal, more keys", dict(B=1, T=35, S=99, H=2, K=2, D=16, DV=16), dict(causal=True, scale=0.5)),
    Case("causal, rows without keys", dict(B=1, T=70, S=20, H=2, K=1, D=32, DV=32), dict(causal=True)),
    Case("head dims differ", dict(B=1, T=20, S=33, H=2, K=1, D=12, DV=40), dict(causal=True)),
    Case("head dim 7", dict(B=1, T=18, S=18, H=5, K=1, D=7, DV=7)),
    Case("head dim 80", dict(B=1, T=20, S=35, H=2, K=1, D=80, DV=80), dict(causal=True)),
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
OPTION_CASES = (
    Case("window", dict(B=2, T=70, S=90, H=2, K=1, D=16, DV=16), dict(window=(20, 5))),
    Case(
        "window, causal, a few keys a row",
        dict(B=1, T=150, S=150, H=2, K=2, D=64, DV=64),
        dict(window=(3, None), causal=True),
    ),
    Case("window, rows without keys", dict(B=1, T=80, S=20, H=2, K=1, D=16, DV=16), dict(window=(7, 4))),
    Case(
        "packed, window",
        dict(T=140, S=140, H=3, K=1, D=24, DV=24),
        dict(causal=True, window=(16, None), cu_q=(0, 1, 2, 3, 70, 70, 131), spoil=True),
    ),
    Case("softcap", dict(B=1, T=35, S=50, H=4, K=2, D=32, DV=32), dict(causal=True, softcap=1.5)),
    Case("sinks", dict(B=2, T=33, S=20, H=4, K=2, D=16, DV=16), dict(causal=True, sinks=True)),
    Case("packed, sinks", dict(T=60, S=60, H=2, K=1, D=16, DV=16), dict(sinks=True, cu_q=(0, 20, 20, 55), spoil=True)),
    Case("bias", dict(B=2, T=37, S=41, H=4, K=2, D=16, DV=16), dict(bias=(2, 4, 37, 41))),
    Case(
        "bias for all heads, -inf in it",
        dict(B=2, T=37, S=41, H=4, K=2, D=16, DV=16),
        dict(bias=(2, 1, 37, 41), hidden=True),
    ),
    Case("bias a key", dict(B=2, T=37, S=70, H=4, K=2, D=16, DV=16), dict(bias=(2, 1, 1, 70), softcap=2.0)),
    Case("bias a row", dict(B=1, T=70, S=20, H=2, K=2, D=16, DV=16), dict(bias=(1, 2, 70, 1), sinks=True)),
    Case("mask", dict(B=2, T=37, S=41, H=2, K=1, D=16, DV=16), dict(mask=(2, 1, 37, 41))),
    Case("key lengths", dict(B=3, T=20, S=50, H=2, K=1, D=16, DV=16), dict(causal=True, k_lens=(50, 9, 0), spoil=True)),
    Case(
        "key lengths, window",
        dict(B=2, T=20, S=50, H=2, K=1, D=16, DV=16),
        dict(window=(8, 3), k_lens=(41, 18), spoil=True),
    ),
    Case(
        "gradients of the last keys",
        dict(B=1, T=64, S=150, H=4, K=2, D=32, DV=32),
        dict(causal=True, kv_grad_start=113),
    ),
    Case("dropout", dict(B=2, T=33, S=40, H=4, K=2, D=16, DV=16), dict(causal=True, dropout_p=0.3)),
    Case(
        "packed, dropout",
        dict(T=60, S=60, H=2, K=1, D=16, DV=16),
        dict(dropout_p=0.5, cu_q=(0, 20, 20, 55), spoil=True),
    ),
)
TRAINED = ("out",)  # lse has a gradient, but the peers' has none
CAUSAL = dict(causal=True)


def _square(B: int, T: int, H: int, K: int, D: int) -> dict[str, int]:
    return dict(B=B, T=T, S=T, H=H, K=K, D=D, DV=D)


def _documents(starts: tuple[int, ...], H: int, K: int, D: int) -> tuple[dict[str, int], dict]:
    return dict(T=starts[-1], S=starts[-1], H=H, K=K, D=D, DV=D), dict(causal=True, cu_q=starts)


CASES = PLAIN_CASES + OPTION_CASES
BENCH = (
    Case("causal", _square(8, 2048, 16, 16, 128), CAUSAL),
    Case("causal, 8k", _square(2, 8192, 16, 16, 128), CAUSAL),
    Case("causal, 16k", _square(1, 16384, 16, 16, 128), CAUSAL),
    Case("causal, groups of 4", _square(4, 4096, 32, 8, 128), CAUSAL),
    Case("causal, head dim 64", _square(4, 4096, 32, 32, 64), CAUSAL),
    Case("full, 8k", _square(2, 8192, 16, 16, 128)),
    Case("causal, head dim 256", _square(2, 4096, 16, 4, 256), CAUSAL),
    Case("packed, 4 of 4096", *_documents((0, 4096, 8192, 12288, 16384), 32, 8, 128)),
    Case(
        "packed, 16 of 500 to 1500",
        *_documents(
            (0, 500, 2000, 2800, 4000, 5100, 5700, 7100, 7700, 8600, 9800, 10500, 12000, 13100, 14000, 15000, 16384),
            32,
            8,
            128,
        ),
    ),
    Case("packed, 4096 of one token, 4 of 1024", *_documents((*range(4096), *range(4096, 8193, 1024)), 16, 16, 128)),
    Case("window of 1024", _square(1, 16384, 16, 16, 128), dict(causal=True, window=(1023, None))),
    Case("gradients of the last 8th of the keys", _square(2, 8192, 16, 16, 128), dict(causal=True, kv_grad_start=7168)),
    Case("A1.6", dict(B=1, T=256, S=2048, H=16, K=4, D=256, DV=256), CAUSAL),
    Case("SmolLM2", _square(4, 2048, 9, 3, 64), CAUSAL),
)


def resized(case: Case, shape: dict[str, int]) -> Case:
    """The case with other numbers of rows: documents and kv_grad_start in proportion, windows as they are."""
    if case.options.keys() & {"bias", "mask", "k_lens"}:
        return case
    options = dict(case.options)
    for name, rows in (("cu_q", "T"), ("cu_k", "S"), ("kv_grad_start", "S")):
        old = options.get(name)
        if isinstance(old, tuple):
            options[name] = tuple(n * shape[rows] // case.shape[rows] for n in old)
        elif old:
            options[name] = old * shape[rows] // case.shape[rows]
    return dataclasses.replace(case, shape=shape, options=options)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    T, S, H, K, D, DV = (case.shape[n] for n in ("T", "S", "H", "K", "D", "DV"))
    lead = (case.shape["B"],) if "B" in case.shape else ()
    shapes = {"q": (*lead, T, H, D), "k": (*lead, S, K, D), "v": (*lead, S, K, DV)}
    inputs = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    for name in ("cu_q", "cu_k"):
        if name in case.options:
            dtype = torch.int64 if case.options.get("int64") else torch.int32
            inputs[name] = torch.tensor(case.options[name], dtype=dtype)
    extra = case.options
    for name in ("bias", "mask"):
        if name in extra:
            inputs[name] = torch.randn(extra[name], generator=generator, dtype=torch.float64)
    if extra.get("hidden"):
        inputs["bias"][..., 1::3] = -torch.inf
        inputs["bias"][:, :, 5] = -torch.inf
    if "mask" in inputs:
        inputs["mask"] = inputs["mask"] > 0.0
        inputs["mask"][:, :, 3] = False
    if extra.get("sinks"):
        inputs["sinks"] = torch.randn(H, generator=generator, dtype=torch.float64)
    if "k_lens" in extra:
        inputs["k_lens"] = torch.tensor(extra["k_lens"], dtype=torch.int32)
        for b, length in enumerate(extra["k_lens"]) if extra.get("spoil") else ():
            inputs["k"][b, length:] = inputs["v"][b, length:] = torch.nan
    elif extra.get("spoil"):
        for name, cu in (("q", "cu_q"), ("k", "cu_k"), ("v", "cu_k")):
            inputs[name][int(inputs.get(cu, inputs["cu_q"])[-1]) :] = torch.nan
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    """Rows see keys; cases that limit them hide some keys from some rows."""
    cu_q, cu_k, k_lens, _, _ = _tensors(inputs)
    _, left, right, _, _ = _options(case)
    see = spec.visible(inputs["q"], inputs["k"], cu_q, cu_k, k_lens, left, right)
    limited = bool(case.options.keys() & {"causal", "cu_q", "window", "k_lens"})
    return bool(see.any()) and bool(see.all()) != limited


def _tensors(inputs: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    """cu_q, cu_k, k_lens, bias, sinks."""
    bias = inputs.get("bias", inputs.get("mask"))
    return inputs.get("cu_q"), inputs.get("cu_k"), inputs.get("k_lens"), bias, inputs.get("sinks")


def _options(case: Case) -> tuple[float | None, int | None, int | None, float, float]:
    """scale, left, right, softcap, dropout_p."""
    o = case.options
    left, right = o.get("window", (None, None))
    return o.get("scale"), left, 0 if o.get("causal") else right, o.get("softcap", 0.0), o.get("dropout_p", 0.0)


def _seed(case: Case, device: torch.device) -> Tensor | None:
    """The same numbers on every device, whose generators differ."""
    return torch.tensor([0x2545F4914F6CDD1D], device=device) if case.options.get("dropout_p") else None


def call(inputs: dict[str, Tensor], case: Case, impl: str | None = None) -> dict[str, Tensor]:
    cu_q, cu_k, k_lens, bias, sinks = _tensors(inputs)
    scale, _, _, softcap, dropout_p = _options(case)
    with mock.patch.object(op, "draw_seed", lambda device: _seed(case, device)):
        out, lse = attention(
            inputs["q"], inputs["k"], inputs["v"], causal=bool(case.options.get("causal")), scale=scale,
            window=case.options.get("window", (None, None)), softcap=softcap, sinks=sinks, bias=bias,
            dropout_p=dropout_p, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, k_lens=k_lens,
            kv_grad_start=case.options.get("kv_grad_start", 0), return_lse=True, impl=impl,
        )  # fmt: skip
    return {"out": out, "lse": lse}


class _Spec(torch.autograd.Function):
    """The spec with its closed-form backward, which gradcheck proves: what that loses in float32 (D = sum(dO O) does
    not cancel against dP as in autograd's softmax) is what the budgets are measured by."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, cu_q, cu_k, k_lens, seed, start, *options):
        out, lse = spec.forward(q, k, v, cu_q, cu_k, k_lens, bias, sinks, seed, *options)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k, k_lens, bias, sinks, seed)
        ctx.start, ctx.options = start, options
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        need = ctx.needs_input_grad[:5]
        tensors, options = ctx.saved_tensors, ctx.options
        grads: tuple = spec.backward(d_out, d_lse, *tensors, *options, ctx.start, True, *need)  # type: ignore[call-arg]
        d_q, d_k, d_v, *rest = (g if n else None for g, n in zip(grads, need))
        d_k, d_v = (g if g is None else torch.nn.functional.pad(g, (0, 0, 0, 0, ctx.start, 0)) for g in (d_k, d_v))
        return d_q, d_k, d_v, *rest, *(None,) * 10


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    cu_q, cu_k, k_lens, bias, sinks = _tensors(inputs)
    out, lse = _Spec.apply(
        inputs["q"], inputs["k"], inputs["v"], bias, sinks, cu_q, cu_k, k_lens, _seed(case, inputs["q"].device),
        case.options.get("kv_grad_start", 0), *_options(case),
    )  # fmt: skip
    return {"out": out, "lse": lse}


def _scores(case: Case) -> int:
    """How many scores the mask leaves; by custom half of T x S for a causal square."""
    c, o = case.shape, case.options
    heads = c.get("B", 1) * c["H"]
    if not o.keys() & {"cu_q", "window", "k_lens"} and c["T"] == c["S"]:
        return heads * c["T"] * c["S"] // (2 if o.get("causal") else 1)
    cu_q, cu_k, k_lens = (torch.tensor(o[n]) if n in o else None for n in ("cu_q", "cu_k", "k_lens"))
    _, left, right, _, _ = _options(case)
    lo, hi = spec.key_range(c["T"], c["S"], cu_q, cu_k, k_lens, left, right, torch.device("cpu"))
    return int((hi - lo).sum()) * heads // (len(k_lens) if k_lens is not None else 1)


def forward_flops(case: Case) -> int:
    """Two matmuls over the scores that the mask leaves."""
    return _scores(case) * 2 * (case.shape["D"] + case.shape["DV"])


def flops(case: Case) -> int:
    """Two matmuls forward and five backward over the scores that the mask leaves; kv_grad_start counts as none."""
    return forward_flops(case) + _scores(case) * 2 * (3 * case.shape["D"] + 2 * case.shape["DV"])


def spec_flops(case: Case) -> int:
    """What the spec does, which makes every score and hides some."""
    c = case.shape
    return c.get("B", 1) * c["T"] * c["S"] * c["H"] * 2 * (4 * c["D"] + 3 * c["DV"])


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: q, k, v, out forward; those, d_out and three gradients backward."""
    c = case.shape
    rows, keys = c.get("B", 1) * c["T"] * c["H"], c.get("B", 1) * c["S"] * c["K"]
    once = rows * (c["D"] + c["DV"]) + keys * (c["D"] + c["DV"])
    return dtype.itemsize * (3 * once + rows * c["DV"])
