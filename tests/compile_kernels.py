"""Compiles the Triton kernels that a call would launch for a GPU that need not be there.

Run as a program in a process without TRITON_INTERPRET; prints one line per kernel: name, shared memory in bytes,
bytes of registers spilled a thread.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from riftco.kernels import _check

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_cooperative_grid")
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[JITFunction, dict, dict]]]:
    """Launches inside the block are noted as (kernel, arguments, options) and not run."""
    calls: list[tuple[JITFunction, dict, dict]] = []

    def run(self, *args, grid, warmup, **named):
        options = {k: named.pop(k) for k in OPTIONS if k in named}
        calls.append((self, {**dict(zip(self.arg_names, args)), **named}, options))

    real, JITFunction.run = JITFunction.run, run
    try:
        yield calls
    finally:
        JITFunction.run = real


def compiled(kernel: JITFunction, arguments: dict, options: dict, capability: int):
    """Triton's compiled kernel, specialised as the launch itself would be."""
    signature, constants, attributes = {}, {}, {}

    def described(value, path: tuple[int, ...], p):
        specialised = not p.do_not_specialize
        if p.is_constexpr or value is None or (type(value) is int and value == 1 and specialised):
            constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            return tuple(described(part, (*path, i), p) for i, part in enumerate(value))
        if isinstance(value, torch.Tensor):
            if value.data_ptr() % 16 == 0:
                attributes[path] = [["tt.divisibility", 16]]
            return "*" + TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        if value % 16 == 0 and specialised:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if abs(value) < 1 << 31 else "i64"

    for at, p in enumerate(kernel.params):
        signature[p.name] = described(arguments[p.name], (at,), p)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def spilled_bytes(ptx: str, capability: int) -> int:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = f"{triton.__path__[0]}/backends/nvidia/bin/ptxas"
        arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        command = [ptxas, "-v", f"-arch={arch}", file.name, "-o", file.name + ".o"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said))


def build(kernel: JITFunction, arguments: dict, options: dict, capability: int) -> tuple[int, int]:
    """(shared memory, spilled bytes)."""
    done = compiled(kernel, arguments, options, capability)
    return done.metadata.shared, spilled_bytes(done.asm["ptx"], capability)


def attention(dtype: torch.dtype, D: int, DV: int, variant: str, room: int) -> None:
    """One forward and backward with the tiles for `room` bytes of shared memory; variants as below."""
    from riftco.kernels.attention import cuda, route

    route.shared_memory = lambda device: room
    packed = variant.startswith("packed")
    lead = () if packed else (2,)
    q, k = torch.empty(*lead, 256, 4, D, dtype=dtype), torch.empty(*lead, 256, 2, D, dtype=dtype)
    v = torch.empty(*lead, 256, 2, DV, dtype=dtype)
    cu = torch.tensor([0, 100, 256], dtype=torch.int32) if packed else None
    k_lens = torch.tensor([200, 256], dtype=torch.int32) if variant == "k_lens" else None
    bias = {"bias": torch.empty(2, 1, 256, 256), "mask": torch.empty(1, 4, 256, 256, dtype=torch.bool)}.get(variant)
    sinks = torch.empty(4) if variant == "sinks" else None
    seed = torch.empty(1, dtype=torch.int64) if variant.endswith("dropout") else None
    tensors = cu, None, k_lens, bias, sinks, seed
    left, right = (20, 30) if variant.endswith("window") else (None, None if variant == "full" else 0)
    options = None, left, right, 20.0 if variant.endswith("softcap") else 0.0, 0.1 if seed is not None else 0.0
    out, lse = cuda.forward(q, k, v, *tensors, *options)
    start = 100 if variant == "last keys" else 0
    needs = (True, True, True, variant == "bias", False)
    cuda.backward(torch.empty_like(out), None, q, k, v, out, lse, *tensors, *options, start, False, *needs)


