"""lora_linear beyond the conformance cases: PEFT's arithmetic, rows, dropout, saved tensors, contract."""

import warnings

import pytest
import support
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import dequantize_nf4, lora_linear, nf4_linear, quantize_nf4
from riftco.kernels.lora_linear import cpu, dropout, op, spec

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
KERNELS = support.device_params(("cpu", "cpu-triton", "cuda"))
M, N, C, R = 12, 10, 24, 3


def tensors(device="cpu", dtype=torch.float32, adapter=None, nf4=False, rank=R):
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    x, w, bias = normal(M, C), normal(N, C) / 5, normal(N)
    a, b = normal(rank, C) / 5, normal(N, rank)
    weight = quantize_nf4(w.float()).to(device) if nf4 else w.to(device, dtype)
    adapter = adapter or dtype
    return x.to(device, dtype), weight, a.to(device, adapter), b.to(device, adapter), bias.to(device, dtype)


def leaves(*ts):
    return [t.detach().clone().requires_grad_() for t in ts]


@pytest.mark.parametrize("nf4", [False, True])
def test_the_bias_learns_from_a_single_vector(nf4):
    x, w, a, b, bias = tensors(nf4=nf4)
    bias.requires_grad_()
    d_y = torch.randn(N)
    lora_linear(x[0], w, a, b, scale=2.0, bias=bias).backward(d_y)
    assert torch.equal(bias.grad, d_y)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("rows", [None, [5, 0, 7]])
@pytest.mark.parametrize("nf4", [False, True])
def test_gradcheck(rank, rows, nf4):
    x, w, a, b, bias = tensors(dtype=torch.float64, nf4=nf4, rank=rank)
    rows = None if rows is None else torch.tensor(rows)
    wanted = leaves(x, a, b, bias) + ([] if nf4 else leaves(w))

    def fn(x, a, b, bias, *dense):
        return lora_linear(x.view(3, 4, C), dense[0] if dense else w, a, b, scale=0.7, bias=bias, rows=rows)

    assert torch.autograd.gradcheck(fn, wanted, fast_mode=True)


def test_gradcheck_with_a_fixed_mask():
    x, w, a, b, bias = tensors(dtype=torch.float64)

    def fn(x, w, a, b, bias):
        torch.manual_seed(3)
        return lora_linear(x, w, a, b, scale=0.7, bias=bias, dropout_p=0.4)

    assert torch.autograd.gradcheck(fn, leaves(x, w, a, b, bias), fast_mode=True)


