"""RMS normalisation beyond the conformance cases: gradcheck, contract, strides, edges, planted bugs."""

import pytest
import support
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import rms_norm
from riftco.kernels.rms_norm import cases, op

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gradcheck(offset):
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    w = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, offset=offset), (x, w))
    assert torch.autograd.gradcheck(rms_norm, x)
    assert torch.autograd.gradgradcheck(lambda a, b: rms_norm(a, b, offset=offset, impl="spec"), (x, w))


@pytest.mark.parametrize("over", [10, (6, 10)])
@pytest.mark.parametrize("eps,affine", [(None, True), (1e-3, True), (None, False)])
def test_module_is_pytorchs(over, eps, affine):
    support.assert_twin(nn.RMSNorm, torch.nn.RMSNorm, over, eps, affine, inputs=(torch.randn(4, 6, 10),))
    assert repr(nn.RMSNorm(over, eps, affine)) == repr(torch.nn.RMSNorm(over, eps, affine))


@pytest.mark.parametrize("over", [10, (6, 10)])
def test_module_with_a_residual(over):
    norm, x, residual = nn.RMSNorm(over), torch.randn(4, 6, 10), torch.randn(4, 6, 10)
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual) and torch.equal(y, norm(total))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtype,wide", [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)]
)
def test_residual_is_an_addition_and_a_norm(device, dtype, wide):
    """Bit-equal to the two steps forward; whichever output and input take part in the backward."""
    x = torch.randn(5, 3, 24, device=device.torch_device, dtype=dtype)
    r = torch.randn(5, 3, 48, device=x.device, dtype=wide)[..., ::2]
    w = torch.randn(24, device=x.device, dtype=dtype)
    close = dict(rtol=1e-5, atol=1e-5) if wide == dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    with device.use(), support.poisoned():
        for use in ((True, True), (True, False), (False, True)):
            for need in ((True, True), (True, False), (False, True)):
                results = []
                for fused in (True, False):
                    a, b, c = (t.detach().clone().requires_grad_(n) for t, n in zip((x, r, w), (*need, use[0])))
                    if fused:
                        y, total = rms_norm(a, c, residual=b)
                    else:
                        total = a + b
                        y = rms_norm(total, c).to(dtype)
                    assert y.dtype == dtype and total.dtype == torch.promote_types(dtype, wide)
                    loss = sum(
                        (t.float() * torch.arange(24, device=t.device)).sum() for t, u in zip((y, total), use) if u
                    )
                    leaves = [t for t in (a, b, c) if t.requires_grad]
                    results.append((y, total, *torch.autograd.grad(loss, leaves)))
                assert torch.equal(results[0][1], results[1][1])
                for got, want in zip(*results, strict=True):
                    assert got.dtype == want.dtype
                    torch.testing.assert_close(got / want.abs().max(), want / want.abs().max(), **close)


def test_module_of_gemma():
    transformers = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    theirs, ours = transformers.Gemma3RMSNorm(12), nn.RMSNorm(12, 1e-6, offset=1.0)
    assert torch.equal(theirs.weight, ours.weight)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 12)
    torch.testing.assert_close(ours(x), theirs(x))
    # both round once, at the end, but take the reciprocal root apart: at most one unit in the last place
    torch.testing.assert_close(ours(x.bfloat16()), theirs(x.bfloat16()), rtol=2**-8, atol=0)
    with pytest.raises(ValueError, match=r"end in \(12,\)"):
        ours(torch.randn(3, 13))


