"""DoRA: PEFT's arithmetic on plain and NF4 bases, the norm in blocks of rows, gradients, rows, modules."""

import copy
import pickle
import warnings

import pytest
import support
import torch
import torch.nn.functional as F
from test_lora_linear import Wrapped, leaves

from riftco import nn
from riftco.functional import dequantize_nf4, lora_linear, quantize_nf4
from riftco.kernels.lora_linear import dora

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
M, N, C, R = 7, 10, 40, 3


def tensors(device="cpu", dtype=torch.float32, nf4=False, adapter=None):
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    w = normal(N, C) / 6
    weight = quantize_nf4(w.float()).to(device) if nf4 else w.to(device, dtype)
    x, bias = (t.to(device, dtype) for t in (normal(M, C), normal(N)))
    a, b, m = (t.to(device, adapter or dtype) for t in (normal(R, C) / 6, normal(N, R), normal(N).abs() + 0.5))
    return x, weight, a, b, m, bias


def meaning(x, w, a, b, m, bias, scale, rows=None):
    """The formula itself, in float64."""
    norm = torch.linalg.vector_norm((w + scale * b @ a).detach(), dim=1)
    y = x @ w.t() + (0 if bias is None else bias)
    whole = m / norm * (x @ w.t() + scale * x @ a.t() @ b.t()) + (0 if bias is None else bias)
    return whole if rows is None else y.index_copy(0, rows, whole[rows])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("listed", [None, [5, 0, 2]])
@pytest.mark.parametrize("biased", [False, True])
def test_meaning(device, nf4, dtype, listed, biased):
    x, weight, a, b, m, bias = tensors(device.torch_device, dtype, nf4, torch.float32)
    rows = None if listed is None else torch.tensor(listed, device=x.device)
    dense = dequantize_nf4(weight, dtype) if nf4 else weight
    ours, exact = leaves(x, a, b, m, bias), leaves(*(t.double().cpu() for t in (x, a, b, m, bias)))
    with device.use():
        y = lora_linear(
            ours[0], weight, *ours[1:3], scale=0.7, magnitude=ours[3], bias=ours[4] if biased else None, rows=rows
        )
        up = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        y.backward(up)
    z = meaning(
        exact[0], dense.double().cpu(), *exact[1:4], exact[4] if biased else None, 0.7,
        None if rows is None else rows.cpu(),
    )  # fmt: skip
    z.backward(up.double().cpu())
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip((y, *(t.grad for t in ours[: 4 + biased])), (z, *(t.grad for t in exact[: 4 + biased]))):
        assert (got.double().cpu() - want).abs().max() <= near * want.abs().max()


