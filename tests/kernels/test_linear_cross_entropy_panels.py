"""The first slice in panels of classes, some of which lie where dW is written: sizes, memory, values."""

import dataclasses
import itertools

import plain_slices
import pytest
import support
import torch
from test_cross_entropy_slices import problem

from riftco.functional import linear_cross_entropy
from riftco.kernels.cross_entropy import cuda as kernels
from riftco.kernels.cross_entropy.cuda.route import held
from riftco.kernels.linear_cross_entropy import cuda, panels, slices, spec
from riftco.kernels.linear_cross_entropy.panels import Sizes
from riftco.kernels.linear_cross_entropy.plan import Filled

DEVICES = support.device_params(("cpu-triton", "cuda"))
MIB, ROWS = 1 << 20, 44
LLAMA_8B, GEMMA_2B, LLAMA_1B = (8192, 4096, 128256), (8192, 2304, 256000), (16384, 2048, 128256)
PLAIN = dataclasses.replace(cuda.LOSS, panel=lambda p: 0, one_product=False, vocabulary_below=0)


def sizes(C, V, wide=4, most=512, row=0) -> Sizes:
    return Sizes(V, 8192, 2, 2 * C, wide * C, row, 4 * C, most * MIB)


def filled(C) -> Filled | None:
    return Filled(-(-C // 256), 132, 0.5) if C >= 2048 else None


@pytest.mark.parametrize(
    "shape", [LLAMA_8B, GEMMA_2B, LLAMA_1B, (4096, 896, 151936), (8191, 4096, 128256), (700, 64, 16400)]
)
@pytest.mark.parametrize("wide, most, row", list(itertools.product((2, 4), (64, 128, 512, 2048), (0, 8192))))
def test_no_panel_is_written_over_before_it_is_read(shape, wide, most, row):
    """Byte by byte what the loop does: panel by panel its dW, written while the panel and those behind it are alive."""
    N, C, V = shape
    s = sizes(C, V, wide, most, row)
    found = panels.first(N, s, 2 * V, filled(C))
    if found is None:
        return
    made, rest = found
    one = rest.slices == 0
    class_bytes, allowed = (s.narrow, s.most + (s.wide - s.narrow) * V) if one else (s.wide, s.most)
    assert made.rows + rest.rows * rest.slices >= N and (one or made.rows > rest.rows)
    assert made.width % s.step == 0 and 0 < made.sums <= made.rows
    beside = made.rows * (V - made.inside * made.width) * 2 + made.rows * row + made.sums * s.sums
    assert beside <= allowed
    panel, end = made.rows * made.width * 2, V * class_bytes // panels.LINE * panels.LINE
    begins = [end - (made.inside - i) * panel for i in range(made.inside)]
    assert made.inside == 0 or begins[0] >= 0
    for i, lo in enumerate(range(0, V, made.width)):
        written = min(lo + made.width, V) * class_bytes
        assert all(written <= begin for begin in begins[i:])


def test_sizes():
    """Where all rows fit, one slice; where most memory is dW's, most rows are in the first."""
    N, C, V = LLAMA_8B
    for mib in (128, 256, 512, 1024):
        made, rest = panels.first(N, sizes(C, V, 4, mib), 2 * V, filled(C))
        assert made.rows == N and rest.slices == 0
    assert made.width == panels.WIDEST and made.sums == N
    made, rest = panels.first(N, sizes(C, V, 4, 64), 2 * V, filled(C))
    assert made.rows > N / 2 and rest.rows == 256
    assert panels.first(8192, sizes(C, V, 2, 1), 2 * V, filled(C)) is None  # not even a tile's sums of d_x fit


@pytest.fixture
def small(monkeypatch):
    """Results and slices of any size are worth it, and what an H200's processors hold of sums is little."""
    monkeypatch.setattr(panels, "FILLING", 1)
    monkeypatch.setattr(panels, "TILE", 16)


OPTIONS = {
    "plain": {},
    "row weights": dict(row_weight=torch.rand(ROWS) + 0.1),
    "z_loss, scale": dict(z_loss=0.1, logit_scale=0.5),
    "bias": dict(bias=torch.randn(20496).bfloat16()),
    "gaps": dict(gaps=True),
    "masked": dict(gaps=True, n_labelled=-1),
}


def given(name: str, device: str, dtype: torch.dtype, mib: float):
    fields = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
    gaps = fields.pop("gaps", False)
    p = problem(ROWS, 32, 20496, 1, dtype, device, slice_bytes=int(mib * MIB), **fields)
    if gaps:
        p.target[5] = p.target[41] = -100
    return p


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mib", [0.3, 0.5])
@pytest.mark.parametrize("name", OPTIONS)
def test_values(name, mib, device, small, monkeypatch):
    """Losses are those of slices of rows, gradients as near to float64's, of one slice and of several."""
    p, seen, real = given(name, device.torch_device, torch.bfloat16, mib), [], kernels.Slices.in_panels
    monkeypatch.setattr(kernels.Slices, "in_panels", lambda self, *a: (seen.append(len(a[0])), real(self, *a)))
    wide = p._replace(**{n: getattr(p, n).double() for n in ("x", "weight", "bias") if getattr(p, n) is not None})
    d_loss = torch.rand(ROWS, device=device.torch_device)
    for x, acc in ((True, torch.float32), (name != "plain", torch.bfloat16)):
        needs = [x, True, x and p.bias is not None, False, False]
        seen.clear()
        with device.use():
            got, usual = (slices.backward(loss, d_loss, *p, acc, needs) for loss in (cuda.LOSS, PLAIN))
        assert seen and seen[0] > 1
        want = spec.backward(d_loss.double(), *wide, torch.float32, needs)
        if p.bias is None:  # with one, cuBLAS rounds products of other sizes elsewhere
            torch.testing.assert_close(got[0], usual[0], rtol=2e-5, atol=2e-5)
        for g, r, w in zip((got[0], *got[5:]), (usual[0], *usual[5:]), (want[0], *want[5:]), strict=True):
            assert g.dtype == r.dtype and g.shape == r.shape
            if g.numel():
                error, before = ((t.double() - w).norm() / w.norm() for t in (g, r))
                assert error <= (1.1 if p.bias is None else 1.6) * before + 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_float16_and_no_wider_memory(device, small):
    """float16's dW is float32, as its divisor comes later; bfloat16's is written once, in memory of its own size."""
    for dtype, out in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        p = given("plain", device.torch_device, dtype, 0.5)
        with device.use():
            d_w = slices.backward(cuda.LOSS, None, *p, torch.float32, [True, True, False, False, False])[6]
        assert d_w.dtype == out and d_w.untyped_storage().nbytes() == d_w.nbytes
        usual = slices.backward(plain_slices.LOSS, None, *p, torch.float32, [True, True, False, False, False])[6]
        assert (d_w - usual).norm() <= 0.02 * usual.norm()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of the very values
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V, width", [(20496, 4096), (40016, 12288), (69632, 8192), (128256, 24576), (128256, 16384)])
def test_rows_in_panels(V, width, dtype, device):
    """held.py's rows cut along V, in two places, give what whole rows give: labels at the edges of panels, rows without
    a label, a class that is none, logits beyond its exponentials."""
    d, n = device.torch_device, 12
    whole = (torch.randn(n, V, device=d) * 3).to(dtype)
    target = torch.tensor(
        [0, width - 1, width, 2 * width - 1, V - 1, V - width % 16 - 16, -1, 5, V, 7, V // 2, 1], device=d
    )
    whole[9, ::2] = -torch.inf
    whole[10] = (whole[10].float() * (1e36 if dtype == torch.bfloat16 else 2e4)).to(dtype)
    up, weight = torch.rand(n, device=d), torch.rand(n, device=d)
    parts = whole.split(width, 1)
    for together in (1, 2, len(parts)):
        # what lies between the two places must stay as it is
        sizes = [p.numel() for p in parts]
        gap = 4096 if together < len(parts) else 0
        memory = torch.full((sum(sizes) + gap,), 7.0, dtype=dtype, device=d)
        second = sum(sizes[:together])
        panels_ = [
            m.view(p.shape)
            for m, p in zip([*memory[:second].split(sizes[0]), *memory[second + gap :].split(sizes[0])], parts)
        ]
        for mine, p in zip(panels_, parts):
            mine.copy_(p)
        g, outs = whole.clone(), [[torch.empty(n, device=d) for _ in range(3)] for _ in range(2)]
        options = (-100, 0.0, 0.2, 0.0, 0.7)
        with device.use():
            kernels.Slices(target, weight, None, up, options, False, True, outs[0]).in_panels(panels_, together)
            kernels.Slices(target, weight, None, up, options, False, True, outs[1])(g, 0)
        for a, b in zip(*outs):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(torch.cat(panels_, 1), g, rtol=0.01, atol=1e-6, equal_nan=True)
        assert (memory[second : second + gap] == 7).all()


def test_chunks_of_a_panel_come_at_once():
    for V, panel in ((128256, 24576), (128256, 16384), (128256, 8192), (20496, 4096), (256000, 32768)):
        one = held(V, panel)
        assert panel % (8 * one.T * one.R) == 0 and (one.chunks - one.held) % one.R == 0 and one.held >= 1


@pytest.mark.gpu
def test_memory_on_a_gpu():
    """No more is taken than dW in accum_dtype and slice_bytes, beside d_x; dW's memory alone is held afterwards."""
    N, C, V = 2048, 1024, 128256
    x = torch.randn(N, C, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(V, C, device="cuda") / 32).bfloat16().requires_grad_()
    target = torch.randint(0, V, (N,), device="cuda")
    for mib, acc in itertools.product((64, 160, 256), (torch.float32, torch.bfloat16)):
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss = linear_cross_entropy(x, weight, target, slice_bytes=mib * MIB, accum_dtype=acc)
            d_x, _d_w = torch.autograd.grad(loss, (x, weight))
            peak = torch.cuda.max_memory_allocated() - before
        assert peak <= mib * MIB + V * C * acc.itemsize + 2 * d_x.nbytes + MIB
        del loss
        assert torch.cuda.memory_allocated() - before <= d_x.nbytes + V * C * acc.itemsize + MIB
