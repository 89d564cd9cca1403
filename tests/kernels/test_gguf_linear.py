"""GGUF weights beyond the conformance cases: gguf's bits, the two routes, layouts of x, planted bugs."""

import numpy as np
import pytest
import support
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from riftco import nn
from riftco.functional import GGUFWeight, dequantize_gguf, gguf_linear
from riftco.kernels import _frozen, _matmul
from riftco.kernels.gguf_linear import cases, cpu, op, route
from riftco.kernels.gguf_linear.formats import FORMATS, REPACKED

gguf = pytest.importorskip("gguf")

DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))
LEGACY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # those that the gguf package can quantise to


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weight(format="Q4_K", N=6, blocks=2, seed=0):
    f = FORMATS[format]
    packed = cases.random_blocks(format, N * blocks, generator(seed)).view(N, blocks * f.bytes)
    return GGUFWeight(packed, format, (N, blocks * f.block))


def theirs(packed, format):
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(packed.numpy(), gguf.GGMLQuantizationType[format]))


def same_bits(a, b):
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", list(FORMATS))
def test_bits_are_gguf_s(format, device):
    """Any bits at all: float16 scales that are subnormal, infinite, NaN or -0.0 too."""
    f = FORMATS[format]
    packed = torch.randint(0, 256, (40, 3 * f.bytes), dtype=torch.uint8, generator=generator())
    w = GGUFWeight(packed, format, (40, 3 * f.block)).to(device.torch_device)
    with device.use(), support.poisoned(), np.errstate(all="ignore"):
        assert same_bits(dequantize_gguf(w, torch.float32).cpu(), theirs(packed, format))
    tame = weight(format, 5, 3).to(device.torch_device)
    with device.use(), support.poisoned():
        half = dequantize_gguf(tame, torch.float16).cpu()
    assert torch.equal(half, theirs(tame.packed.cpu(), format).half())


@pytest.mark.parametrize("format", LEGACY)
def test_a_quantised_matrix_is_near(format):
    w = torch.randn(8, 64, generator=generator())
    packed = torch.from_numpy(gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[format]))
    q = GGUFWeight(packed, format, (8, 64))
    assert (dequantize_gguf(q, torch.float32) - w).abs().max() < (0.3 if format.startswith("Q4") else 0.15)
    assert q.nbytes() == packed.nbytes and q.numel() == 512


def test_the_table_is_gguf_s():
    for f in FORMATS.values():
        kind = gguf.GGMLQuantizationType[f.name]
        assert kind == f.ggml_type and gguf.GGML_QUANT_SIZES[kind] == (f.block, f.bytes)


def test_from_a_file(tmp_path):
    path = tmp_path / "w.gguf"
    w = weight("Q5_K", 4, 2)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", w.packed.numpy(), raw_dtype=gguf.GGMLQuantizationType.Q5_K)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file()
    writer.close()
    read = GGUFWeight.from_reader(gguf.GGUFReader(path).tensors[0])
    assert read.shape == (4, 512) and read.format == "Q5_K" and torch.equal(read.packed, w.packed)


def test_rows_are_picked_without_requantising():
    w, order = weight("Q6_K"), torch.tensor([5, 0, 3])
    assert torch.equal(dequantize_gguf(w.rows(order), torch.float32), dequantize_gguf(w, torch.float32)[order])


# input features, rows of x, output features: the products through a frozen weight of a 1.5B model
SHAPES = ((1536, 1024, 1536), (1536, 1024, 8960), (8960, 1024, 1536), (1536, 300, 1536))


