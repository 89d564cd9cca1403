"""NF4's Triton kernels: routes, look-ups in registers, parts of a reduction, the scratch, planted bugs."""

import re

import numpy as np
import pytest
import support
import torch

from riftco.functional import dequantize_nf4, nf4_linear, quantize_nf4
from riftco.kernels._cases import Case
from riftco.kernels.nf4 import cases, route
from riftco.kernels.nf4.spec import TABLE

pytest.importorskip("triton")
from riftco.kernels.nf4.cuda import few, lookup

DEVICES = support.device_params(("cpu-triton", "cuda"))
LONG = (  # reductions in parts
    Case("one long row", dict(M=1, N=21, K=1152), dict(bias=True, double_quant=True)),
    Case("few rows, parts", dict(M=3, N=70, K=1088), dict(bias=True)),
    Case("few rows, long d_x", dict(M=20, N=1100, K=128), dict(bias=True, block_size=128)),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.name)
def test_long_reductions(case, dtype, device):
    support.check_case(cases, case, dtype, device)


def run_ptx(text: str, inputs: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """A warp of 32 lanes runs the few instructions that the look-ups are made of; registers are uint32 [32]."""
    registers = {f"${at}": value.astype(np.uint32) for at, value in inputs.items()}
    registers["%laneid"] = np.arange(32, dtype=np.uint32)

    def read(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full(32, int(name, 0), np.uint32)

    def permute(a, b, pick):
        source = [(word >> np.uint32(8 * i)) & 255 for word in (a, b) for i in range(4)]
        out = np.zeros(32, np.uint32)
        for at in range(4):
            nibble = (pick >> np.uint32(4 * at)) & 15
            byte = np.choose(nibble & 7, source)
            byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
            out |= byte.astype(np.uint32) << np.uint32(8 * at)
        return out

    def look_up(a, b, c, table):
        out = np.zeros(32, np.uint32)
        for index in range(8):
            if int(table[0]) >> index & 1:
                terms = [word if index >> shift & 1 else ~word for word, shift in ((a, 2), (b, 1), (c, 0))]
                out |= terms[0] & terms[1] & terms[2]
        return out

    def shuffle(word, lane, clamp, mask):
        assert (clamp == 0x101F).all() and (mask == 0xFFFFFFFF).all()
        return word[(np.arange(32) & 16) | (lane & 15)]

    run = {
        "shl.b32": lambda a, n: a << n,
        "shr.u32": lambda a, n: a >> n,
        "and.b32": lambda a, b: a & b,
        "mov.b32": lambda a: a,
        "mov.u32": lambda a: a,
        "setp.eq.u32": lambda a, b: (a == b).astype(np.uint32),
        "selp.b32": lambda a, b, p: np.where(p == 1, a, b),
        "prmt.b32": permute,
        "lop3.b32": look_up,
        "shfl.sync.idx.b32": shuffle,
    }
    for line in text.strip("{}\n").split("\n"):
        for statement in filter(None, (part.strip() for part in line.split(";"))):
            if not statement.startswith(".reg"):
                name, _, rest = statement.partition(" ")
                target, *sources = (part.strip() for part in rest.split(","))
                registers[target] = run[name](*map(read, sources)).astype(np.uint32)
    return {int(k[1:]): v for k, v in registers.items() if k[0] == "$"}


def all_codes() -> np.ndarray:
    """uint8 [words, 32 lanes, 4]: every byte in every place."""
    byte = np.arange(256, dtype=np.uint8)
    return np.stack([np.roll(byte, 37 * at) for at in range(4)], -1).reshape(8, 32, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_permutes_give_every_value_rounded(dtype):
    for codes in all_codes():
        out = run_ptx(lookup.permutes(dtype), {4: codes.copy().view(np.uint32)[:, 0]})
        words = np.stack([out[at] for at in range(4)], 1).copy().view(np.uint16).reshape(32, 2, 4)
        got = torch.from_numpy(words.astype(np.int32)).to(torch.int16).view(dtype)
        code = torch.from_numpy(codes).int()
        want = torch.stack((TABLE[code >> 4], TABLE[code & 15]), 1).to(dtype)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_shuffles_give_every_value():
    for codes in all_codes():
        out = run_ptx(lookup.shuffles(), {8: codes.copy().view(np.uint32)[:, 0]})
        got = np.stack([out[at] for at in range(8)], 1).copy().view(np.float32).reshape(32, 2, 4)
        code = torch.from_numpy(codes).int()
        assert torch.equal(torch.from_numpy(got), torch.stack((TABLE[code >> 4], TABLE[code & 15]), 1))


def test_routes():
    for dtype, backward, M, K, block_size, name in [
        (torch.bfloat16, False, 1, 4096, 64, "row"),
        (torch.float16, False, 1, 96, 32, "row"),
        (torch.bfloat16, True, 1, 4096, 64, "few"),
        (torch.bfloat16, False, 2, 4096, 64, "few"),
        (torch.bfloat16, True, 64, 4096, 128, "few"),
        (torch.bfloat16, False, 64, 4096, 32, "general"),
        (torch.bfloat16, False, 64, 4095, 64, "general"),
        (torch.float32, False, 1, 4096, 64, "general"),
        (torch.bfloat16, False, 65, 4096, 64, "scratch"),
        (torch.float32, True, 8192, 4095, 64, "scratch"),
        (torch.bfloat16, False, 65, 0, 64, "general"),
    ]:
        found = route.route(M, 1000, K, block_size, dtype, backward=backward)
        assert found.name == name and found.why, (M, K, block_size, dtype)
    assert {name for _, name, _ in route.forward_routes(torch.bfloat16)} == {"row", "few", "scratch"}
    assert {name for _, name, _ in route.backward_routes(torch.float32)} == {"general", "scratch"}


def test_rows_of_w_a_program():
    """A long row does not mean few programs: W [4096, 14336] needs as many as W [4096, 4096]."""
    tiles = {
        (N, K): route.route(1, N, K, 64, torch.bfloat16).tile.outputs
        for N, K in ((2048, 2048), (4096, 4096), (4096, 14336), (14336, 4096), (28672, 8192))
    }
    assert list(tiles.values()) == [2, 4, 4, 4, 8]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("N,K", [(1, 64), (4096, 4096), (14336, 4096), (576, 1536), (1000, 8192)])
def test_parts_cover_the_reduction_once(N, K, backward):
    cuts = set()
    for M in (2, 16, 33, 64):
        r = route.route(M, N, K, 64, torch.bfloat16, backward=backward)
        reduced = N if backward else K
        assert (r.splits - 1) * r.part < reduced <= r.splits * r.part and r.part % route.STEP == 0
        cuts.add((r.splits, r.part))
    assert len(cuts) == 1  # a row's sum is the same whatever rows are beside it


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_x_that_lie_oddly(device, dtype):
    """Strides, odd addresses and expanded rows of few rows in 16 bits."""
    q = quantize_nf4(torch.randn(40, 128)).to(device.torch_device)
    wide = torch.randn(6, 300, device=device.torch_device).to(dtype)
    views = (wide[:, 1:129], wide[:, :256:2], wide[:1, 3:131].expand(4, 128), wide[2, 5:133], wide[:0, :128])
    with device.use(), support.poisoned():
        for x in views:
            a, b = x.detach().requires_grad_(), x.detach().contiguous().clone().requires_grad_()
            ya, yb = nf4_linear(a, q), nf4_linear(b, q)
            assert torch.equal(ya, yb)
            up = torch.randn(*ya.shape[:-1], 80, device=x.device).to(dtype)[..., ::2]
            assert torch.equal(
                *(torch.autograd.grad(y, t, u)[0] for y, t, u in ((ya, a, up), (yb, b, up.contiguous())))
            )


@pytest.mark.parametrize("device", DEVICES)
def test_tiny_gradients_in_float16(device):
    """d_y near 1e-6 is not scaled down by absmax before it meets the weight."""
    q = quantize_nf4(torch.randn(64, 128) / 50).to(device.torch_device)
    x = torch.zeros(3, 128, dtype=torch.float16, device=device.torch_device, requires_grad=True)
    d_y = (torch.randn(3, 64) * 1e-4).to(x)
    with device.use():
        (d_x,) = torch.autograd.grad(nf4_linear(x, q), x, d_y)
        want = d_y.double() @ dequantize_nf4(q, torch.float64)
    assert (d_x.double() - want).abs().max() < 1e-3 * want.abs().max() + 6e-8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("K", [128, 96, 83])
def test_a_scratch_smaller_than_the_weight_changes_nothing(device, K, monkeypatch):
    """Many rows: W in one stretch or in many gives the same products, forward and for d_x."""
    q = quantize_nf4(torch.randn(50, K)).to(device.torch_device)
    results = []
    for scratch in (1 << 20, 4 * K * 7):
        monkeypatch.setattr(route, "SCRATCH_BYTES", scratch)
        x = torch.randn(2, 40, K, generator=torch.Generator().manual_seed(1)).to(device.torch_device).requires_grad_()
        assert route.route(80, 50, K, 64, x.dtype).name == "scratch"
        with device.use(), support.poisoned():
            y = nf4_linear(x, q)
            (d_x,) = torch.autograd.grad(y, x, torch.ones_like(y))
        results.append((y, d_x))
    for whole, parts in zip(*results):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(results[1][0], x.detach() @ dequantize_nf4(q, torch.float32).t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.slow
def test_every_kernel_compiles(capability, dtype):
    """Within the 99 KiB of shared memory that every GPU since sm_80 has, all but without spills; GGUF's kernels too."""
    lines = support.compiled("compile_kernels.py", capability, "frozen", dtype)
    assert {"_row", "_forward", "_backward", "_groups", "_tile", "_few", "_join"} - {n for n, *_ in lines} <= (
        {"_row"} if dtype == "float32" else set()
    )
    assert all(int(shared) <= 99 << 10 and int(spilled) <= 64 for _, shared, spilled in lines), lines


@pytest.mark.parametrize(
    "file,old,new,case",
    [
        ("scratch", "element % 2 == 0, byte >> 4", "element % 2 == 1, byte >> 4", "block 32"),
        ("scratch", "element // BLOCK_SIZE", "element // 64", "block 32"),
        ("scratch", "(row0 + n) * K + col0 + k", "(row0 + n) * K + col0 + k + 1", "many rows"),
        ("scratch", "g % each * GROUP", "g % each * GROUP // 2", "many rows, whole blocks"),
        ("scratch", "first // BLOCK_SIZE", "g // BLOCK_SIZE", "many rows, whole blocks"),
        ("lookup", "-0.39491748809814453", "-0.3949", "several tiles"),
        ("general", "acc += dot(x, w.to(x.dtype))", "acc = dot(x, w.to(x.dtype))", "several tiles"),
        ("general", "acc += dot(d_y, w.to(d_y.dtype))", "acc = dot(d_y, w.to(d_y.dtype))", "several tiles"),
        ("general", "acc += tl.load(bias_ptr + n,", "acc += tl.load(bias_ptr + n - n,", "several tiles"),
        ("general", "n[:, None] * K + k[None, :], live", "n[:, None] * K + k[None, :] + 1, live", "blocks across rows"),
    ],
)
def test_planted_bugs(file, old, new, case):
    support.assert_caught(cases, f"riftco.kernels.nf4.cuda.{file}", old, new, case)


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("row * blocks + 2 * at // BLOCK_SIZE", "row * blocks + at // BLOCK_SIZE", "one long row"),
        ("high * even + low * odd", "high * odd + low * even", "one row, blocks of 32"),
        ("row * half + at + byte", "row * half + at", "one long row"),
        ("y += tl.load(bias_ptr + row,", "y += tl.load(bias_ptr + row - row,", "one long row"),
        ("n * blocks + k // BLOCK_SIZE", "n * blocks", "few rows, parts"),
        ("k = s * part + start\n", "k = start\n", "few rows, parts"),
        ("dot(high, even) + dot(low, odd)", "dot(low, even) + dot(high, odd)", "few rows, parts"),
        ("tl.interleave(even, odd)", "tl.interleave(odd, even)", "few rows, long d_x"),
        ("n = s * part + start", "n = start", "few rows, long d_x"),
        ("n * blocks + tile * BK // BLOCK_SIZE", "n * 0", "few rows, long d_x"),
    ],
)
def test_planted_bugs_of_few_rows(old, new, case):
    """These kernels run in 16 bits: the check that passes in float16 must refuse the mutant."""
    device = next(d.values[0] for d in DEVICES if d.values[0].available)
    chosen = next(c for c in (*cases.CASES, *LONG) if c.name == case)
    support.check_case(cases, chosen, torch.float16, device)
    with support.mutant(few.__name__, old, new), pytest.raises(AssertionError):
        support.check_case(cases, chosen, torch.float16, device)


def test_the_instructions_are_those_that_are_run():
    """The interpreter of this test knows every instruction that the look-ups use."""
    used = set()
    for text in (lookup.shuffles(), lookup.permutes(torch.bfloat16)):
        used |= set(re.findall(r"^([a-z]\w*(?:\.\w+)+) ", text, re.M))
    assert used == {
        "mov.u32", "mov.b32", "and.b32", "setp.eq.u32", "selp.b32", "shr.u32", "shl.b32", "shfl.sync.idx.b32",
        "prmt.b32", "lop3.b32",
    }  # fmt: skip