def cached_attention(dtype: torch.dtype, cached: str, D: int) -> None:
    """Decoding, a chunk cut into pieces over pages, and one that needs no cutting; a decoding step in one launch."""
    from riftco.kernels.cached_attention import Cache, cuda, decode_cuda

    for runs, rows, page_size in ((2, 1, None), (1, 100, 16), (16, 700, None)):
        cache = Cache.allocate(1, 16, 1024, 2, D, dtype=cached, page_size=page_size)
        layer, at = cache.layers[0], torch.zeros(runs, dtype=torch.int32)
        q, k = (torch.empty(runs * rows, heads, D, dtype=dtype) for heads in (8, 2))
        places = (layer.k, layer.v, layer.k_scale, layer.v_scale, cache.block_table, at, at)
        cu = torch.arange(runs + 1) if page_size else None
        rest = (*places, cu, None, None, None, None, 0.0, rows)
        out, lse = cuda.forward(q, k, k, *rest)
        cuda.backward(torch.empty_like(out), None, q, k, k, out, lse, *rest, True, True, True, False)
        cuda.write(layer.k, layer.v, layer.k_scale, layer.v_scale, torch.arange(runs * rows), k, k)
    for window, page_size in ((500, None), (1024, 16)):  # whole and in pieces
        cache = Cache.allocate(1, 2, window, 2, D, dtype=cached, page_size=page_size)
        layer, turn = cache.layers[0], torch.empty(2, D // 2)
        q, k = (torch.empty(2, heads, D, dtype=dtype) for heads in (8, 2))
        places = (
            cache.arrived,
            cache.block_table,
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
        )
        held = (layer.k, layer.v, layer.k_scale, layer.v_scale)
        decode_cuda.decode(q, k, k, turn, turn, *held, *places, torch.arange(2), None, False, None, None, 0.0)


def adam(dtype: torch.dtype) -> None:
    """A step with whole moments, with pages, and with pages of codes."""
    from riftco.kernels.adam import cuda, quantized

    params, grads = [torch.empty(3, 5000, dtype=dtype)], [torch.empty(3, 5000, dtype=dtype)]
    steps, slab = [torch.zeros(())], torch.zeros(2, 8, 4096)
    _, scale, committed = cuda.norm(grads, 1.0)
    options = committed, scale, torch.zeros(()), 0.9, 0.999, 1e-8, 0.1, True
    cuda.step(params, grads, [torch.empty(3, 5000)], [torch.empty(3, 5000)], steps, *options)
    for pages in (slab, torch.zeros(8, quantized.page_bytes(4096), dtype=torch.uint8)):
        cuda.paged_step(params, grads, [pages], [0], [0], 4096, steps, *options)


def norms(dtype: torch.dtype, C: int) -> None:
    """Forward and backward with everything, then with a frozen weight alone, of both normalisations."""
    from riftco.kernels._norm import launch, rows

    rows.processors = lambda t: 132
    x, w, row = torch.empty(16384, C, dtype=dtype, device="meta"), torch.empty(C, dtype=dtype), torch.empty(16384)
    for mean in (None, row):
        centre = mean is not None
        launch.forward(x, x, w, w if centre else None, 1e-6, 0.0, centre)
        launch.backward(x, x, x, w, w if centre else None, mean, row, 0.0, True, True, centre)
        launch.backward(x, None, x, w, None, mean, row, 0.0, True, False, False)


def frozen(dtype: torch.dtype) -> None:
    """Every route of a product with an NF4 or a GGUF weight, forward and for d_x."""
    from riftco.kernels.gguf_linear import cuda as gguf
    from riftco.kernels.gguf_linear.formats import FORMATS
    from riftco.kernels.nf4 import cuda as nf4

    N, K = 1024, 2048
    codes, absmax = torch.empty(N * K // 2, 1, dtype=torch.uint8), torch.empty(N * K // 64)
    for M in (1, 16, 32, 64):
        nf4.forward(torch.empty(M, K, dtype=dtype), codes, absmax, torch.empty(N, dtype=dtype), N, K, 64)
        nf4.backward(torch.empty(M, N, dtype=dtype), codes, absmax, N, K, 64)
    nf4.forward(torch.empty(64, K - 1, dtype=dtype), codes, absmax, None, N, K - 1, 64)
    nf4.backward(torch.empty(64, N, dtype=dtype), codes, absmax, N, K - 1, 64)
    nf4.dequantize(codes, absmax, N * K, 64, dtype)
    nf4.dequantize(codes, absmax, N * K - 1, 64, dtype)
    for f in FORMATS.values():
        packed = torch.empty(N, f.row_bytes(K), dtype=torch.uint8)
        gguf.dequantize(packed, f.name, N, K, dtype)
        for M in (1, 16, 64):
            gguf.forward(torch.empty(M, K, dtype=dtype), packed, None, f.name, N, K)
            gguf.backward(torch.empty(M, N, dtype=dtype), packed, f.name, N, K)


def cases_of(room: str, dtype: torch.dtype) -> list[tuple[JITFunction, dict, dict]]:
    """What the conformance cases of `room` launch, each kernel once for every set of its compile-time arguments."""
    cases = importlib.import_module(f"riftco.kernels.{room}.cases")
    importlib.import_module(f"riftco.kernels.{room}.cuda")  # made for a GPU, before the interpreter is asked for
    os.environ.update(TRITON_INTERPRET="1", RIFTCO_IMPL="triton")
    with recorded() as calls:
        for case in cases.CASES:
            inputs = _check.to(_check.inputs_of(cases, case, dtype, 0, "cpu"), dtype, "cpu")
            inputs = {k: t.requires_grad_() if k in cases.GRADS else t for k, t in inputs.items()}
            sum(t.float().sum() for t in cases.call(inputs, case).values() if t.requires_grad).backward()
    distinct = {}
    for kernel, arguments, options in calls:
        fixed = [arguments[p.name] for p in kernel.params if p.is_constexpr]
        distinct.setdefault(repr((kernel.__name__, fixed, sorted(options.items()))), (kernel, arguments, options))
    return list(distinct.values())


def report(calls: list[tuple[JITFunction, dict, dict]], capability: int) -> None:
    for kernel, arguments, options in calls:
        shared, spilled = build(kernel, arguments, options, capability)
        print(kernel.__name__, shared, spilled, flush=True)


VARIANTS = (
    "causal", "full", "window", "packed", "packed window", "packed dropout", "softcap", "sinks", "bias", "mask",
    "dropout", "k_lens", "last keys",
)  # fmt: skip

# what is compiled -> who calls its launchers, and the kinds of its arguments behind the dtype
CALLS = {"adam": (adam,), "frozen": (frozen,), "norms": (norms, int), "cached": (cached_attention, str, int)}


def main(capability: int, what: str, *rest: str) -> None:
    """`what`: "cases", then room and dtype; a key of CALLS, then dtype and its arguments; else attention's bytes of
    shared memory, then dtype, head dims of k and of v, and variants joined by commas."""
    if what == "cases":
        report(cases_of(rest[0], getattr(torch, rest[1])), capability)
    elif what in CALLS:
        call, *kinds = CALLS[what]
        with recorded() as calls:
            call(getattr(torch, rest[0]), *(kind(given) for kind, given in zip(kinds, rest[1:], strict=True)))
        report(calls, capability)
    else:
        dtype, D, DV, *variants = rest
        for variant in variants[0].split(",") if variants else VARIANTS:
            with recorded() as calls:
                attention(getattr(torch, dtype), int(D), int(DV), variant, int(what))
            report(calls, capability)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
