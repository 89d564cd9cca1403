"""Gated linear units beyond the conformance cases: gradcheck, contract, strides, edges, planted bugs."""

import pytest
import support
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import geglu, swiglu
from riftco.kernels.swiglu import cases, op

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
FUNCTIONS = {
    "silu": swiglu,
    "gelu": geglu,
    "gelu_tanh": lambda gate, up, **kw: geglu(gate, up, approximate="tanh", **kw),
}
THEIRS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name):
    gate, up = (2 * torch.randn(4, 5, dtype=torch.float64) for _ in range(2))
    gate[0, 0], gate[0, 1] = 40.0, -40.0
    inputs = gate.requires_grad_(), up.requires_grad_()
    assert torch.autograd.gradcheck(FUNCTIONS[name], inputs)
    assert torch.autograd.gradgradcheck(lambda a, b: FUNCTIONS[name](a, b, impl="spec"), inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_is_pytorch(name, device):
    gate, up = (3 * torch.randn(6, 40, device=device.torch_device, requires_grad=True) for _ in range(2))
    with device.use():
        ours, theirs = FUNCTIONS[name](gate, up), THEIRS[name](gate) * up
        torch.testing.assert_close(ours, theirs)
        got = torch.autograd.grad(ours.square().sum(), (gate, up))
    torch.testing.assert_close(got, torch.autograd.grad(theirs.square().sum(), (gate, up)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in Triton's interpreter
def test_infinite_factors_are_pytorch_s(device):
    """silu is -0 in float32 wherever exp(-gate) overflows, so that an infinite up gives NaN there, and nowhere else."""
    gates = torch.tensor([-torch.inf, -1e30, -104.0, -90.0, -88.8, -88.7, -87.0, -1.0, -0.0, 0.0, 3.0, torch.inf])
    gate, up = (
        t.flatten() for t in torch.meshgrid(gates, torch.tensor([torch.inf, -torch.inf, 0.0, 1.0]), indexing="ij")
    )
    with device.use():
        got = swiglu(gate.to(device.torch_device), up.to(device.torch_device)).cpu()
    torch.testing.assert_close(got, F.silu(gate) * up, equal_nan=True)


@pytest.mark.parametrize("activation,theirs", [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu", "gelu")])
def test_module_is_transformers(activation, theirs):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(
        hidden_size=12, num_attention_heads=2, intermediate_size=20, mlp_bias=True, hidden_act=theirs
    )
    reference, ours = llama.LlamaMLP(config), nn.SwiGLU(12, 20, bias=True, activation=activation)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(3, 12)
    torch.testing.assert_close(ours(x), reference(x))


def test_opcheck():
    gate, up, d = torch.randn(3, 4, 10), torch.randn(4, 3, 10).transpose(0, 1), torch.randn(3, 4, 10)
    for activation in ("silu", "gelu", "gelu_tanh"):
        torch.library.opcheck(op.fwd, (gate, up.bfloat16(), activation))
        for need in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(op.bwd, (d, gate, up, activation, *need))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()

    def halves(x):
        return swiglu(x[:, :33], x[:, 33:])

    fn = torch.compile(halves, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for n in (7, 12):
            fused = torch.randn(n, 66, device=device.torch_device)
            results = []
            for f in (halves, fn):
                x = fused.clone().requires_grad_()
                y = f(x)
                y.square().sum().backward()
                results.append((y, x.grad))
            assert all(torch.equal(p, q) for p, q in zip(*results))


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Halves of one fused tensor, transposes, expanded rows and offsets give what contiguous copies give."""
    fused = torch.randn(4, 9, 40, device=device.torch_device)
    views = {
        "halves of a fused tensor": (fused[..., :20], fused[..., 20:]),
        "interleaved": (fused[..., ::2], fused[..., 1::2]),
        "transposed": (fused.transpose(0, 1), fused.transpose(0, 1).contiguous()),
        "expanded": (fused[:1].expand(4, 9, 40), fused[..., :1].expand(4, 9, 40)),
        "four dimensions": (fused.view(2, 2, 9, 40)[:, :, 1::2], fused.view(2, 2, 9, 40)[:, :, :-1:2]),
        "vectors": (fused[1, 2, 3:], fused[0, 1, :-3]),
    }
    with device.use():
        for name, pair in views.items():
            d = torch.randn(pair[0].shape[::-1], device=fused.device).permute(*range(pair[0].dim() - 1, -1, -1))
            results = []
            for inputs in (pair, [t.contiguous() for t in pair]):
                inputs = [t.detach().requires_grad_() for t in inputs]
                y = swiglu(*inputs)
                assert y.is_contiguous()
                results.append((y, *torch.autograd.grad(y, inputs, d)))
            for p, q in zip(*results):  # not bit-equal on the CPU, where torch's vector exp differs from its scalar one
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_tensor_is_not_copied(device, monkeypatch):
    fused = torch.randn(4, 9, 40, device=device.torch_device, requires_grad=True)
    copied = []
    contiguous = torch.Tensor.contiguous

    def spy(t, *args, **kwargs):
        if t.shape[-1] == 20 and not t.is_contiguous():
            copied.append(t.stride())
        return contiguous(t, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "contiguous", spy)
    with device.use():
        swiglu(fused[..., :20], fused[..., 20:]).square().sum().backward()
    assert not copied


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_huge_inputs(name, device):
    """|gate| up to 1e30: the activation is 0 or the identity and nothing becomes NaN on the way."""
    values = [-1e30, -1e12, -200.0, 0.0, 200.0, 1e12, 1e30]
    gate = torch.tensor(values, device=device.torch_device, requires_grad=True)
    up = torch.full_like(gate, 2.0, requires_grad=True)
    with device.use():
        y = FUNCTIONS[name](gate, up)
        d_gate, d_up = torch.autograd.grad(y.sum(), (gate, up))
    positive = gate.detach().clamp(min=0)
    torch.testing.assert_close(y.detach(), 2 * positive, atol=1e-30, rtol=1e-6)
    torch.testing.assert_close(d_up, positive, atol=1e-30, rtol=1e-6)
    want = torch.tensor([0.0, 0, 0, 1, 2, 2, 2], device=gate.device)
    torch.testing.assert_close(d_gate, want, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_edges_and_mixed_dtypes(device):
    d = device.torch_device
    with device.use(), support.poisoned():
        for shape in ((0, 5), (3, 0)):
            pair = [torch.randn(shape, device=d, requires_grad=True) for _ in range(2)]
            y = swiglu(*pair)
            grads = torch.autograd.grad(y.sum(), pair)
            assert [t.shape for t in (y, *grads)] == [torch.Size(shape)] * 3
        gate = torch.randn(3, 5, device=d, dtype=torch.bfloat16, requires_grad=True)
        up = torch.randn(3, 5, device=d, requires_grad=True)
        y = swiglu(gate, up)
        torch.testing.assert_close(y, F.silu(gate.float()) * up)
        grads = torch.autograd.grad(y.sum(), (gate, up))
        assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_is_asked_for(device, monkeypatch):
    asked = []
    real = op.bwd
    monkeypatch.setattr(op, "bwd", lambda *a: asked.append(real(*a)) or asked[-1])
    gate, up = (torch.randn(5, 24, device=device.torch_device) for _ in range(2))
    with device.use():
        for need in ((True, False), (False, True), (True, True)):
            a, b = gate.clone().requires_grad_(need[0]), up.clone().requires_grad_(need[1])
            swiglu(a, b).square().sum().backward()
            assert tuple(t.numel() > 0 for t in asked[-1]) == need
            assert (a.grad is not None, b.grad is not None) == need
    assert torch.equal(asked[0][0], asked[2][0]) and torch.equal(asked[1][1], asked[2][1])


def test_modes():
    gate, up = torch.randn(4, 20), torch.randn(4, 20)
    with torch.inference_mode():
        a = swiglu(gate, up)
    with torch.no_grad():
        y = swiglu(gate.requires_grad_(), up)
        assert torch.equal(y, a) and not y.requires_grad
    gate = gate.detach()
    grad = torch.func.grad(lambda t: swiglu(t, up).sum())(gate)
    torch.testing.assert_close(grad, torch.func.grad(lambda t: (F.silu(t) * up).sum())(gate))
    with torch.autocast("cpu", torch.bfloat16):
        assert swiglu(gate, up).dtype == (F.silu(gate) * up).dtype
    gate.requires_grad_()
    (g,) = torch.autograd.grad(swiglu(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    recomputed = torch.utils.checkpoint.checkpoint(swiglu, gate, up, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(recomputed.sum(), gate)[0], g.detach())


def test_errors():
    gate, up = torch.randn(4, 20), torch.randn(4, 20)
    for bad, text in [
        (lambda: swiglu(gate, up[:, :3]), r"\(4, 20\) and \(4, 3\)"),
        (lambda: swiglu(gate.long(), up), "floating; got torch.int64"),
        (lambda: geglu(gate, up.to("meta")), "up on meta"),
        (lambda: geglu(gate, up, approximate="erf"), "'erf'"),
        (lambda: swiglu(gate, up, impl="fast"), "'fast'"),
        (lambda: nn.SwiGLU(4, 8, activation="relu"), "'relu'"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("slope = s + g * s * _sigmoid(-g)", "slope = s + g * s", "odd sizes"),
        ("d * u.to(tl.float32) * slope", "d * slope", "odd sizes"),
        ("near = tl.minimum(tl.maximum(g, -30.0), 30.0)", "near = g * 0.99", "gelu_tanh"),
        ("* (1.0 + 0.134145 * near * near)", "", "gelu_tanh"),
        ("* 0.3989422804014327", "", "gelu"),
        ("% blocks) * BLOCK +", "% blocks) * (BLOCK + 1) +", "several stretches of a row"),
    ],
)
def test_planted_bugs(old, new, case):
    if "% blocks" in old:
        old, new = f"{old} tl.arange(0, BLOCK)\n    d =", f"{new} tl.arange(0, BLOCK)\n    d ="
    support.assert_caught(cases, "riftco.kernels.swiglu.cuda", old, new, case)