class Wrapped(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.proj = linear

    def forward(self, x):
        return self.proj(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_arithmetic_is_pefts(dtype, rslora, autocast):
    """Same parameters, same names, same outputs and gradients; float32 adapters on a bfloat16 base included."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    linear = torch.nn.Linear(C, N).to(dtype)
    ours = Wrapped(nn.LoRALinear(linear, 4, 8, use_rslora=rslora))
    torch.nn.init.normal_(ours.proj.lora_B.weight)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["proj"], use_rslora=rslora)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(Wrapped(torch.nn.Linear(C, N).to(dtype)), config)
    theirs.base_model.model.proj.base_layer.load_state_dict(linear.state_dict())
    adapter = {f"base_model.model.{k}": v for k, v in ours.state_dict().items() if "lora_" in k}
    assert set(adapter) == set(peft.get_peft_model_state_dict(theirs))
    peft.set_peft_model_state_dict(theirs, adapter)
    assert theirs.base_model.model.proj.lora_A.default.weight.dtype == torch.float32
    xa, xb = leaves(*[torch.randn(2, 5, C).to(dtype)] * 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ya, yb = ours(xa), theirs(xb)
    assert ya.dtype == (torch.bfloat16 if autocast else dtype)
    d = torch.randn(2, 5, N)
    ya.backward(d.to(ya.dtype))
    yb.backward(d.to(yb.dtype))
    low = autocast or dtype == torch.bfloat16
    tolerance = dict(rtol=3e-2, atol=6e-2) if low else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ya.float(), yb.float(), **tolerance)
    torch.testing.assert_close(xa.grad.float(), xb.grad.float(), **tolerance)
    for name in ("lora_A", "lora_B"):
        got, want = (
            getattr(ours.proj, name).weight.grad,
            getattr(theirs.base_model.model.proj, name).default.weight.grad,
        )
        assert got.dtype == want.dtype == torch.float32
        torch.testing.assert_close(got, want, **(dict(rtol=3e-2, atol=0.2) if low else tolerance))


@pytest.mark.parametrize("device", DEVICES)
def test_float32_adapters_multiply_in_float32(device):
    """On bfloat16 rows the adapter's part must not be rounded to bfloat16 inside (its rule; PEFT's too)."""
    x, _, a, b, _ = tensors(device.torch_device, torch.bfloat16, torch.float32)
    w = torch.zeros(N, C, dtype=torch.bfloat16, device=x.device)
    a1, b1 = leaves(a, b)
    d_y = torch.ones(M, N, dtype=torch.bfloat16, device=x.device)
    with device.use():
        y = lora_linear(x, w, a1, b1, scale=2.0)
        y.backward(d_y)
    exact = 2.0 * (x.double() @ a.double().t() @ b.double().t())
    assert y.dtype == torch.bfloat16 and a1.grad.dtype == torch.float32
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()
    d_a = 2.0 * (d_y.double() @ b.double()).t() @ x.double()
    d_b = 2.0 * d_y.double().t() @ (x.double() @ a.double().t())
    for got, want in ((a1.grad, d_a), (b1.grad, d_b)):  # two bfloat16 terms of 8 bits each; one would be off by 2^-8
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2**-13 * float(want.abs().max()))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, under the interpreter
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("listed", [[3, 11, 0], []])
def test_other_rows_keep_the_bytes_of_the_base(device, dtype, nf4, listed):
    """A8.1, A8.2: -0.0, inf and NaN included, even where A and B hold inf and NaN."""
    x, w, a, b, _ = tensors(device.torch_device, dtype, nf4=nf4)
    x[1] = torch.inf
    x[2] = torch.nan
    x[4] = 0.0
    bias = torch.full((N,), -0.0, dtype=dtype, device=x.device)
    a[0, 0], b[0, 0] = torch.inf, torch.nan
    rows = torch.tensor(listed, dtype=torch.int64, device=x.device)
    others = [m for m in range(M) if m not in listed]
    with device.use():
        base = nf4_linear(x, w, bias) if nf4 else F.linear(x, w, bias)
        a1, x1 = leaves(a, x)
        y = lora_linear(x1, w, a1, b, scale=1.0, bias=bias, rows=rows)
        (d_base,) = torch.autograd.grad(
            nf4_linear(x1, w, bias) if nf4 else F.linear(x1, w, bias), x1, torch.ones_like(y), retain_graph=True
        )
        (d_x,) = torch.autograd.grad(y, x1, torch.ones_like(y))
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(y[others].view(integer), base[others].view(integer))
    assert torch.equal(d_x[others].view(integer), d_base[others].view(integer))
    assert base[1].isnan().any() or base[1].isinf().any()
    for m in listed:
        assert not torch.equal(y[m], base[m])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_the_whole_on_a_subset(device):
    x, w, a, b, bias = tensors(device.torch_device)
    rows = torch.tensor([9, 2, 5], device=x.device)
    with device.use():
        one, two = leaves(x, a, b), leaves(x, a, b)
        y = lora_linear(one[0].view(3, 4, C), w, *one[1:], scale=0.5, bias=bias, rows=rows).view(M, N)
        z = lora_linear(two[0][rows], w, *two[1:], scale=0.5, bias=bias)
        torch.testing.assert_close(y[rows], z)
        y[rows].square().sum().backward()
        z.square().sum().backward()
    for s, t in zip(one, two):
        torch.testing.assert_close(s.grad, t.grad)


@pytest.mark.parametrize("device", DEVICES)
def test_dropout(device):
    """The seed fixes the mask; the mean is kept; evaluation has none; only the adapter's input is dropped."""
    x, w, a, b, _ = tensors(device.torch_device)

    def run(seed, **options):
        torch.manual_seed(seed)
        one = leaves(x, a, b)
        y = lora_linear(one[0], w, *one[1:], scale=0.5, **options)
        y.square().sum().backward()
        return [y.detach(), *(t.grad for t in one)]

    with device.use():
        first, again, other = run(1, dropout_p=0.5), run(1, dropout_p=0.5), run(2, dropout_p=0.5)
        assert all(torch.equal(s, t) for s, t in zip(first, again)) and not torch.equal(first[0], other[0])
        off, never = run(1, dropout_p=0.5, training=False), run(1)
        assert all(torch.equal(s, t) for s, t in zip(off, never))
        everything = run(1, dropout_p=1.0)
        assert torch.equal(everything[0], F.linear(x, w)) and not everything[2].any() and not everything[3].any()
        torch.manual_seed(1)
        seed = torch.randint(1 << 62, (1,), device=x.device)
        keep = dropout.keep(seed, torch.arange(M, device=x.device), C, 0.5)
        torch.testing.assert_close(first[0], F.linear(x, w) + 0.5 * ((x * keep * 2) @ a.t() @ b.t()))
        mean = torch.stack([run(s, dropout_p=0.3)[0] for s in range(200 if device.name == "cpu" else 3)]).mean(0)
        if device.name == "cpu":
            spread = (mean - never[0]).norm() / (never[0] - F.linear(x, w)).norm()
            assert spread < 0.15
        grads = []
        for hidden in (torch.nan, 0.0):  # what the adapter does not see has no part in its gradient
            torch.manual_seed(1)
            (a1,) = leaves(a)
            y = lora_linear(x.masked_fill(~keep, hidden), w, a1, b, scale=0.5, dropout_p=0.5)
            grads += torch.autograd.grad(y, a1, torch.ones_like(y))
        assert torch.equal(*grads) and grads[0].isfinite().all()


@pytest.mark.parametrize("nf4", [False, True])
def test_saved_tensors(nf4):
    """x once, where A or W learns; x A^T where B learns; nothing is made for what is frozen."""
    x, w, a, b, bias = tensors(nf4=nf4)
    base = {w.codes.data_ptr(), w.scale.data_ptr()} if nf4 else {w.data_ptr()}

    def kept(**learn):
        pointers = []
        args = [t.detach().requires_grad_(learn.get(n, False)) for n, t in (("x", x), ("a", a), ("b", b))]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: pointers.append(t.data_ptr()) or t, lambda t: t):
            y = lora_linear(args[0], w, *args[1:], scale=1.0, bias=bias)
        y.sum().backward()
        assert all((t.grad is not None) == t.requires_grad for t in args)
        assert len(pointers) == len(set(pointers))
        return set(pointers) - base - {a.data_ptr(), b.data_ptr()}

    assert kept(x=True) == set()
    assert kept(a=True) == {x.data_ptr()}
    both = kept(a=True, b=True, x=True)
    assert len(both) == 2 and x.data_ptr() in both
    assert len(kept(b=True)) == 1 and x.data_ptr() not in kept(b=True)


