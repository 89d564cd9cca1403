"""Cross-entropy as XLA runs it: edges on the device, the compiled graph's buffers, planted bugs.

The launcher is plain torch, so all but the graph is also checked on the CPU against the spec.
"""

import pathlib
import re
import subprocess
import sys

import pytest
import support
import torch
import torch.nn.functional as F
from xla_graph import recorded

from riftco.functional import cross_entropy
from riftco.kernels._contract import implementation
from riftco.kernels.cross_entropy import cases, spec
from riftco.tpu import cross_entropy as launcher


def awkward_rows(V: int, dtype: torch.dtype):
    """Each row is an edge: labelled, ignored, negative, past the vocabulary by little and by 2^32, infinities, NaN."""
    x = (3 * torch.randn(10, V)).to(dtype)
    y = torch.randint(0, V, (10,))
    y[1], y[2], y[3], y[4] = -100, -7, V, 2**32 + 3
    x[5, : V - 1], y[5] = -torch.inf, V - 1
    x[6, 2], y[6] = torch.inf, 1
    x[7] = -torch.inf
    x[8] = torch.nan
    w = torch.rand(10) + 0.5
    w[8] = 0.0  # hides the NaN
    return x, y, w


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_launcher_is_the_spec(dtype, weighted):
    x, y, w = awkward_rows(37, dtype)
    w = w if weighted else None
    d_loss = torch.randn(10)
    for ignore_index in (-100, 3):
        for c, *options in ((None, 0.0, 0.0, 0.0, 1.0), (torch.rand(37, dtype=torch.float64), 0.1, 0.2, 3.0, 0.7)):
            c = None if c is None else c.to(torch.promote_types(dtype, torch.float32))
            rows = (y, w, c)
            got = launcher.forward(x, *rows, ignore_index, *options, True)
            want = spec.forward(x, *rows, ignore_index, *options, True)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, equal_nan=True)
            stats = (*rows, want[1], want[2], ignore_index, *options)
            for upstream in ((d_loss, None), (None, d_loss), (d_loss, d_loss)):
                grads = [module.backward(*upstream, x, *stats) for module in (launcher, spec)]
                torch.testing.assert_close(*grads, equal_nan=True)