@pytest.mark.parametrize("rows", [None, [5, 0, 2]])
@pytest.mark.parametrize("nf4", [False, True])
def test_gradcheck(rows, nf4):
    """The norm is a constant: it is fixed where the numbers are shifted."""
    x, weight, a, b, m, bias = tensors(dtype=torch.float64, nf4=nf4)
    rows = None if rows is None else torch.tensor(rows)
    norm = dora.weight_norm(weight, a, b, 0.7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("riftco.kernels.lora_linear.op.weight_norm", lambda *_: norm)
        assert torch.autograd.gradcheck(
            lambda x, a, b, m, c: lora_linear(x, weight, a, b, scale=0.7, magnitude=m, bias=c, rows=rows),
            leaves(x, a, b, m, bias),
            fast_mode=True,
        )
        assert torch.autograd.gradgradcheck(
            lambda m, b: lora_linear(x, weight, a, b, scale=0.7, magnitude=m, impl="spec"), leaves(m, b), fast_mode=True
        )


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_in_blocks_of_rows(nf4, dtype, monkeypatch):
    """Few rows of W at a time, in float32: never a whole 16-bit W; blocks of the format may span rows."""
    _, weight, a, b, _, _ = tensors(dtype=dtype, nf4=nf4, adapter=torch.float32)
    dense = dequantize_nf4(weight, torch.float64) if nf4 else weight.double()
    exact = torch.linalg.vector_norm(dense + 0.7 * b.double() @ a.double(), dim=1)
    heights = []
    whole = torch.addmm

    def addmm(block, *args, **options):
        assert block.dtype == torch.float32
        heights.append(block.shape[0])
        return whole(block, *args, **options)

    monkeypatch.setattr(torch, "addmm", addmm)
    torch.testing.assert_close(dora.weight_norm(weight, a, b, 0.7).double(), exact, rtol=1e-6, atol=1e-6)
    monkeypatch.setattr(dora, "SCRATCH_BYTES", 3 * C * 4)
    torch.testing.assert_close(dora.weight_norm(weight, a, b, 0.7).double(), exact, rtol=1e-6, atol=1e-6)
    assert heights == [N, 3, 3, 3, 1]


@pytest.mark.parametrize("base", ["float32", "bfloat16", "nf4"])
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "dora and rslora"])
def test_outputs_and_gradients_are_pefts(base, kind):
    """On torch.nn.Linear and on bitsandbytes' Linear4bit: outputs, gradients of x and of every adapter parameter."""
    peft = pytest.importorskip("peft")
    bnb = pytest.importorskip("bitsandbytes")
    dtype = torch.bfloat16 if base == "bfloat16" else torch.float32
    torch.manual_seed(1)
    width = 64  # whole blocks
    if base == "nf4":
        theirs_base = bnb.nn.Linear4bit(width, N, quant_type="nf4", compute_dtype=torch.float32)
        theirs_base.load_state_dict({"weight": torch.randn(N, width) / 8, "bias": torch.randn(N)})
        theirs_base = theirs_base.to("cpu")
        theirs_base(torch.zeros(1, width))  # quantises
        ours_base = nn.NF4Linear.from_bnb(theirs_base)
    else:
        theirs_base = torch.nn.Linear(width, N).to(dtype)
        ours_base = copy.deepcopy(theirs_base)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["proj"], use_dora="dora" in kind, use_rslora="rslora" in kind
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(Wrapped(theirs_base), config)
    ours = Wrapped(nn.LoRALinear(ours_base, 4, 8, use_rslora="rslora" in kind, use_dora="dora" in kind))
    start = peft.get_peft_model_state_dict(theirs)
    names = {k.removeprefix("base_model.model."): v for k, v in start.items()}
    if "dora" in kind:  # both start from the norm of the base's rows
        want = names["proj.lora_magnitude_vector"].float()
        torch.testing.assert_close(ours.proj.lora_magnitude_vector.detach(), want, rtol=1e-2, atol=1e-3)
    changed = {k: v + 0.3 * torch.randn_like(v) for k, v in names.items()}
    left = ours.load_state_dict(changed, strict=False)
    assert not left.unexpected_keys and all("base_layer" in k for k in left.missing_keys)
    peft.set_peft_model_state_dict(theirs, {f"base_model.model.{k}": v for k, v in changed.items()})

    xa, xb = leaves(*[torch.randn(2, 5, width).to(dtype)] * 2)
    ya, yb = ours(xa), theirs(xb)
    d = torch.randn(2, 5, N)
    ya.backward(d.to(ya.dtype))
    yb.backward(d.to(yb.dtype))
    near = dict(rtol=3e-2, atol=1e-1) if base == "bfloat16" else dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ya.float(), yb.float(), **near)
    torch.testing.assert_close(xa.grad.float(), xb.grad.float(), **near)
    layer = theirs.base_model.model.proj
    pairs = [
        (ours.proj.lora_A.weight, layer.lora_A.default.weight),
        (ours.proj.lora_B.weight, layer.lora_B.default.weight),
    ]
    if "dora" in kind:
        pairs.append((ours.proj.lora_magnitude_vector, layer.lora_magnitude_vector.default.weight))
    for got, want in pairs:
        size = want.grad.abs().max()
        assert (got.grad - want.grad).abs().max() <= (2e-2 if base == "bfloat16" else 1e-5) * size


