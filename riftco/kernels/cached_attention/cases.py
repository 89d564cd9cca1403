"""Inputs of attention_with_cache for the conformance test and the bench. Letters as in op.py; slots of the cache N."""

from typing import Any

import torch
from torch import Tensor

from .._cases import Case
from . import spec
from .cache import STORED, Cache, CacheLayer
from .op import attention_with_cache
from .write import quantize_q8_0

GRADS = ("q", "k", "v", "sinks")
# cached rows are rounded to the inputs' 16 bits, P and dS once each where they enter a product; delta reads the
# stored, rounded output
ROUNDINGS = {"out": 3, "lse": 1, "d_v": 2, "d_q": 4, "d_k": 4, "d_sinks": 3}
CACHED = ("k_cache", "v_cache", "k_scale", "v_scale", "block_table")


def _case(name: str, shape: dict[str, int], slots: tuple[int, ...], positions: tuple[int, ...], **options) -> Case:
    return Case(name, shape, {"slots": slots, "positions": positions, **options})


CASES = (
    _case("decode, one row a slot", dict(T=3, S=3, N=4, W=24, H=4, K=2, D=32), (2, 0, 3), (24, 0, 17), cache="float16"),
    _case(
        "decode, eight rows, several pieces", dict(T=8, S=8, N=1, W=600, H=2, K=1, D=32), (0,), (590,), cache="float32"
    ),
    _case(
        "decode, q8_0 pages, a slot that is not there",
        dict(T=6, S=6, N=3, W=40, H=6, K=2, D=64),
        (1, -1, 0),
        (33, 7, 40),
        cache="q8_0",
        page=8,
        left=20,
    ),
    _case(
        "runs of every length, spare rows of NaN",
        dict(T=47, S=47, N=4, W=70, H=4, K=2, D=16),
        (3, 1, 0, -1, 2),
        (9, 70, 0, 5, 61),
        cu_q=(0, 20, 20, 21, 25, 44),
        cache="bfloat16",
        spoil=True,
    ),
    _case(
        "earlier rows of the run have gradients",
        dict(T=21, S=50, N=2, W=80, H=3, K=1, D=40),
        (1, 0),
        (33, 80),
        cu_q=(0, 15, 20),
        cu_k=(0, 40, 49),
        cache="float16",
    ),
    _case(
        "more query rows than new keys",
        dict(T=30, S=10, N=1, W=40, H=2, K=2, D=16),
        (0,),
        (12,),
        cu_q=(0, 30),
        cu_k=(0, 10),
        cache="float32",
    ),
    _case(
        "more query rows than new keys, q8_0",
        dict(T=30, S=10, N=1, W=40, H=2, K=2, D=32),
        (0,),
        (12,),
        cu_q=(0, 30),
        cu_k=(0, 10),
        cache="q8_0",
    ),
    _case(
        "window, softcap, sinks",
        dict(T=60, S=60, N=2, W=100, H=4, K=2, D=32),
        (0, 1),
        (100, 3),
        cu_q=(0, 37, 60),
        cache="float32",
        left=29,
        softcap=3.0,
        sinks=True,
        scale=0.4,
    ),
    _case(
        "one chunk in pieces, q8_0",
        dict(T=9, S=9, N=2, W=800, H=4, K=1, D=32),
        (1,),
        (777,),
        cache="q8_0",
        sinks=True,
    ),
    _case("head dim 256", dict(T=12, S=12, N=1, W=50, H=2, K=1, D=256), (0,), (41,), cache="q8_0"),
    _case("a row at a time", dict(T=3, S=3, N=1, W=9, H=2, K=1, D=544), (0,), (8,), cache="q8_0"),
    _case(
        "chunk over pages",
        dict(T=40, S=40, N=3, W=60, H=4, K=2, D=32),
        (2, 0),
        (45, 13),
        cache="float16",
        page=7,
    ),
)
BENCH = tuple(
    _case(
        f"decode {n} x 8k {cache}",
        dict(T=n, S=n, N=n, W=8192, H=32, K=8, D=128),
        tuple(range(n)),
        (8191,) * n,
        cache=cache,
    )
    for n in (1, 8, 64)
    for cache in ("bfloat16", "q8_0")
) + tuple(
    _case(name, dict(T=T, S=T, N=1, W=W, H=H, K=K, D=D), (0,), (W - T,), cache=cache)
    for name, T, W, H, K, D, cache in (
        ("chunk over 32k float16", 512, 32768, 32, 8, 128, "float16"),
        ("chunk over 32k q8_0", 512, 32768, 32, 8, 128, "q8_0"),
        ("256 rows over 2k float16", 256, 2048, 16, 4, 256, "float16"),
        ("256 rows over 2k q8_0", 256, 2048, 16, 4, 256, "q8_0"),
    )
)