@support.xla
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("labels", [torch.int32, torch.int64])
def test_edges_on_the_device(device, dtype, labels):
    x, y, w = awkward_rows(37, dtype)
    y = y.clamp(max=2**31 - 1).to(labels) if labels == torch.int32 else y
    want = x.clone().requires_grad_()
    got = x.to("xla").requires_grad_()
    with implementation("spec"):
        want_loss = cross_entropy(want, y, row_weight=w, reduction="none")
    loss = cross_entropy(got, y.to("xla"), row_weight=w.to("xla"), reduction="none")
    torch.testing.assert_close(loss.cpu(), want_loss, equal_nan=True, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(10)
    (d_want,) = torch.autograd.grad(want_loss, want, upstream)
    (d_got,) = torch.autograd.grad(loss, got, upstream.to("xla"))
    assert d_want.isnan().any() and d_want[~d_want.isnan()].abs().max() > 0.1
    torch.testing.assert_close(d_got.cpu(), d_want, equal_nan=True)


@support.xla
def test_a_training_step_is_one_graph_whatever_the_labels(device):
    """New labels, other ignored rows and another ignore_index reuse the compiled graph; it follows PyTorch's loss."""
    weight = torch.randn(50, 16)
    w, x = weight.to("xla").requires_grad_(), torch.randn(24, 16)
    seen = []
    for step, ignore_index in enumerate((-100, -100, 5)):
        y = torch.randint(0, 50, (24,), generator=torch.Generator().manual_seed(step))
        y[step::4] = ignore_index
        xd, yd = x.to("xla"), y.to("xla")
        with recorded() as record:
            loss = cross_entropy(F.linear(xd, w), yd, ignore_index=ignore_index)
            (d_w,) = torch.autograd.grad(loss, w)
        assert not record.fallbacks and record.executions == 1
        seen.append(record.compiles)
        reference = weight.clone().requires_grad_()
        want = F.cross_entropy(F.linear(x, reference), y, ignore_index=ignore_index)
        want.backward()
        torch.testing.assert_close(loss.cpu(), want.detach())
        torch.testing.assert_close(d_w.cpu(), reference.grad)
    assert seen == [1, 0, 0]


@support.xla
def test_strides_and_zero_sizes(device):
    wide = (3 * torch.randn(4, 9, 40)).to("xla")
    for x in (wide[:, :-1], wide[..., 3:20], wide.transpose(0, 1), wide[:1].expand(3, 9, 40), wide.movedim(0, -1)):
        y = torch.randint(0, x.shape[-1], x.shape[:-1]).to("xla")
        a, b = x.detach().requires_grad_(), x.detach().cpu().contiguous().requires_grad_()
        la, lb = cross_entropy(a, y), cross_entropy(b, y.cpu())
        la.backward()
        lb.backward()
        torch.testing.assert_close(la.detach().cpu(), lb.detach())
        torch.testing.assert_close(a.grad.cpu(), b.grad)
    for shape in ((0, 5), (2, 0, 5), (0, 0)):
        empty = torch.randn(shape, device="xla", requires_grad=True)
        loss = cross_entropy(empty, torch.zeros(shape[:-1], dtype=torch.long, device="xla"))
        loss.backward()
        assert loss.item() == 0 and empty.grad.shape == shape


@support.xla
def test_modes_and_errors(device):
    x, y = torch.randn(4, 20).to("xla"), torch.randint(0, 20, (4,)).to("xla")
    with torch.inference_mode():
        plain = cross_entropy(x, y)
    with torch.no_grad():
        assert torch.equal(cross_entropy(x, y).cpu(), plain.cpu())
    grad = torch.func.grad(lambda t: cross_entropy(t, y))(x)
    torch.testing.assert_close(grad.cpu(), torch.func.grad(lambda t: F.cross_entropy(t, y.cpu()))(x.cpu()))
    leaf = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(cross_entropy(leaf, y), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    with pytest.raises(ValueError, match="logits on xla:0, target on cpu"):
        cross_entropy(x, y.cpu())
    with torch.autocast("xla", torch.bfloat16):
        assert cross_entropy(x.bfloat16(), y).dtype == torch.float32


COMPILE = """
import sys, torch, torch_xla
from riftco.kernels.cross_entropy.op import bwd, fwd
N, V = 256, 4096
x = torch.randn(N, V).bfloat16().to("xla"); y = torch.randint(0, V, (N,)).to("xla"); g = torch.ones(N).to("xla")
w = torch.rand(N).to("xla")
options = (-100, 0.0, 0.0, 0.0, 1.0)
torch_xla.sync()
if sys.argv[1] == "forward":
    kept = fwd(x, y, w, None, *options, False)
else:
    top, log_total = g * 3, g * 6
    torch_xla.sync()
    kept = bwd(g, None, x, y, w, None, top, log_total, *options)
torch_xla.sync(wait=True)
"""


@support.xla
@pytest.mark.parametrize("op,copies", [("forward", 1), ("backward", 0)])
def test_buffers_of_the_compiled_graph(device, op, copies, tmp_path, monkeypatch):
    """What XLA allocates for [256, 4096] bfloat16 logits, from its own report.

    The backward is one fusion: nothing of N x V besides its input and output, no one-hot. XLA:CPU does not fuse a
    producer into a reduction, so there the forward holds one float32 copy; never two, and never of labels.
    """
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    subprocess.run([sys.executable, "-c", COMPILE, op], check=True, cwd=pathlib.Path(__file__).parents[2])
    graph = max(tmp_path.glob("*.cpu_after_optimizations.txt"))
    entry = graph.read_text().split("ENTRY", 1)[1]
    assert not re.search(r"(pred|s32|s64|u32)\[256,4096\]", entry), "an [N, V] tensor of labels"
    report = graph.with_name(graph.stem + "-memory-usage-report.txt").read_text()
    unit = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    temp = [float(n) * unit[u] for n, u in re.findall(r"size ([\d.]+)(B|KiB|MiB), preallocated-temp", report)]
    assert max(temp, default=0) < copies * 4 * 256 * 4096 + (1 << 18), report
    assert "f64" not in entry, "a TPU has no float64"


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("torch.where(hot, log_p.expm1(), p)", "torch.where(hot, -log_p.expm1(), p)", "odd sizes"),
        ("loss = loss * row_weight.to(acc)", "loss = loss * 1.0", "row weights, none"),
        ("live = (target != ignore_index) & (target >= 0)", "live = target >= 0", "ignore_index 0, int32"),
        ("d.exp().sum(-1).log()", "d.exp().sum(-1)", "one row of two classes"),
    ],
)
@support.xla
def test_planted_bugs(device, old, new, case):
    support.assert_caught(cases, "riftco.tpu.cross_entropy", old, new, case, device="xla")