def test_frozen_gradients_are_empty():
    x, w, a, b, _ = tensors()
    xa = x @ a.t()
    needs = (False, [False], True, False)
    for launcher in (cpu.backward, spec.backward):
        d_y, base, dropped = [torch.randn(M, N)], (["dense"], [w], []), (None, 0.0, None)
        d_x, (d_w,), flat = launcher(d_y, x, *base, [a], [b], xa, [1.0], *dropped, *needs)
        assert [t.numel() for t in (d_x, d_w, flat)] == [0, 0, R * C]


def test_opcheck():
    for nf4 in (False, True):
        x, w, a, b, bias = tensors(nf4=nf4)
        base = (["nf4_linear"] * 2, [w.codes, w.scale] * 2, [N, C, 64] * 2) if nf4 else (["dense"] * 2, [w, w], [])
        seed = torch.tensor([5])
        for seeds, rows in ((None, None), (seed, torch.tensor([1, 5]))):
            args, drop = ([a, a[:2]], [b, b[:, :2]]), (seeds, 0.5, rows)
            torch.library.opcheck(op.fwd, (x, *base, [bias, None], *args, [0.5, 2.0], *drop))
            xa = op.fwd(x, *base, [bias, None], *args, [0.5, 2.0], *drop)[1]
            for needs in ((True, [not nf4, False], True, True), (False, [False, False], False, True)):
                d_ys = [torch.randn(M, N), torch.randn(M, N)]
                torch.library.opcheck(op.bwd, (d_ys, x, *base, *args, xa, [0.5, 2.0], *drop, *needs))


@pytest.mark.parametrize("dynamic,nf4", [(False, True), (True, False)])
@pytest.mark.parametrize("device", KERNELS)
def test_fullgraph(device, dynamic, nf4):
    torch._dynamo.reset()
    linear = torch.nn.Linear(C, N)
    layer = nn.LoRALinear(nn.NF4Linear.from_linear(linear) if nf4 else linear, 3, 6).to(device.torch_device)
    torch.nn.init.normal_(layer.lora_B.weight)
    fn = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    parameters = [layer.lora_A.weight, layer.lora_B.weight]
    with device.use():
        for n in (5, 9):
            (x,) = leaves(torch.randn(n, C, device=device.torch_device))
            ya, yb = layer(x), fn(x)
            ga = torch.autograd.grad(ya.square().sum(), [x, *parameters])
            gb = torch.autograd.grad(yb.square().sum(), [x, *parameters])
            assert torch.equal(ya, yb) and all(torch.equal(s, t) for s, t in zip(ga, gb))