@pytest.mark.parametrize("K,M,N", SHAPES)
def test_tiles_change_no_bit(monkeypatch, K, M, N):
    """The tiled route (stretches of 16 MiB) against W decoded whole, row after row: forward and d_x, bit for bit. The
    third shape's upstream is transposed in memory."""
    format = "Q4_K" if K % 256 == 0 else "Q4_1"
    w = weight(format, N, K // FORMATS[format].block)
    x, d_y = torch.randn(M, K, generator=generator(1)), torch.randn(M, N, generator=generator(2))
    if K > N:
        d_y = d_y.t().contiguous().t()
    if N * K * 4 > _frozen.SCRATCH_BYTES:
        assert len(_frozen.stretches(N, K * 4, _frozen.SCRATCH_BYTES)) > 1
    whole = dequantize_gguf(w, torch.float32)
    for onednn in (_matmul._onednn, None):
        monkeypatch.setattr(_matmul, "_onednn", onednn)
        assert torch.equal(cpu.forward(x, w.packed, None, format, N, K), _matmul.matmul(x, whole))
        assert torch.equal(cpu.backward(d_y, w.packed, format, N, K), _matmul.matmul(d_y, whole.t()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("bias", [False, True])
def test_a_small_scratch_on_the_cpu(monkeypatch, dtype, format, bias):
    w = weight(format, 37, 3)
    N, K = w.shape
    x, d_y = torch.randn(3, K).to(dtype), torch.randn(3, N).to(dtype)
    b = torch.randn(N).to(dtype) if bias else None
    y, d_x = cpu.forward(x, w.packed, b, format, N, K), cpu.backward(d_y, w.packed, format, N, K)
    monkeypatch.setattr(_frozen, "FEW_BYTES", 5 * K * dtype.itemsize)
    monkeypatch.setattr(cpu, "STEP", 512)
    with Largest() as mode:
        y_parts, d_x_parts = cpu.forward(x, w.packed, b, format, N, K), cpu.backward(d_y, w.packed, format, N, K)
    assert mode.bytes < 0.6 * N * K * 4
    tolerance = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else dict(rtol=2**-7, atol=2e-2)
    torch.testing.assert_close(y_parts, y, **tolerance)
    torch.testing.assert_close(d_x_parts, d_x, **tolerance)


class Largest(TorchDispatchMode):
    """The largest tensor that an operator gave, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


def test_a_large_weight_is_never_whole_on_the_cpu():
    w = weight("Q4_K", 6000, 8)
    N, K = w.shape
    with Largest() as mode:
        cpu.forward(torch.randn(1, K), w.packed, None, w.format, N, K)
        cpu.backward(torch.randn(1, N), w.packed, w.format, N, K)
    assert mode.bytes <= 17 << 20 < N * K * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", range(1, 8))
def test_any_rank_with_broadcast_batches(device, rank):
    """x of rank 1..7, leading dimensions expanded, forward and d_x against a dense weight."""
    w = weight("Q5_1", 7, 2).to(device.torch_device)
    dense = dequantize_gguf(w, torch.float32)
    lead = (2, 3, 1, 2, 1, 2)[: rank - 1]
    small = torch.randn(*(1 for _ in lead), 64, generator=generator(3)).to(device.torch_device)
    with device.use(), support.poisoned():
        for x in (small.expand(*lead, 64), small + torch.zeros(*lead, 64, device=small.device)):
            a, b = x.detach().requires_grad_(), x.detach().requires_grad_()
            y, want = gguf_linear(a, w), b @ dense.t()
            up = torch.randn(want.shape, generator=generator(4)).to(x.device)
            d_x, wanted = torch.autograd.grad(y, a, up)[0], torch.autograd.grad(want, b, up)[0]
            torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(d_x, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", list(FORMATS))
def test_every_dtype_layout_and_batch(format, dtype, device):
    """Normalised mean squared error of both products against float64 products of W in that dtype, few rows and many."""
    w = weight(format, 19, 1)
    dense = dequantize_gguf(w, dtype).double()
    moved = w.to(device.torch_device)
    bound = 1e-4 if dtype == torch.bfloat16 and device.name == "cpu-triton" else 1e-5  # it truncates W, too
    for lead in ((3,), (2, 1, 5), (7, 10)):
        for transposed in (False, True):
            x, up = torch.randn(*lead, w.shape[1]).to(dtype), torch.randn(*lead, 19).to(dtype)
            if transposed:
                x, up = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, up))
            a = x.to(device.torch_device).requires_grad_()
            with device.use(), support.poisoned():
                y = gguf_linear(a, moved)
                (d_x,) = torch.autograd.grad(y, a, up.to(y.device))
            for got, want in ((y, x.double() @ dense.t()), (d_x, up.double() @ dense)):
                error = (got.detach().cpu().double() - want).square().sum() / want.square().sum()
                assert error < bound, (lead, transposed, float(error))


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    w = weight("Q4_1", 6, 1).to(device.torch_device)
    wide = torch.randn(4, 9, 72, device=device.torch_device)
    views = {
        "columns": wide[..., 3:35],
        "every second column": wide[..., :64:2],
        "transposed": wide[..., :32].transpose(0, 1),
        "last dimension strided": torch.randn(32, 7, device=device.torch_device).t(),
        "four dimensions": wide.reshape(2, 2, 9, 72)[:, :, 1::2, :32],
    }
    with device.use():
        for name, x in views.items():
            a, b = x.detach().requires_grad_(), x.detach().contiguous().requires_grad_()
            ya, yb = gguf_linear(a, w), gguf_linear(b, w)
            torch.testing.assert_close(ya, yb, msg=name)
            upstream = torch.randn(*ya.shape[:-1], 12, device=x.device)[..., ::2]
            (ga,) = torch.autograd.grad(ya, a, upstream)
            (gb,) = torch.autograd.grad(yb, b, upstream.contiguous())
            torch.testing.assert_close(ga, gb, msg=name)
            (ga,) = torch.autograd.grad(gguf_linear(a, w).sum(), a)  # an expanded gradient
            torch.testing.assert_close(ga, dequantize_gguf(w, ga.dtype).sum(0).expand_as(ga), msg=name)
        gaps = torch.full((12,), torch.nan, device=x.device)  # what lies between the bias's values is not read
        gaps[::2] = torch.randn(6)
        for few in (wide[0, :1, :32], wide.reshape(-1, 72)[:70, :32]):
            for bias in (gaps[::2], gaps[2].expand(6)):
                assert torch.equal(gguf_linear(few, w, bias), gguf_linear(few, w, bias.contiguous()))


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_that_lie_oddly(device):
    """Packed rows inside a wider buffer, from an odd address."""
    w = weight("Q4_0", 70, 2)
    buffer = torch.zeros(70, 45, dtype=torch.uint8, device=device.torch_device)
    buffer[:, 5:41] = w.packed.to(device.torch_device)
    odd = GGUFWeight(buffer[:, 5:41], "Q4_0", w.shape)
    with device.use(), support.poisoned():
        for M in (3, 70):
            x = torch.randn(M, 64, device=device.torch_device, requires_grad=True)
            y, want = gguf_linear(x, odd), gguf_linear(x, w.to(device.torch_device))
            assert torch.equal(y, want)
            grads = [torch.autograd.grad(t.square().sum(), x)[0] for t in (y, want)]
            assert torch.equal(*grads)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_and_nan(device):
    d = device.torch_device
    with device.use(), support.poisoned():
        for M, N, blocks in [(0, 5, 1), (4, 0, 1), (4, 5, 0), (70, 5, 0), (70, 0, 1)]:
            w = weight("Q8_0", N, blocks).to(d)
            x, b = torch.randn(M, w.shape[1], device=d, requires_grad=True), torch.randn(N, device=d)
            y = gguf_linear(x, w, b)
            y.sum().backward()
            assert torch.equal(y, b.expand(M, N)) if blocks == 0 else y.numel() == 0
            assert x.grad.shape == x.shape and not x.grad.any()
            assert dequantize_gguf(w, torch.float32).shape == w.shape
        w, x = weight("Q8_0", 6, 1).to(d), torch.randn(4, 32, device=d)
        x[2] = torch.nan
        assert gguf_linear(x, w).isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_a_reduction(device, monkeypatch):
    """A long reduction is cut and joined in order; a row's result does not depend on the rows beside it."""
    w = weight("Q4_1", 5, 40).to(device.torch_device)
    assert route.route(6, 5, 1280, torch.float32, "Q4_1").splits > 1
    assert route.route(6, 1280, 5, torch.float32, "Q4_1").splits == 1
    x, b = torch.randn(6, 1280, device=device.torch_device, requires_grad=True), torch.randn(5, device=w.device)
    with device.use(), support.poisoned():
        y = gguf_linear(x, w, b)
        torch.testing.assert_close(y, x @ dequantize_gguf(w, x.dtype).t() + b, rtol=1e-5, atol=1e-4)
        (first,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        (second,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(first, second) and torch.equal(y, gguf_linear(x, w, b))


def test_routes():
    for dtype in (torch.float32, torch.bfloat16):
        assert {route.route(M, 4096, 4096, dtype, "Q4_K").name for M in (5, 16, 64)} == {"few"}
        assert route.route(65, 4096, 4096, dtype, "Q4_K").name == "scratch"
        assert "more than 64" in route.route(65, 4096, 4096, dtype, "Q4_K").why
        assert route.route(65, 4096, 0, dtype, "Q4_K").name == "few"
        cuts = {(r.splits, r.part) for r in (route.route(M, 4096, 4096, dtype, "Q4_K") for M in (5, 20, 64))}
        assert len(cuts) == 1
        for O, R in ((1, 1), (4096, 14336), (100, 999), (50, 7)):
            r = route.route(5, O, R, dtype, "Q4_K")
            assert (r.splits - 1) * r.part < R <= r.splits * r.part and r.part % r.step == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_saved_tensors(device, bias):
    """Only the packed bytes are kept, and nothing at all when no gradient flows to x."""
    w = weight().to(device.torch_device)
    x = torch.randn(5, 512, device=device.torch_device, requires_grad=True)
    b = torch.randn(6, device=device.torch_device, requires_grad=True) if bias else None
    kept = []
    with device.use(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gguf_linear(x, w, b)
        assert [t.data_ptr() for t in kept] == [w.packed.data_ptr()]
        kept.clear()
        if bias:
            y = gguf_linear(x.detach(), w, b)
            assert not kept
            y.sum().backward()
            assert torch.equal(b.grad, torch.full_like(b, 5.0))


def test_gradcheck():
    w = weight("Q4_0", 5, 1)
    x = torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: gguf_linear(x, w, b), (x, b))
    assert torch.autograd.gradcheck(lambda x: gguf_linear(x, w), (x,))
    (g,) = torch.autograd.grad(gguf_linear(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    assert torch.autograd.gradgradcheck(lambda t: gguf_linear(t, w, impl="spec").pow(3), x)


def test_opcheck():
    w, x = weight(), torch.randn(2, 3, 512)
    for b in (None, torch.randn(6)):
        torch.library.opcheck(op.fwd, (x, w.packed, b, "Q4_K", 6, 512))
    torch.library.opcheck(op.bwd, (torch.randn(2, 3, 6), w.packed, "Q4_K", 6, 512))
    torch.library.opcheck(op.dequantize, (w.packed, "Q4_K", 6, 512, torch.bfloat16))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()
    layer = nn.GGUFLinear.from_weight(weight("Q5_0", 6, 1)).to(device.torch_device)
    fn = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for n in (5, 9):
            x = torch.randn(n, 32, device=device.torch_device)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            ya, yb = layer(a), fn(b)
            (ga,) = torch.autograd.grad(ya.square().sum(), a)
            (gb,) = torch.autograd.grad(yb.square().sum(), b)
            assert torch.equal(ya, yb) and torch.equal(ga, gb)


def test_modes():
    w, x, bias = weight("Q8_0", 6, 1), torch.randn(4, 32), torch.randn(6, requires_grad=True)
    dense = dequantize_gguf(w, torch.float32)
    with torch.inference_mode():
        a = gguf_linear(x, w)
    with torch.no_grad():
        assert torch.equal(gguf_linear(x, w), a) and not gguf_linear(x.requires_grad_(), w).requires_grad
    grad = torch.func.grad(lambda t: gguf_linear(t, w).square().sum())(x.detach())
    torch.testing.assert_close(grad, torch.func.grad(lambda t: (t @ dense.t()).square().sum())(x.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        y = gguf_linear(x, w, bias)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, torch.nn.functional.linear(x, dense, bias), rtol=2**-6, atol=2**-6)
    y.sum().backward()
    assert bias.grad.dtype == torch.float32 and x.grad.dtype == torch.float32
    kept = torch.utils.checkpoint.checkpoint(lambda t: gguf_linear(t, w), x, use_reentrant=False)
    kept.sum().backward()


@pytest.mark.parametrize("name", REPACKED)
def test_repacked_layouts_are_refused_with_the_remedy(name):
    with pytest.raises(ValueError, match=f"{name} is a repacked layout.*without repacking"):
        GGUFWeight(torch.zeros(4, 18, dtype=torch.uint8), name, (4, 32))


def test_errors():
    w, x = weight("Q4_0", 6, 1), torch.randn(4, 32)
    for bad, text in [
        (lambda: GGUFWeight(w.packed, "IQ2_XXS", w.shape), "IQ2_XXS cannot be read back.*quantise it again to"),
        (lambda: GGUFWeight(w.packed, "Q4_0", (6, 33)), "multiple of 32"),
        (lambda: GGUFWeight(w.packed, "Q4_1", w.shape), r"uint8 \(6, 20\); got torch.uint8 \(6, 18\)"),
        (lambda: GGUFWeight(w.packed.float(), "Q4_0", w.shape), "got torch.float32"),
        (lambda: gguf_linear(x, w.packed), "GGUFWeight; got Tensor"),
        (lambda: gguf_linear(x[:, :19], w), r"\[..., 32\]; got torch.float32 \(4, 19\)"),
        (lambda: gguf_linear(x.long(), w), "floating"),
        (lambda: gguf_linear(x, w, torch.ones(5)), r"\(6,\); got torch.float32 \(5,\)"),
        (lambda: gguf_linear(x, w, impl="fast"), "'fast'"),
        (lambda: gguf_linear(x.to("meta"), w), "x on meta"),
        (lambda: dequantize_gguf(w, torch.int32), "int32"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()


@pytest.mark.parametrize("device", support.device_params(("cpu-triton", "cuda")))
def test_a_scratch_smaller_than_the_weight_changes_nothing(device, monkeypatch):
    from riftco.kernels.gguf_linear import cuda

    w = weight("Q5_1", 50, 4).to(device.torch_device)
    results = []
    for scratch in (1 << 20, 4 * 128 * 7):
        monkeypatch.setattr(cuda, "SCRATCH_BYTES", scratch)
        x = torch.randn(2, 40, 128, generator=generator(1)).to(device.torch_device).requires_grad_()
        with device.use(), support.poisoned():
            y = gguf_linear(x, w)
            (d_x,) = torch.autograd.grad(y, x, torch.ones_like(y))
        results.append((y, d_x))
    for whole, parts in zip(*results):
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("b + 2 + e % 16, mask), e >= 16) - 8", "b + 2 + e % 16, mask), e > 16) - 8", "Q4_0, two blocks"),
        ("_byte(b + 4 + e % 16, mask), e >= 16)", "_byte(b + 4 + e // 2, mask), e % 2 == 1)", "Q4_1, two blocks"),
        ("_byte(b + 2 + e // 8, mask) >> (e % 8)", "_byte(b + 2 + e // 8, mask) >> (7 - e % 8)", "Q5_0, two blocks"),
        ("_byte(b + 4 + e // 8, mask) >> (e % 8)", "_byte(b + 4 + e % 4, mask) >> (e // 4)", "Q5_1, two blocks"),
        ("_byte(b + 2 + e, mask).to(tl.int8)", "_byte(b + 2 + e, mask)", "Q8_0, two blocks"),
        ("(first >> 2) & 48", "(second >> 2) & 48", "Q4_K, two blocks"),
        ("(second >> 2) & 48", "(first >> 2) & 48", "Q5_K, two blocks"),
        ("_byte(b + 16 + e % 32, mask) >> (e // 32)", "_byte(b + 16 + e // 8, mask) >> (e % 8)", "Q5_K, two blocks"),
        ("_byte(b + 192 + e // 16, mask).to(tl.int8)", "_byte(b + 192 + e // 16, mask)", "Q6_K, two blocks"),
        ("e % 128 // 32 * 2)) & 3", "e % 128 // 64 * 2)) & 3", "Q6_K, two blocks"),
        ("acc += dot(x, w.to(x.dtype))", "acc = dot(x, w.to(x.dtype))", "several tiles"),
        ("        acc += tl.load(bias_ptr + o,", "        acc += tl.load(bias_ptr + o - o,", "several tiles"),
        ("(row0 + n) * row_bytes, col0 + k,", "(row0 + n) * row_bytes, col0 + k + 1,", "many rows"),
        ("(r * row_bytes)[:, None], o[None, :]", "(r * row_bytes)[:, None], o[None, :] // 2", "several tiles"),
        ("r = s * part + start", "r = start", "five rows, parts"),
    ],
)
def test_planted_bugs(old, new, case):
    support.assert_caught(cases, "riftco.kernels.gguf_linear.cuda", old, new, case)


def test_planted_bug_in_the_second_stage():
    old = "for s in tl.static_range(1, SPLITS)"
    support.assert_caught(
        cases, "riftco.kernels._splits", old, "for s in tl.static_range(2, SPLITS)", "five rows, parts"
    )


@pytest.mark.parametrize(
    "module,old,new,case",
    [
        ("formats", "groups.mul_(scale.unsqueeze(-1))", "groups.mul_(scale.flip(1).unsqueeze(-1))", "Q4_K, two blocks"),
        ("formats", "runs & 15, runs >> 4", "runs >> 4, runs & 15", "Q4_0, two blocks"),
        ("cpu", "blocks[:, lo // f.block : hi // f.block]", "blocks.flip(1)", "Q4_1, two blocks"),
    ],
)
def test_planted_bugs_on_the_cpu(module, old, new, case):
    if module == "formats":  # the spec reads the same table: gguf's own values are what catches it
        with support.mutant("riftco.kernels.gguf_linear.formats", old, new):
            w = weight(case.split(",")[0])
            out = torch.empty(12, w.info.block)
            assert not torch.equal(w.info.decode(w.packed.view(12, -1), out).view(w.shape), theirs(w.packed, w.format))
        return
    support.assert_caught(cases, f"riftco.kernels.gguf_linear.{module}", old, new, case, device="cpu")
