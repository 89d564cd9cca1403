"""One to four rows of x times a GGUF weight in Triton: formats, layouts, the matrix unit's part, planted bugs."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import support
import torch
from test_nf4_kernels import run_ptx

from riftco.functional import GGUFWeight, dequantize_gguf, gguf_linear
from riftco.kernels.gguf_linear import cases, route
from riftco.kernels.gguf_linear.formats import FORMATS

pytest.importorskip("triton")
import triton
import triton.language as tl

from riftco.kernels.gguf_linear import row, units

DEVICES = support.device_params(("cpu-triton", "cuda"))
TESTS = pathlib.Path(__file__).parent.parent
LONG = {"Q8_0": 33, "Q4_K": 17, "Q5_K": 17, "Q6_K": 9}  # blocks that take more than one step of LANES units


def weight(format, N, blocks, seed=0):
    f = FORMATS[format]
    packed = cases.random_blocks(format, N * blocks, torch.Generator().manual_seed(seed)).view(N, blocks * f.bytes)
    return GGUFWeight(packed, format, (N, blocks * f.block))


def normalised_error(got, want):
    return float((got.cpu().double() - want).square().sum() / want.square().sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format_and_length(format, dtype, device):
    """Rows of one block, and of more than a step; odd N; bias; rows alone give what they give beside others."""
    bound = 1e-11 if dtype == torch.float32 else 1e-6 if dtype == torch.float16 else 1e-5
    if dtype == torch.bfloat16 and device.name == "cpu-triton":
        bound = 5e-5  # it truncates the result
    for N, blocks in ((1, 1), (7, LONG.get(format, 65))):
        w = weight(format, N, blocks, seed=N)
        x, b = torch.randn(4, w.shape[1]).to(dtype), torch.randn(N).to(dtype)
        want = x.double() @ dequantize_gguf(w, torch.float64).t() + b.double()
        w, x, b = w.to(device.torch_device), x.to(device.torch_device), b.to(device.torch_device)
        with device.use(), support.poisoned():
            whole = gguf_linear(x, w, b)
            for M in (1, 2, 3, 4):
                assert route.route(M, *w.shape, dtype, format).name == "row"
                y = gguf_linear(x[4 - M :], w, b)
                assert normalised_error(y, want[4 - M :]) < bound, (N, blocks, M)
                if device.name == "cuda":  # numpy adds in an order that shapes decide
                    assert torch.equal(y, whole[4 - M :]) and torch.equal(y, gguf_linear(x[4 - M :], w, b))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_x_and_of_w_that_lie_anywhere(dtype, device):
    """Ranks 1 to 4, strides, odd addresses, expanded rows; some rows of W; packed bytes at an odd address."""
    w = weight("Q5_1", 7, 2).to(device.torch_device)
    dense, K = dequantize_gguf(w, torch.float32), w.shape[1]
    wide = torch.randn(4, 2, 3 * K + 5, device=device.torch_device).to(dtype)
    views = (
        wide[0, 0, :K], wide[0, :, 3 : K + 3], wide[:2, :, 1 : 2 * K + 1 : 2], wide[:, :1, None, 5 : K + 5],
        wide[0, 0, 1 : K + 1].expand(3, K), wide[:, 1, :K],
    )  # fmt: skip
    tolerance = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else dict(rtol=2**-6, atol=5e-2)
    index = torch.tensor([6, 0, 3], device=device.torch_device)
    buffer = torch.zeros(w.packed.numel() + 1, dtype=torch.uint8, device=device.torch_device)
    buffer[1:] = w.packed.view(-1)
    odd = GGUFWeight(buffer[1:].view_as(w.packed), w.format, w.shape)
    with device.use(), support.poisoned():
        for x in views:
            y = gguf_linear(x, w)
            assert y.shape == (*x.shape[:-1], 7)
            torch.testing.assert_close(y, (x.float() @ dense.t()).to(dtype), **tolerance)
            assert torch.equal(y, gguf_linear(x.contiguous().clone(), w)) and torch.equal(y, gguf_linear(x, odd))
            assert torch.equal(gguf_linear(x, w.rows(index)), y[..., index])


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_in_its_row(device):
    for format in ("Q4_0", "Q4_K"):
        w = weight(format, 5, 2).to(device.torch_device)
        x = torch.randn(3, w.shape[1], device=device.torch_device, dtype=torch.float16)
        x[1, -1] = torch.nan
        with device.use():
            assert gguf_linear(x, w).isnan().all(1).tolist() == [False, True, False]
            assert not gguf_linear(x[::2], w).isnan().any()


def test_routes():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for M, backward, name in ((1, False, "row"), (4, False, "row"), (5, False, "few"), (1, True, "few")):
            found = route.route(M, 4096, 4096, dtype, "Q5_1", backward=backward)
            assert found.name == name and found.why
        assert {name for _, name, _ in route.forward_routes(dtype)} == {"row", "few", "scratch"}
        assert {name for _, name, _ in route.backward_routes(dtype)} == {"few", "scratch"}
    assert route.route(1, 4096, 4096, torch.float64, "Q5_1").name == "few"
    assert route.route(1, 4096, 0, torch.float16, "Q5_1").name == "few"  # there is no block to read
    for format in FORMATS:  # how a row is summed depends on nothing but the row
        found = [route.route(M, N, 256, torch.float16, format) for M in (1, 2, 3, 4) for N in (1, 1536, 14336)]
        assert len({(r.step, r.warps) for r in found}) == 1 and found[0].step % route.UNITS[format] == 0
        assert {r.rows for r in found} == {1, 2, 4} and min(r.outputs for r in found) == 2


@pytest.mark.parametrize("dtype,size", [(torch.float32, 23), (torch.bfloat16, 7), (torch.float16, 10)])
def test_the_instruction_makes_a_float_of_every_code(dtype, size):
    """2^b + u, from any bits around: one float, or two in 16 bits."""
    texts = {23: row.PICK_FLOAT, 7: row.PICK_BFLOAT16, 10: row.PICK_FLOAT16}[size].value
    for bits in range(4, min(size, 8) + 1):
        code = np.arange(1 << bits, dtype=np.uint32).repeat(max(1, 32 >> bits))[: max(32, 1 << bits)]
        for part in code.reshape(-1, 32):
            other = (part * 7 + 3) % (1 << bits)
            word = part << (size - bits)
            noise = np.uint32(0xFFFFFFFF) ^ np.uint32((1 << bits) - 1 << size - bits)
            if size == 23:
                got = run_ptx(texts[bits], {1: word | noise & np.uint32(0xDEADBEEF)})[0].view(np.float32)
                assert (got == (1 << bits) + part).all()
            else:
                noise ^= np.uint32((1 << bits) - 1 << size - bits + 16)
                word = word | other << (size - bits + 16) | noise & np.uint32(0xDEADBEEF)
                got = run_ptx(texts[bits], {1: word})[0].copy().view(np.int16).reshape(32, 2)
                values = torch.from_numpy(got).view(dtype).float().numpy()
                assert (values == (1 << bits) + np.stack((part, other), 1)).all()


@triton.jit
def _sums(even_ptr, odd_ptr, rest_ptr, y_ptr):
    lane = tl.arange(0, 64)[:, None, None]
    y = row._whole(tl.load(even_ptr + lane), tl.load(odd_ptr + lane), tl.load(rest_ptr + lane), lane, True)
    tl.store(y_ptr + tl.zeros([1, 1, 1], tl.int32), y)


@pytest.mark.parametrize("device", DEVICES)
def test_the_diagonal_holds_the_sums_of_four_lanes(device):
    """Two warps' fragments as PTX lays mma.m16n8k16 out: lane l holds row l // 4 of A, k of l % 4, column l // 4 of B
    and of C the columns 2 (l % 4) and one more."""
    gen = torch.Generator().manual_seed(0)
    codes, x, rest = (
        torch.randn(64, 4, generator=gen),
        torch.randn(64, 4, generator=gen),
        torch.randn(64, generator=gen),
    )
    even, odd = torch.empty(64), torch.empty(64)
    for warp in (slice(0, 32), slice(32, 64)):
        a, b = codes[warp].view(8, 16), x[warp].view(8, 16)
        c = a @ b.t()  # [rows, columns] of this warp
        even[warp], odd[warp] = c[:, ::2].reshape(-1), c[:, 1::2].reshape(-1)
    y = torch.empty(1, device=device.torch_device)
    with device.use():
        _sums[(1,)](*(t.to(y.device) for t in (even, odd, rest)), y, num_warps=2)
    torch.testing.assert_close(y.cpu(), ((codes * x).sum() + rest.sum()).view(1))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.slow
def test_every_format_compiles_with_lanes_apart(capability, dtype):
    """All but without spills, and so that the matrix unit sees each lane's own elements."""
    command = [sys.executable, str(TESTS / "compile_gguf_row.py"), str(capability), dtype]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=TESTS.parent,
        env={**os.environ, "TRITON_INTERPRET": "", "PYTHONPATH": str(TESTS.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * len(FORMATS)
    for format, rows, shared, spilled, matrix, lanes in lines:
        said = (format, rows, shared, spilled, lanes)
        assert int(shared) <= 99 << 10 and int(spilled) <= 32 and lanes == "apart", said
        assert (int(matrix) > 0) == (dtype != "float32")


@pytest.mark.parametrize(
    "module,old,new,case",
    [
        (units, "(half(ptr + 2) << 16)", "(half(ptr + 2) << 15)", "Q4_0, three rows"),
        (units, "(FIELDS + 4 if FIVE else FIELDS) + i * 4", "(FIELDS + 4 if FIVE else FIELDS)", "Q4_1, three rows"),
        (units, "_spread(top >> 16)", "_spread(top >> 15)", "Q5_0, three rows"),
        (units, "* 0x02040810", "* 0x02040808", "Q5_1, three rows"),
        (units, "low ^= -2139062144", "low ^= 0", "Q8_0, three rows"),
        (units, "((two >> upper) & upper_mask)", "((one >> upper) & upper_mask)", "Q4_K, three rows"),
        (units, "((three >> (shift + 4)) & lower_mask)", "((three >> shift) & lower_mask)", "Q4_K, three rows"),
        (units, "upper, lower_mask = shift + late * 2", "upper, lower_mask = shift + late", "Q4_K, three rows"),
        (units, "b_high | ((b_top << 3)", "b_high | ((b_top << 4)", "Q5_K, three rows"),
        (units, "top >>= i % 16 // 8 * 2", "top >>= i % 16 // 8", "Q6_K, three rows"),
        (units, "tl.load(scale_ptr + 4)", "tl.load(scale_ptr + 2)", "Q6_K, three rows"),
        (row, "n1 = n0 + PAIRS", "n1 = n0", "Q4_0, three rows"),
        (row, "live = start + first < blocks", "live = start + first < blocks + 1", "Q4_1, three rows"),
        (row, "tl.minimum(start + first, blocks - 1)", "tl.minimum(first, blocks - 1)", "Q8_0, three rows"),
        (row, "tl.minimum(m, M - 1).to(tl.int64) * K", "tl.minimum(m, 0).to(tl.int64) * K", "Q4_0, three rows"),
        (row, "bias_ptr + n1, mask", "bias_ptr + n0, mask", "Q4_1, three rows"),
        (row, "N + n1, y1", "N + n0, y1", "Q5_0, three rows"),
    ],
)
def test_planted_bugs(module, old, new, case):
    support.assert_caught(cases, module.__name__, old, new, case)


@pytest.mark.parametrize("old,new", [("offset0 - scale0 * LIFT", "offset0"), ("offset1 - scale1 * LIFT", "offset1")])
def test_planted_bugs_in_16_bits(old, new):
    device = next(d.values[0] for d in DEVICES if d.values[0].available)
    case = next(c for c in cases.CASES if c.name == "Q4_1, three rows")
    support.check_case(cases, case, torch.float16, device)
    with support.mutant(row.__name__, old, new), pytest.raises(AssertionError):
        support.check_case(cases, case, torch.float16, device)