@pytest.mark.parametrize("nf4", [False, True])
def test_module(nf4):
    linear = torch.nn.Linear(C, N)
    layer = nn.LoRALinear(nn.NF4Linear.from_linear(linear) if nf4 else linear, 4, 8, use_dora=True)
    x = torch.randn(3, C)
    torch.testing.assert_close(layer(x), layer.base_layer(x))  # gain 1 to start with
    torch.nn.init.normal_(layer.lora_B.weight)
    own = {k for k in layer.state_dict() if not k.startswith("base_layer")}
    assert own == {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"}
    assert {n for n, p in layer.named_parameters() if p.requires_grad} == own
    fresh = nn.LoRALinear(nn.NF4Linear(C, N, bias=True) if nf4 else torch.nn.Linear(C, N), 4, 8, use_dora=True)
    fresh.load_state_dict(layer.state_dict(), strict=True)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
        assert torch.equal(again(x), layer(x)) and type(again) is nn.LoRALinear
    rows = torch.tensor([2])
    assert torch.equal(layer(x, rows)[:2], layer.base_layer(x)[:2])
    torch.testing.assert_close(layer(x, rows)[2], layer(x)[2])
    assert not torch.allclose(layer(x)[2], layer.base_layer(x)[2])
    assert "use_dora=True" in repr(layer)
    plain = nn.LoRALinear(torch.nn.Linear(C, N), 4, 8)
    assert set(plain.state_dict()) == {"base_layer.weight", "base_layer.bias", "lora_A.weight", "lora_B.weight"}


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device):
    """No rows, one vector, strided z, a gain of 0, poisoned buffers."""
    x, weight, a, b, m, bias = tensors(device.torch_device)
    m[0] = 0.0
    with device.use(), support.poisoned():
        one = leaves(x[:0], a, b, m, bias)
        y = lora_linear(one[0], weight, *one[1:3], scale=1.0, magnitude=one[3], bias=one[4])
        y.sum().backward()
        assert y.shape == (0, N) and all(t.grad.shape == t.shape and not t.grad.any() for t in one)
        one, two = leaves(x[0], a, b, m, bias), leaves(x[:1], a, b, m, bias)
        for ts in (one, two):
            y = lora_linear(ts[0], weight, *ts[1:3], scale=1.0, magnitude=ts[3], bias=ts[4])
            y.sum().backward()
        for s, t in zip(one, two):
            torch.testing.assert_close(s.grad, t.grad.view(s.shape))
        assert one[3].grad[0] != 0  # a magnitude of 0 still learns
        z = torch.randn(4, 6, 2 * N, device=x.device)[:, 1::2, ::2]
        gain = torch.rand(N, device=x.device)
        up = torch.ones((), device=x.device).expand(z.shape)
        got, want = leaves(z, gain), leaves(z, gain)
        zs = z.detach().requires_grad_()
        dora.rescale(zs, got[1], bias).backward(up)
        (want[0] * want[1] + bias).backward(up)
        torch.testing.assert_close(zs.grad, want[0].grad)
        torch.testing.assert_close(got[1].grad, want[1].grad)
    with pytest.raises(ValueError, match=r"magnitude must be floating \(10,\)"):
        lora_linear(x, weight, a, b, scale=1.0, magnitude=m[:3])


def test_opcheck_and_modes():
    x, weight, a, b, m, bias = tensors()
    for needs in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(dora.bwd, (torch.randn(M, N), torch.randn(M, N), m, *needs))
    torch.library.opcheck(dora.fwd, (torch.randn(M, N), m, bias))
    torch.library.opcheck(dora.fwd, (torch.randn(M, N), m, None))
    torch._dynamo.reset()
    layer = nn.LoRALinear(nn.NF4Linear.from_linear(torch.nn.Linear(C, N)), 3, 6, use_dora=True)
    torch.nn.init.normal_(layer.lora_B.weight)
    fn = torch.compile(layer, fullgraph=True, backend="aot_eager")
    parameters = [p for p in layer.parameters() if p.requires_grad]
    results = []
    for run in (layer, fn):
        (x1,) = leaves(x)
        y = run(x1)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x1, *parameters])])
    for s, t in zip(*results):
        torch.testing.assert_close(s, t)
    (m1,) = leaves(m)
    (g,) = torch.autograd.grad(
        lora_linear(x, weight, a, b, scale=1.0, magnitude=m1).square().sum(), m1, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        y = lora_linear(x, weight, a, b, scale=1.0, magnitude=m1, bias=bias)
        y.sum().backward()
    assert y.dtype == torch.bfloat16 and m1.grad.dtype == torch.float32
    with torch.inference_mode():
        y = lora_linear(x, weight, a, b, scale=0.7, magnitude=m, bias=bias)
    want = meaning(*(t.double() for t in (x, weight, a, b, m, bias)), 0.7)
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
    assert F.linear(x, weight, bias).shape == y.shape