def test_opcheck():
    x, w, d = torch.randn(4, 6, 9), torch.randn(9), torch.randn(4, 6, 9)
    for weight in (None, w):
        rstd = op.fwd(x, None, weight, 1e-6, 0.0)[-1]
        for residual in (None, d.bfloat16()):
            torch.library.opcheck(op.fwd, (x.transpose(0, 1).contiguous().transpose(0, 1), residual, weight, 1e-6, 1.0))
        for need in ((True, True), (True, False), (False, True)):
            for d_total in (None, d):
                torch.library.opcheck(op.bwd, (d, d_total, x, weight, rstd, 0.0, *need))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()

    def twice(x, w):
        return rms_norm(rms_norm(x, w), w)

    fn = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for n in (7, 12):
            x = torch.randn(n, 3, 33, device=device.torch_device)
            w = torch.randn(33, device=device.torch_device)
            results = []
            for f in (twice, fn):
                a, b = x.clone().transpose(0, 1).requires_grad_(), w.clone().requires_grad_()
                y = f(a, b)
                y.square().sum().backward()
                results.append((y, a.grad, b.grad))
            assert all(torch.equal(p, q) for p, q in zip(*results))


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Slices, transposes, expanded rows and offsets give what a contiguous copy gives, backward included."""
    wide = torch.randn(4, 9, 40, device=device.torch_device)
    views = {
        "half of a twice-wide tensor": wide[..., 20:],
        "rows of a twice-wide tensor": wide.view(4, 9, 2, 20)[:, :, 1],
        "transposed": wide.transpose(0, 1),
        "column stride": wide.movedim(0, -1),
        "expanded": wide[:1].expand(3, 9, 40),
        "expanded columns": wide[..., :1].expand(4, 9, 8),
        "four dimensions": wide.view(2, 2, 9, 40)[:, :, 1::2],
        "a vector": wide[1, 2, 3:],
    }
    with device.use():
        for name, x in views.items():
            w = torch.randn(2 * x.shape[-1], device=x.device)[::2]
            d = torch.randn(x.shape[::-1], device=x.device).permute(*range(x.dim() - 1, -1, -1))
            results = []
            for t in (x.detach(), x.detach().contiguous()):
                a, b = t.requires_grad_(), w.clone().requires_grad_()
                y = rms_norm(a, b)
                assert y.is_contiguous()
                results.append((y, *torch.autograd.grad(y, (a, b), d)))
            for p, q in zip(*results):  # the order of torch's own sums on a CPU depends on the strides
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_rows_are_not_copied(device, monkeypatch):
    """The launcher gets by without a contiguous copy of a row view of a wider tensor, forward and backward."""
    x = torch.randn(4, 9, 2, 20, device=device.torch_device)[:, :, 1].requires_grad_()
    w = torch.randn(20, device=device.torch_device, requires_grad=True)
    copied = []
    contiguous = torch.Tensor.contiguous

    def spy(t, *args, **kwargs):
        if t.shape == x.shape and not t.is_contiguous():
            copied.append(t.stride())
        return contiguous(t, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "contiguous", spy)
    with device.use():
        rms_norm(x, w).square().sum().backward()
    assert not copied


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device):
    """No rows, no columns, a row of zeros, half precision near its largest values."""
    d = device.torch_device
    with device.use(), support.poisoned():
        for shape in ((0, 5), (3, 0)):
            x = torch.randn(shape, device=d, requires_grad=True)
            w = torch.randn(shape[-1], device=d, requires_grad=True)
            rms_norm(x, w).sum().backward()
            assert x.grad.shape == shape and torch.equal(w.grad, torch.zeros_like(w))
        x = torch.zeros(2, 6, device=d, requires_grad=True)
        y = rms_norm(x, eps=1e-4)
        y.sum().backward()
        assert torch.equal(y, torch.zeros_like(y))
        torch.testing.assert_close(x.grad, torch.full_like(x, 100.0))
        big = torch.full((2, 8), 60000.0, dtype=torch.float16, device=d)
        assert torch.equal(rms_norm(big), torch.ones_like(big))


@pytest.mark.parametrize("device", DEVICES)
def test_the_weights_gradient_is_a_float32_sum(device):
    """Ten thousand equal terms: a 16-bit running sum would stall at 256."""
    x = torch.ones(10_000, 2, dtype=torch.bfloat16, device=device.torch_device)
    w = torch.ones(2, dtype=torch.bfloat16, device=device.torch_device, requires_grad=True)
    with device.use():
        rms_norm(x, w, eps=0.0).sum().backward()
    torch.testing.assert_close(w.grad.float(), torch.full((2,), 10_000.0, device=w.device), rtol=2**-7, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_asked_for(device, monkeypatch):
    """A frozen weight or input gets no gradient and costs none; repeat runs are bit-equal."""
    asked = []
    real = op.bwd
    monkeypatch.setattr(op, "bwd", lambda *a: asked.append(real(*a)) or asked[-1])
    x, w = torch.randn(50, 24, device=device.torch_device), torch.randn(24, device=device.torch_device)
    with device.use():
        for need_x, need_w in ((True, False), (False, True), (True, True), (True, True)):
            a, b = x.clone().requires_grad_(need_x), w.clone().requires_grad_(need_w)
            rms_norm(a, b).square().sum().backward()
            assert [t.numel() > 0 for t in asked[-1]] == [need_x, need_w]
            assert (a.grad is not None, b.grad is not None) == (need_x, need_w)
    assert all(torch.equal(p, q) for p, q in zip(asked[-1], asked[-2]))


def test_modes():
    x, w = torch.randn(4, 20), torch.randn(20)
    with torch.inference_mode():
        a = rms_norm(x, w)
    with torch.no_grad():
        y = rms_norm(x.requires_grad_(), w)
        assert torch.equal(y, a) and not y.requires_grad
    x = x.detach()
    grad = torch.func.grad(lambda t: rms_norm(t, w).square().sum())(x)
    torch.testing.assert_close(grad, torch.func.grad(lambda t: F.rms_norm(t, (20,), w, 1e-6).square().sum())(x))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            assert rms_norm(x.to(dtype), w).dtype == F.rms_norm(x.to(dtype), (20,), w.to(dtype)).dtype
    x.requires_grad_()
    (g,) = torch.autograd.grad(rms_norm(x, w).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    recomputed = torch.utils.checkpoint.checkpoint(rms_norm, x, w, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(recomputed.sum(), x)[0], g.detach())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # PyTorch's own, of its own function
def test_autocast_on_the_gpu():
    x, w = torch.randn(4, 20, device="cuda", dtype=torch.bfloat16), torch.randn(20, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = rms_norm(x, w), F.rms_norm(x, (20,), w, 1e-6)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs.to(ours.dtype))


def test_errors():
    x, w = torch.randn(4, 20), torch.randn(20)
    for bad, text in [
        (lambda: rms_norm(x, w[:3]), r"floating \[20\]; got torch.float32 \(3,\)"),
        (lambda: rms_norm(x.long(), w), "floating"),
        (lambda: rms_norm(x, w.double()), "float64 weight"),
        (lambda: rms_norm(x, w.to("meta")), "weight on meta"),
        (lambda: rms_norm(x, w, impl="fast"), "'fast'"),
        (lambda: rms_norm(x, w, eps=-1e-5), "eps must be finite and at least 0"),
        (lambda: rms_norm(x, w, residual=x[:1]), r"residual must be floating \(4, 20\)"),
        (lambda: rms_norm(x, w, residual=x.double()), "float64 residual"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("tl.sum(z * z, 1) / C + eps", "tl.sum(z * z, 1) / C + 2 * eps", "odd sizes"),
        ("x.to(tl.float32) + r).to", "x.to(tl.float32) - r).to", "residual"),
        ("z = z * (w.to(", "z = z + (w.to(", "Gemma offset"),
        ("g * (w.to(tl.float32) + offset)", "g * w.to(tl.float32)", "Gemma offset"),
        ("d_x = g - z * (tl.sum(g * z, 1) / C)[:, None]", "d_x = g", "no weight"),
        ("weight_sum += g * z", "weight_sum = g * z", "many short rows"),
        (
            "tl.range(first, N, tl.num_programs(0) * ROWS,",
            "tl.range(first, N - ROWS, tl.num_programs(0) * ROWS,",
            "many short rows",
        ),
        ("d_x += tl.load(d_total_ptr", "d_x -= tl.load(d_total_ptr", "residual"),
    ],
)
def test_planted_bugs(old, new, case):
    support.assert_caught(cases, "riftco.kernels._norm.rows", old, new, case)


@pytest.mark.parametrize(
    "old,new,case",
    [
        (
            "squares += tl.where(c < C, z * z, 0.0)",
            "squares = tl.where(c < C, z * z, 0.0)",
            "more columns than registers hold",
        ),
        ("products += g * z", "products = g * z", "more columns than registers hold"),
        ("(start + tl.arange(0, ROWS) < rows_each)", "(start > 0)", "more columns than registers hold"),
        ("d_x += tl.load(t_row", "d_x -= tl.load(t_row", "residual, long rows"),
        ("x = (x.to(tl.float32) + r).to", "x = (x.to(tl.float32) - r).to", "residual, long rows"),
    ],
)
def test_planted_bugs_of_long_rows(old, new, case):
    support.assert_caught(cases, "riftco.kernels._norm.long", old, new, case)


def test_planted_bug_of_the_last_sum():
    old, new = "(p < parts)", "(p < parts - 1)"
    support.assert_caught(cases, "riftco.kernels._norm.launch", old, new, "many short rows")


@pytest.mark.parametrize("dtype,C", [("bfloat16", 4096), ("bfloat16", 8192), ("float32", 8192)])
def test_kernels_compile_into_the_smallest_shared_memory(dtype, C):
    """99 KiB, as GPUs of compute capability 8.6 and 8.9 have; no register is spilled in 16 bit."""
    pytest.importorskip("triton")
    kernels = support.compiled("compile_kernels.py", 80, "norms", dtype, C)
    assert {name for name, _, _ in kernels} == {"_norm_fwd", "_norm_bwd", "_add_parts"}
    for name, shared, spilled in kernels:
        assert int(shared) <= 99 * 1024, f"{name}: {shared}"
        assert dtype == "float32" or int(spilled) == 0, f"{name}: {spilled} bytes spilled"
