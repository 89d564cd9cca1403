"""Layer normalisation beyond the conformance cases: gradcheck, contract, strides, edges, planted bugs."""

import pytest
import support
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import layer_norm
from riftco.kernels.layer_norm import cases, op

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))


def test_gradcheck():
    x, r = (torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(layer_norm, (x, w, b))
    assert torch.autograd.gradcheck(lambda a: layer_norm(a, None, b), x)
    assert torch.autograd.gradcheck(lambda *t: layer_norm(*t[:3], residual=t[3]), (x, w, b, r))
    assert torch.autograd.gradgradcheck(lambda *t: layer_norm(*t[:3], residual=t[3], impl="spec"), (x, w, b, r))


@pytest.mark.parametrize("over", [10, (6, 10)])
@pytest.mark.parametrize("eps,affine,bias", [(1e-5, True, True), (1e-3, True, False), (1e-5, False, True)])
def test_module_is_pytorchs(over, eps, affine, bias):
    support.assert_twin(nn.LayerNorm, torch.nn.LayerNorm, over, eps, affine, bias, inputs=(torch.randn(4, 6, 10),))


@pytest.mark.parametrize("over", [10, (6, 10)])
def test_module_with_a_residual(over):
    norm, x, residual = nn.LayerNorm(over), torch.randn(4, 6, 10), torch.randn(4, 6, 10)
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, norm(total))
    with pytest.raises(ValueError, match="must end in"):
        norm(torch.randn(4, 6, 11))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_is_pytorchs(device, dtype):
    """Mixed dtypes too: weights of float32 beside 16-bit rows, as mixed training has them."""
    x = torch.randn(9, 40, device=device.torch_device).to(dtype)
    w, b = torch.randn(40, device=x.device), torch.randn(40, device=x.device)
    ulp = torch.finfo(dtype).eps
    for wide in (torch.float32, dtype):
        with device.use():
            got = layer_norm(x, w.to(wide), b.to(wide))
        want = F.layer_norm(x.double(), (40,), w.to(wide).double(), b.to(wide).double())
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=2 * ulp, atol=8 * ulp)