def make_inputs(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    T, S, N, W, H, K, D = (case.shape[n] for n in "TSNWHKD")
    options: Any = case.options

    def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    inputs = {"q": normal(T, H, D), "k": normal(S, K, D), "v": normal(S, K, D)}
    if options.get("sinks"):
        inputs["sinks"] = normal(H, dtype=torch.float32)
    for name in ("slots", "positions", "cu_q", "cu_k"):
        if name in options:
            inputs[name] = torch.tensor(options[name], dtype=torch.int32)
    page = options.get("page")
    places = (N, W)
    if page:
        each = -(-W // page)
        places = (N * each, page)
        inputs["block_table"] = torch.randperm(N * each, generator=generator).int().view(N, each)
    for name in ("k", "v"):
        rows = normal(*places, K, D, dtype=torch.float32)
        if options["cache"] == "q8_0":
            inputs[f"{name}_cache"], inputs[f"{name}_scale"] = quantize_q8_0(rows)
        else:
            inputs[f"{name}_cache"] = rows.to(STORED[options["cache"]])
    if options.get("spoil"):
        end = options["cu_q"][-1]
        for t in (inputs["q"], inputs["k"], inputs["v"]):
            t[end:] = torch.nan
    return inputs


def exercises(case: Case, inputs: dict[str, Tensor]) -> bool:
    """Some run is there and has rows."""
    n = case.shape["N"]
    return bool(spec.rows_of(len(inputs["q"]), inputs["slots"], inputs.get("cu_q"), n).live.any())


def call(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    layer = CacheLayer(*(inputs.get(n) for n in CACHED[:4]))  # type: ignore[arg-type]
    out, lse = attention_with_cache(
        inputs["q"], inputs["k"], inputs["v"], Cache((layer,), inputs.get("block_table")), 0, inputs["slots"],
        inputs["positions"], cu_seqlens_q=inputs.get("cu_q"), cu_seqlens_k=inputs.get("cu_k"),
        scale=case.options.get("scale"), window=(case.options.get("left"), None),
        softcap=case.options.get("softcap", 0.0), sinks=inputs.get("sinks"), return_lse=True,
    )  # fmt: skip
    return {"out": out, "lse": lse}


class _Spec(torch.autograd.Function):
    """The spec with its closed-form backward, which gradcheck proves."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, places, options):
        rest: tuple[Any, ...] = (*places, sinks, *options)
        out, lse = spec.forward(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.places, ctx.options = places, options
        return out, lse

    @staticmethod
    def backward(ctx, d_out, d_lse):
        *tensors, sinks = ctx.saved_tensors
        need = ctx.needs_input_grad[:4]
        rest: tuple[Any, ...] = (*tensors, *ctx.places, sinks, *ctx.options, *need)
        grads = spec.backward(d_out, d_lse, *rest)
        return *(g if n else None for g, n in zip(grads, need)), None, None


def reference(inputs: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    places = tuple(inputs.get(n) for n in (*CACHED, "slots", "positions", "cu_q", "cu_k"))
    options = (case.options.get("scale"), case.options.get("left"), case.options.get("softcap", 0.0), 1)
    out, lse = _Spec.apply(inputs["q"], inputs["k"], inputs["v"], inputs.get("sinks"), places, options)
    return {"out": out, "lse": lse}


def _scores(case: Case) -> int:
    """Scores between query rows and what they see, of one head: for the bench's cases, runs of equal length."""
    rows = case.shape["T"] // len(case.options["slots"])
    return sum(rows * p + rows * (rows + 1) // 2 for p in case.options["positions"])


def flops(case: Case) -> int:
    """Two matmuls forward; backward three over every key, and two more over the new ones."""
    new = case.shape["T"] ** 2 // 2 // len(case.options["slots"])
    return 2 * case.shape["H"] * case.shape["D"] * (5 * _scores(case) + 2 * new)


def bytes_moved(case: Case, dtype: torch.dtype) -> int:
    """The fewest: cached rows once forward and once backward; q, k, v, out, their gradients and d_out."""
    c = case.shape
    row = {"q8_0": 34 / 32}.get(case.options["cache"], STORED[case.options["cache"]].itemsize)
    cached = int(2 * c["K"] * c["D"] * row) * sum(case.options["positions"])
    once = c["T"] * c["H"] * c["D"] * 2 + c["S"] * c["K"] * c["D"] * 2
    return 2 * cached + dtype.itemsize * (3 * once + c["T"] * c["H"] * c["D"])