@pytest.mark.parametrize("device", KERNELS)
def test_strides(device):
    x, w, a, b, bias = tensors(device.torch_device)
    wide = torch.randn(4, 6, 2 * C, device=x.device)
    adapters = {
        "plain": (a, b),
        "transposed": (a.t().contiguous().t(), b.t().contiguous().t()),
        "sliced": (torch.cat((a, a), 1)[:, :C], torch.cat((b, b), 1)[:, R:]),
    }
    views = {
        "columns": wide[..., 3 : 3 + C],
        "every second": wide[..., ::2],
        "transposed": wide[..., :C].transpose(0, 1),
        "expanded": wide[:1, :, :C].expand(3, 6, C),
        "vector": wide[0, 0, :C],
        "four dimensions": wide.reshape(2, 2, 6, 2 * C)[:, :, 1::2, :C],
    }
    with device.use():
        for name, view in views.items():
            for kind, (a1, b1) in adapters.items():
                if name != "columns" and kind != "plain":
                    continue
                one, two = leaves(view.contiguous(), a, b), [t.detach().requires_grad_() for t in (view, a1, b1)]
                y, z = (lora_linear(t[0], w, t[1], t[2], scale=0.5, bias=bias) for t in (one, two))
                torch.testing.assert_close(y, z, msg=f"{name} {kind}")
                upstream = torch.randn(*y.shape[:-1], 2 * N, device=x.device)[..., ::2]
                for d in (upstream, torch.ones((), device=x.device).expand_as(y)):
                    for s, t in zip(
                        torch.autograd.grad(y, one, d.contiguous(), retain_graph=True),
                        torch.autograd.grad(z, two, d, retain_graph=True),
                    ):
                        torch.testing.assert_close(s, t, msg=f"{name} {kind}")


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device):
    """No rows, of which none can be listed; no output features; poisoned buffers."""
    x, w, a, b, bias = tensors(device.torch_device)
    with device.use(), support.poisoned():
        one = leaves(x[:0], a, b, bias)
        y = lora_linear(one[0], w, one[1], one[2], scale=1.0, bias=one[3])
        y.sum().backward()
        assert y.shape == (0, N) and all(t.grad.shape == t.shape and not t.grad.any() for t in one)
        with pytest.raises(IndexError):
            lora_linear(x[:0], w, a, b, scale=1.0, rows=torch.zeros(1, dtype=torch.int64, device=x.device))
        one = leaves(x, a, b[:0])
        y = lora_linear(one[0], w[:0], one[1], one[2], scale=1.0)
        y.sum().backward()
        assert y.shape == (M, 0) and all(t.grad.shape == t.shape and not t.grad.any() for t in one)


@pytest.mark.parametrize("device", KERNELS)
def test_repeatable(device):
    x, w, a, b, _ = tensors(device.torch_device)
    one = leaves(x, a, b)
    with device.use():
        y = lora_linear(one[0], w, *one[1:], scale=0.5)
        first = torch.autograd.grad(y.square().sum(), one, retain_graph=True)
        kept = [t.clone() for t in first]
        second = torch.autograd.grad(y.square().sum(), one)
    assert all(torch.equal(s, t) and torch.equal(s, u) for s, t, u in zip(kept, second, first))