def test_opcheck():
    x, w, b, d = torch.randn(4, 6, 9), torch.randn(9), torch.randn(9), torch.randn(4, 6, 9)
    for weight, bias, residual in ((None, None, None), (w, b, None), (w, None, d), (None, b, d.bfloat16())):
        mean, rstd = op.fwd(x, residual, weight, bias, 1e-5)[2:]
        torch.library.opcheck(op.fwd, (x.transpose(0, 1).contiguous().transpose(0, 1), residual, weight, bias, 1e-5))
        for need in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            torch.library.opcheck(op.bwd, (d, residual, x, weight, bias, mean, rstd, *need))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()

    def block(x, w, b, r):
        y, total = layer_norm(x, w, b, residual=r)
        return layer_norm(y, w) + total

    fn = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for n in (7, 12):
            tensors = [torch.randn(s, device=device.torch_device) for s in ((n, 3, 33), (33,), (33,), (3, n, 33))]
            results = []
            for f in (block, fn):
                x, w, b = (t.clone().requires_grad_() for t in tensors[:3])
                r = tensors[3].clone().transpose(0, 1).requires_grad_()
                y = f(x, w, b, r)
                results.append((y, *torch.autograd.grad(y.square().sum(), (x, w, b, r))))
            assert all(torch.equal(p, q) for p, q in zip(*results))


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Slices, transposes, expanded rows and offsets give what contiguous copies give, backward included."""
    wide = torch.randn(4, 9, 40, device=device.torch_device)
    views = {
        "half of a twice-wide tensor": wide[..., 20:],
        "rows of a twice-wide tensor": wide.view(4, 9, 2, 20)[:, :, 1],
        "transposed": wide.transpose(0, 1),
        "column stride": wide.movedim(0, -1),
        "expanded": wide[:1].expand(3, 9, 40),
        "four dimensions": wide.view(2, 2, 9, 40)[:, :, 1::2],
        "a vector": wide[1, 2, 3:],
    }
    with device.use():
        for name, x in views.items():
            w, b = torch.randn(2, 2 * x.shape[-1], device=x.device)[:, ::2]
            d, residual = (
                torch.randn(x.shape[::-1], device=x.device).permute(*range(x.dim() - 1, -1, -1)) for _ in range(2)
            )
            results = []
            for t, r in ((x.detach(), residual), (x.detach().contiguous(), residual.contiguous())):
                leaves = [u.detach().requires_grad_() for u in (t, w.clone(), b.clone(), r)]
                y, total = layer_norm(*leaves[:3], residual=leaves[3])
                assert y.is_contiguous() and total.is_contiguous()
                results.append((y, *torch.autograd.grad((y, total), leaves, (d, d.abs()))))
            for p, q in zip(*results):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-4, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device):
    """No rows, no columns, constant rows, half precision near its largest values, a mean that dwarfs the deviation."""
    d = device.torch_device
    with device.use(), support.poisoned():
        for shape in ((0, 5), (3, 0)):
            x = torch.randn(shape, device=d, requires_grad=True)
            w, b = (torch.randn(shape[-1], device=d, requires_grad=True) for _ in range(2))
            layer_norm(x, w, b).sum().backward()
            assert x.grad.shape == shape and torch.equal(w.grad, torch.zeros_like(w))
        x = torch.full((2, 6), 3.0, device=d, requires_grad=True)
        y = layer_norm(x, eps=1e-4)
        y.sum().backward()
        assert torch.equal(y, torch.zeros_like(y))
        torch.testing.assert_close(x.grad, torch.zeros_like(x), atol=1e-4, rtol=0)
        big = torch.tensor([[60000.0, -60000.0] * 4], dtype=torch.float16, device=d)
        torch.testing.assert_close(layer_norm(big), big / 60000)
        x = torch.randn(3, 300, device=d)  # a variance taken as the mean of squares less the squared mean fails here
        torch.testing.assert_close(layer_norm(x + 1000.0), layer_norm(x), atol=1e-3, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_asked_for(device, monkeypatch):
    """Frozen inputs get no gradient and cost none; repeat runs are bit-equal."""
    asked = []
    real = op.bwd
    monkeypatch.setattr(op, "bwd", lambda *a: asked.append(real(*a)) or asked[-1])
    tensors = [torch.randn(s, device=device.torch_device) for s in ((50, 24), (24,), (24,))]
    with device.use():
        for need in ((True, False, False), (False, True, False), (False, False, True), (True,) * 3, (True,) * 3):
            leaves = [t.clone().requires_grad_(n) for t, n in zip(tensors, need)]
            layer_norm(*leaves).square().sum().backward()
            assert tuple(t.numel() > 0 for t in asked[-1]) == need
            assert tuple(t.grad is not None for t in leaves) == need
    assert all(torch.equal(p, q) for p, q in zip(asked[-1], asked[-2]))


def test_modes():
    x, w = torch.randn(4, 20), torch.randn(20)
    with torch.inference_mode():
        a = layer_norm(x, w)
    with torch.no_grad():
        y = layer_norm(x.requires_grad_(), w)
        assert torch.equal(y, a) and not y.requires_grad
    x = x.detach()
    grad = torch.func.grad(lambda t: layer_norm(t, w).square().sum())(x)
    torch.testing.assert_close(grad, torch.func.grad(lambda t: F.layer_norm(t, (20,), w).square().sum())(x))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer_norm(x.to(dtype), w).dtype == F.layer_norm(x.to(dtype), (20,), w.to(dtype)).dtype
    x.requires_grad_()
    (g,) = torch.autograd.grad(layer_norm(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    recomputed = torch.utils.checkpoint.checkpoint(layer_norm, x, w, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(recomputed.square().sum(), x)[0], g.detach())


@pytest.mark.gpu
def test_autocast_on_the_gpu():
    x, w = torch.randn(4, 20, device="cuda", dtype=torch.bfloat16), torch.randn(20, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = layer_norm(x, w), F.layer_norm(x, (20,), w)
    torch.testing.assert_close(ours, theirs)


def test_errors():
    x, w = torch.randn(4, 20), torch.randn(20)
    for bad, text in [
        (lambda: layer_norm(x, w[:3]), r"weight must be floating \[20\]; got torch.float32 \(3,\)"),
        (lambda: layer_norm(x, w, w[:3]), r"bias must be floating \[20\]"),
        (lambda: layer_norm(x.long(), w), "floating"),
        (lambda: layer_norm(x, w, w.double()), "float64 bias"),
        (lambda: layer_norm(x, w, residual=x[:1]), r"residual must be floating \[4, 20\]"),
        (lambda: layer_norm(x, w.to("meta")), "weight on meta"),
        (lambda: layer_norm(x, w, impl="fast"), "'fast'"),
        (lambda: layer_norm(x, w, eps=-1e-5), "eps must be finite and at least 0; got -1e-05"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("z = tl.where(c < C, z - mean[:, None], 0.0)", "z = z - mean[:, None]", "odd sizes"),
        ("z = z + b.to(", "z = z - b.to(", "odd sizes"),
        ("d_x = d_x - (tl.sum(g, 1) / C)[:, None]", "d_x = d_x", "odd sizes"),
        ("bias_sum += g", "bias_sum = g", "many short rows"),
        ("part += tl.num_programs(0)", "part += 0 * tl.num_programs(0)", "many short rows"),
        ("z = z - tl.load(mean_ptr + n", "z = z + tl.load(mean_ptr + n", "mean far from zero"),
    ],
)
def test_planted_bugs(old, new, case):
    support.assert_caught(cases, "riftco.kernels._norm.rows", old, new, case)


@pytest.mark.parametrize(
    "old,new",
    [
        ("total += _load", "total = _load"),
        ("sums += g", "sums = g"),
        ("product - sum_g)", "product)"),
        ("bias_sum += g.to", "bias_sum -= g.to"),
        ("part += tl.num_programs(1)", "part += 0 * tl.num_programs(1)"),
    ],
)
def test_planted_bugs_of_long_rows(old, new):
    support.assert_caught(cases, "riftco.kernels._norm.long", old, new, "more columns than registers hold")
