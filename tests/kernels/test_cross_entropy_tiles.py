"""Cross-entropy's tiles: each route against the spec, and what the compiler makes of them."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import support
import torch

from riftco.functional import cross_entropy
from riftco.kernels.cross_entropy import op, spec
from riftco.kernels.cross_entropy.cuda import launch
from riftco.kernels.cross_entropy.cuda.route import held, once, plan

DEVICES = support.device_params(("cpu-triton", "cuda"))
# V -> what plan gives for bfloat16 rows that lie at multiples of 16 bytes
ROUTES = {
    48: (1, 1, 8, 1), 16400: (16, 1, 8, 1), 40960: (16, 2, 8, 1), 65536: (32, 2, 8, 2), 70000: (32, 2, 8, 2),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, dict(inplace=True), dict(return_metrics=True), dict(softcap=9.0)], ids=str)
@pytest.mark.parametrize("V", list(ROUTES))
@pytest.mark.parametrize("first", [0, 16, 1])
def test_every_route(device, V, options, first):
    """Rows that lie `first` elements behind a multiple of 16: of the memory, of the rows' distance, or of neither."""
    assert plan(V, 2, True, False, True) == ROUTES[V]
    whole = 3 * torch.randn(3, V + first, dtype=torch.float64)
    whole[1, first + 5] = 30.0
    y = torch.tensor([V - 1, 5, -100])
    a = whole.float().double()[:, first:].requires_grad_()
    want = cross_entropy(a, y, impl="spec", **{k: v for k, v in options.items() if k not in ("inplace",)})
    loss = want[0] if isinstance(want, tuple) else want
    (d_a,) = torch.autograd.grad(loss, a)
    b = whole.float().to(device.torch_device).requires_grad_()
    with device.use(), support.poisoned():
        view = (1 * b)[:, first:]  # of a tensor that may be written over
        got = cross_entropy(view, y.to(b.device), **options)
        mine = got[0] if isinstance(got, tuple) else got
        (d_b,) = torch.autograd.grad(mine, b)
    torch.testing.assert_close(mine.cpu().double(), loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(d_b[:, first:].cpu().double(), d_a, rtol=1e-4, atol=1e-12)
    assert not d_b[:, :first].any()
    if "return_metrics" in options:
        for one, other in zip(got[1], want[1]):
            torch.testing.assert_close(one.cpu().to(other.dtype), other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def rounded_once(monkeypatch):
    """The interpreter's fma rounds the product, which a GPU's does not, and held.py builds on."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def create_fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)


def held_against_spec(device, x, y, options, inplace=False):
    d_loss = torch.rand(len(y)) + 0.5
    want = spec.forward_backward(x.double(), y, None, None, d_loss.double(), *options)
    to = device.torch_device
    with device.use(), support.poisoned():
        mine = x.to(to)
        alone = launch.forward(mine, y.to(to), None, None, *options)
        got = launch.forward_backward(mine, y.to(to), None, None, d_loss.to(to), *options, inplace)
    assert (got[-1] is mine) == inplace
    for a, b in ((got[0], want[0]), (alone[0], want[0])):
        torch.testing.assert_close(a.cpu().double(), b, rtol=3e-6, atol=3e-6, equal_nan=True)
    half = (2**-8 if x.dtype == torch.bfloat16 else 2**-11) * (1.02 if device.name == "cuda" else 2.04)
    torch.testing.assert_close(got[-1].cpu().double(), want[-1], rtol=half, atol=1.3e-7, equal_nan=True)
    return got[-1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of infinities
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("V", [16400, 32000])
@pytest.mark.parametrize("sign", [1, -1])
def test_held_at_every_size_of_logits(device, V, sign, rounded_once):
    """Rows that are equal, one-hot, or masked but for some classes: what rounding takes from exponents is put back."""
    sizes = sign * torch.tensor([1e3, 3e6, 4.1e7, 6.9e7, 7.1e7, 2e8, 1.51e9, 3.1e9, 1e10, 1e20, 1e30, 2e38, 3.3e38])
    equal = sizes.unsqueeze(1).expand(-1, V).contiguous()
    hot = equal * (1 - 2**-6)
    hot[:, 7] = equal[:, 7]
    masked = torch.randn(len(sizes), V)
    masked[:, 64 if V == 32000 else V // 2 :] = -sizes.abs().unsqueeze(1)
    last = torch.randn(len(sizes), V)
    last[:, : V - 512] = -sizes.abs().unsqueeze(1)
    x = torch.cat((equal, hot, masked, last)).bfloat16()
    y = torch.tensor([5, 7, 5, V - 3]).repeat_interleave(len(sizes))
    held_against_spec(device, x, y, (-100, 0.0, 0.0, 0.0, 1.0, False))
    held_against_spec(device, x[:20], y[:20], (-100, 0.0, 0.0, 0.0, 0.3, False))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy, of infinities
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("V", [16400, 24576, 28688, 32000, 49152, 50304, 65520, 100352])
def test_held(device, V, dtype, inplace, rounded_once):
    """Plain long rows of 16 bits: labels in every place and none, rows that are not finite or as large as it gets."""
    chosen = held(V)
    assert chosen is not None
    chunk = 8 * chosen.T
    free = (chosen.chunks - chosen.held) * chunk
    assert 0 < V - (chosen.chunks - 1) * chunk <= chunk and (chosen.chunks - chosen.held) % chosen.R == 0
    places = [0, V - 1, chunk - 1, free - 1, free, free + 1, free - chosen.R * chunk, V - V % chunk - 1]
    x = (3 * torch.randn(19, V)).to(dtype)
    y = torch.tensor([*places, -100, 5, 6, 7, 8, 9, 2**40, 3, 4, V // 2, 7])
    x[0, 0], x[1, V - 1], x[8] = 30.0, 12.0, torch.nan
    x[9], x[10], x[11, 7], x[12, 8], x[13, V - 1] = -torch.inf, -torch.inf, torch.inf, -torch.inf, torch.nan
    x[10, 6] = 1.0  # the label is the only class
    large = torch.finfo(dtype).max
    x[15, 11], x[15, 3] = large, large  # two classes of one half each
    x[16], x[17] = -large, large * (1 - 2 * torch.finfo(dtype).eps)
    x[17, V // 2] = large
    x[18] = 0.75 * large + (torch.arange(V) % 3).to(dtype) * large * torch.finfo(dtype).eps
    options = (-100, 0.0, 0.0 if dtype == torch.bfloat16 else 1e-4, 0.0, 1.0, False)  # a square would be infinite
    assert not held_against_spec(device, x, y, options, inplace)[8].any()


@pytest.mark.parametrize("V", [16400, 24576, 32000, 50304, 262144])
@pytest.mark.parametrize("N", [1, 1023, 1024, 1 << 20])
def test_chunks_of_rows_that_are_read_once(V, N):
    chosen = once(V, N)
    chunk = 8 * chosen.T
    assert 0 < V - (chosen.chunks - 1) * chunk <= chunk
    assert 1 <= chosen.held <= chosen.R and (chosen.chunks - chosen.held) % chosen.R == 0


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled(capability):
    """Nothing spills where it counts; aligned rows are read and written 16 bytes at a time."""
    pytest.importorskip("triton")
    script = pathlib.Path(__file__).parent.parent / "compile_losses.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(script.parent.parent)
    run = subprocess.run(
        [sys.executable, str(script), str(capability)], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split(": ") for line in run.stdout.splitlines()]
    assert len(lines) >= 10
    for name, numbers in lines:
        shared, spilled, widths = numbers.split()
        few = 80 if capability == 80 or "odd" in name else 0
        if name == "aligned 49152":
            few = 4  # one register, for a third program on the multiprocessor
        assert int(spilled) <= few and int(shared) <= 8192, name
        assert ("16" in widths.split(",")) == ("aligned" in name), (name, widths)


@pytest.mark.parametrize("device", support.device_params(("cpu", "cpu-triton", "cuda")))
@pytest.mark.parametrize("N", [0, 1, 100, 20000, (1 << 17) + 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_a_mean_divides_by(device, N, dtype):
    """Rows with a label are counted, in as many tiles as it takes; strided, and with none left."""
    y = torch.randint(-2, 5, (N, 2), dtype=dtype)[:, 0]
    with device.use(), support.poisoned():
        over, reciprocal = op.labelled(y.to(device.torch_device), 3)
        none, _ = op.labelled(torch.full((7,), 3, dtype=dtype, device=device.torch_device), 3)
    want = max(1, int(((y != 3) & (y >= 0)).sum()))
    assert (over.item(), none.item()) == (want, 1) and over.dtype == reciprocal.dtype == torch.float32
    torch.testing.assert_close(reciprocal.item(), 1 / want, rtol=1e-7, atol=0)