def test_blocks_of_rows_on_the_cpu(monkeypatch):
    x, w, a, b, _ = tensors(dtype=torch.bfloat16, adapter=torch.float32)
    rows = torch.tensor([4, 1, 10, 7, 6])

    def run(rows):
        torch.manual_seed(0)
        one = leaves(x, a, b)
        y = lora_linear(one[0], w, *one[1:], scale=0.5, dropout_p=0.2, rows=rows)
        y.float().square().sum().backward()
        return [y.detach(), *(t.grad for t in one)]

    whole = run(None), run(rows)
    monkeypatch.setattr(cpu, "BLOCK_ROWS", 2)
    for before, after in zip(whole, (run(None), run(rows))):
        for s, t in zip(before, after):
            torch.testing.assert_close(s, t, rtol=1e-2 if s.dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_modes():
    x, w, a, b, bias = tensors()
    with torch.inference_mode():
        y = lora_linear(x, w, a, b, scale=0.5, bias=bias)
    with torch.no_grad():
        assert torch.equal(lora_linear(x.requires_grad_(), w, a, b, scale=0.5, bias=bias), y)
    fn = torch.func.grad(lambda t: lora_linear(x.detach(), w, t, b, scale=0.5).square().sum())
    plain = torch.func.grad(lambda t: (x.detach() @ w.t() + 0.5 * x.detach() @ t.t() @ b.t()).square().sum())
    torch.testing.assert_close(fn(a), plain(a))
    one = leaves(*(t.double() for t in (x, w, a, b)))
    (g,) = torch.autograd.grad(lora_linear(*one, scale=0.5).square().sum(), one[2], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    assert torch.autograd.gradgradcheck(
        lambda a, b: lora_linear(one[0].detach(), one[1].detach(), a, b, scale=0.5, impl="spec"), one[2:]
    )
    torch.manual_seed(0)
    (a1,) = leaves(a)

    def run(t):
        return lora_linear(t, w, a1, b, scale=0.5, dropout_p=0.5)

    (want,) = torch.autograd.grad(run(x).square().sum(), a1)
    torch.manual_seed(0)
    again = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    (got,) = torch.autograd.grad(again.square().sum(), a1)
    assert torch.equal(got, want)


def test_module():
    linear = torch.nn.Linear(C, N)
    layer = nn.LoRALinear(linear, 4, 8, dropout=0.1)
    assert layer.scale == 2.0 and nn.LoRALinear(linear, 4, 8, use_rslora=True).scale == 4.0
    assert {k for k, p in layer.named_parameters() if p.requires_grad} == {"lora_A.weight", "lora_B.weight"}
    x = torch.randn(3, C)
    assert torch.equal(layer(x), linear(x)) and not layer.lora_B.weight.any()
    bound = 1 / C**0.5
    assert bound * 0.8 < layer.lora_A.weight.abs().max() <= bound
    quantised = nn.LoRALinear(nn.NF4Linear.from_linear(linear), 4, 8).bfloat16()
    torch.nn.init.normal_(quantised.lora_B.weight)
    y = quantised(x.bfloat16())
    base = x.bfloat16() @ dequantize_nf4(quantised.base_layer.weight, torch.bfloat16).t() + linear.bias.bfloat16()
    delta = 2 * x.bfloat16() @ quantised.lora_A.weight.t() @ quantised.lora_B.weight.t()
    torch.testing.assert_close(y, base + delta, rtol=3e-2, atol=3e-2)
    assert "rank=4, alpha=8, dropout=0.1" in repr(layer)


def test_errors(monkeypatch):
    x, w, a, b, bias = tensors()

    def call(x=x, w=w, a=a, b=b, **options):
        return lora_linear(x, w, a, b, scale=1.0, **options)

    for bad, text in [
        (lambda: call(x=x[:, :5]), r"\[..., 24\]; got torch.float32 \(12, 5\)"),
        (lambda: call(w=w[0]), r"weight must be \[N, C\]"),
        (lambda: call(w=w.double()), "x's dtype torch.float32; got torch.float64"),
        (lambda: call(a=a[:, :5]), r"lora_a must be floating \[R, 24\]"),
        (lambda: call(b=b[:, :2]), r"lora_b must be floating \(10, 3\)"),
        (lambda: call(a=torch.ones(257, C), b=torch.ones(N, 257)), "1..256; got 257"),
        (lambda: call(bias=bias[:3]), r"bias must be floating \(10,\)"),
        (lambda: call(dropout_p=1.5), "got 1.5"),
        (lambda: call(rows=torch.tensor([1], dtype=torch.int32)), "rows must be int64"),
        (lambda: call(impl="fast"), "'fast'"),
        (lambda: call(a=a.to("meta")), "lora_a on meta"),
        (lambda: nn.LoRALinear(torch.nn.Linear(8, 8), rank=0, alpha=1.0), "LoRALinear: rank must be 1 or more; got 0"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    with pytest.raises(IndexError, match="rows must be distinct"):
        call(rows=torch.tensor([1, 1]))
    with pytest.raises(IndexError, match=r"\[0, 12\); got 0..12"):
        call(rows=torch.tensor([0, 12]))
