"""NF4 beyond the conformance cases: state_dicts, saved tensors, memory, contract, planted bugs."""

import copy
import io
import json
import pickle

import pytest
import support
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from riftco import nn
from riftco.functional import NF4Weight, dequantize_nf4, nf4_linear, quantize_nf4
from riftco.kernels import _frozen
from riftco.kernels.nf4 import cases, cpu, op
from riftco.kernels.nf4.quantize import dynamic_map

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))


def test_the_grid_of_the_second_level_is_not_the_nearest_entry():
    """What the CPU's rule costs: a few in a thousand absmax differ from the nearest entry, and none by much."""
    w = torch.randn(2000, 640)
    q = quantize_nf4(w)
    exact = quantize_nf4(w, double_quant=False).absmax
    centred = (exact - q.nested.offset) / q.nested.absmax.repeat_interleave(256)[: exact.numel()]
    nearest = (centred.unsqueeze(1) - dynamic_map()).abs().argmin(1)
    off = nearest != q.absmax
    assert 0 < off.float().mean() < 0.01
    assert (dynamic_map()[nearest] - dynamic_map()[q.absmax.int()])[off].abs().max() < 0.015


def test_state_dict_inside_a_model_and_assign():
    source = torch.nn.Sequential(torch.nn.Linear(8, 8), nn.NF4Linear.from_linear(torch.nn.Linear(8, 6)))
    target = torch.nn.Sequential(torch.nn.Linear(8, 8), nn.NF4Linear(8, 6, bias=True))
    state = source.state_dict()
    target.load_state_dict(state)
    x = torch.randn(2, 8)
    assert torch.equal(source(x), target(x))
    state["1.weight"].fill_(0)
    assert not torch.equal(source(x), target(x))  # a copy was loaded
    empty = torch.nn.Sequential(torch.nn.Linear(8, 8), nn.NF4Linear(8, 6, bias=True)).to("meta")
    empty.load_state_dict(target.state_dict(), assign=True)
    assert torch.equal(empty(x), target(x))


def test_state_dict_refusals():
    layer = nn.NF4Linear(8, 6)
    good = layer.state_dict()
    for change, text in [
        (lambda s: s.pop("weight"), 'Missing key.*"weight"'),
        (lambda s: s.pop("weight.absmax"), "lacks absmax"),
        (lambda s: s.pop("weight.nested_absmax"), "lacks nested_absmax"),
        (lambda s: s.update(extra=torch.ones(1)), 'Unexpected key.*"extra"'),
        (lambda s: s.update({"weight.foo": torch.ones(1)}), 'Unexpected key.*"weight.foo"'),
        (lambda s: s.update({"weight.quant_map": torch.ones(16)}), "not the NF4 table"),
        (lambda s: s.update(weight=good["weight"][:-1]), "24 values"),
    ]:
        state = dict(good)
        change(state)
        with pytest.raises(RuntimeError, match=text):
            layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"weight is torch\.float32, not NF4"):
        layer.load_state_dict({"weight": torch.randn(6, 8)})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        nn.NF4Linear(6, 8).load_state_dict(good)


@pytest.mark.parametrize("double_quant", [False, True])
def test_moves_casts_and_copies_keep_the_bits(double_quant):
    layer = nn.NF4Linear.from_linear(torch.nn.Linear(40, 6), double_quant=double_quant)
    want = {k: v.clone() for k, v in layer.state_dict().items() if k != "bias"}
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    loaded = nn.NF4Linear(40, 6, bias=True)
    loaded.load_state_dict(torch.load(saved, weights_only=True))
    for name, other in {
        "half": copy.deepcopy(layer).half(),
        "bfloat16 by to": copy.deepcopy(layer).to("cpu", torch.bfloat16),
        "double": copy.deepcopy(layer).double(),
        "pickle": pickle.loads(pickle.dumps(layer)),
        "weights_only": loaded,
    }.items():
        got = other.state_dict()
        assert all(torch.equal(got[k], want[k]) and got[k].dtype == want[k].dtype for k in want), name
        x = torch.randn(2, 40).to(other.bias.dtype)
        assert other(x).dtype == x.dtype and other.weight.scale.dtype == torch.float32
    assert layer.half().bias.dtype == torch.float16
    meta = copy.deepcopy(layer).to("meta")
    assert meta.weight.device.type == "meta" and meta.weight.scale.device.type == "meta"
    assert meta.to_empty(device="cpu").weight.codes.device.type == "cpu"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_saved_tensors(device, bias):
    """Only the codes and the absmax are kept, and nothing at all when no gradient flows to x."""
    q = quantize_nf4(torch.randn(6, 40)).to(device.torch_device)
    x = torch.randn(5, 40, device=device.torch_device, requires_grad=True)
    b = torch.randn(6, device=device.torch_device, requires_grad=True) if bias else None
    kept = []
    with device.use(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        nf4_linear(x, q, b)
        assert sorted(t.data_ptr() for t in kept) == sorted((q.codes.data_ptr(), q.scale.data_ptr()))
        kept.clear()
        if bias:
            y = nf4_linear(x.detach(), q, b)
            assert not kept
            y.sum().backward()
            assert torch.equal(b.grad, torch.full_like(b, 5.0))


class Largest(TorchDispatchMode):
    """The largest tensor that an operator gave, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K,block_size", [(256, 64), (200, 64), (99, 32)])
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_on_the_cpu(monkeypatch, dtype, K, block_size, bias):
    """A scratch much smaller than the weight gives the same numbers, in blocks of rows and of columns."""
    N = 70
    q = quantize_nf4(torch.randn(N, K), block_size=block_size)
    x, d_y = torch.randn(3, K).to(dtype), torch.randn(3, N).to(dtype)
    b = torch.randn(N).to(dtype) if bias else None
    args = (q.codes, q.scale)
    sizes = (N, K, block_size)
    y, d_x = cpu.forward(x, *args, b, *sizes), cpu.backward(d_y, *args, *sizes)
    monkeypatch.setattr(_frozen, "FEW_BYTES", 11 * K * dtype.itemsize)
    monkeypatch.setattr(cpu, "STEP", 2048)
    with Largest() as mode:
        y_blocks, d_x_blocks = cpu.forward(x, *args, b, *sizes), cpu.backward(d_y, *args, *sizes)
    assert mode.bytes < 0.6 * N * K * 4
    tolerance = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else dict(rtol=2**-7, atol=2e-2)
    torch.testing.assert_close(y_blocks, y, **tolerance)
    torch.testing.assert_close(d_x_blocks, d_x, **tolerance)


def test_a_large_weight_is_never_whole_on_the_cpu():
    N, K = 6000, 2048
    codes = torch.randint(0, 256, (N * K // 2, 1), dtype=torch.uint8)
    absmax = torch.rand(N * K // 64)
    with Largest() as mode:
        cpu.forward(torch.randn(1, K), codes, absmax, None, N, K, 64)
        cpu.backward(torch.randn(1, N), codes, absmax, N, K, 64)
    assert mode.bytes <= 17 << 20 < N * K * 4


def test_gradcheck():
    q = quantize_nf4(torch.randn(5, 7))
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    b = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: nf4_linear(x, q, b), (x, b))
    assert torch.autograd.gradcheck(lambda x: nf4_linear(x, q), (x,))


def test_opcheck():
    q = quantize_nf4(torch.randn(6, 40))
    x = torch.randn(2, 3, 40)
    for b in (None, torch.randn(6)):
        torch.library.opcheck(op.fwd, (x, q.codes, q.scale, b, 6, 40, 64))
    torch.library.opcheck(op.bwd, (torch.randn(2, 3, 6), q.codes, q.scale, 6, 40, 64))
    torch.library.opcheck(op.dequantize, (q.codes, q.scale, 240, 64, torch.bfloat16))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()
    layer = nn.NF4Linear.from_linear(torch.nn.Linear(40, 6)).to(device.torch_device)
    fn = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for n in (5, 9):
            x = torch.randn(n, 40, device=device.torch_device)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            ya, yb = layer(a), fn(b)
            (ga,) = torch.autograd.grad(ya.square().sum(), a)
            (gb,) = torch.autograd.grad(yb.square().sum(), b)
            assert torch.equal(ya, yb) and torch.equal(ga, gb)
        dequantize = torch.compile(dequantize_nf4, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert torch.equal(dequantize(layer.weight, torch.float32), dequantize_nf4(layer.weight, torch.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    q = quantize_nf4(torch.randn(6, 20)).to(device.torch_device)
    wide = torch.randn(4, 9, 40, device=device.torch_device)
    views = {
        "columns": wide[..., 3:23],
        "every second column": wide[..., ::2],
        "transposed": wide[..., :20].transpose(0, 1),
        "last dimension strided": torch.randn(20, 7, device=device.torch_device).t(),
        "expanded": wide[:1, :, :20].expand(3, 9, 20),
        "a vector": wide[0, 0, :20],
        "four dimensions": wide.reshape(2, 2, 9, 40)[:, :, 1::2, :20],
    }
    with device.use():
        for name, x in views.items():
            a, b = x.detach().requires_grad_(), x.detach().contiguous().requires_grad_()
            ya, yb = nf4_linear(a, q), nf4_linear(b, q)
            torch.testing.assert_close(ya, yb, msg=name)
            upstream = torch.randn(*ya.shape[:-1], 12, device=x.device)[..., ::2]
            (ga,) = torch.autograd.grad(ya, a, upstream)
            (gb,) = torch.autograd.grad(yb, b, upstream.contiguous())
            torch.testing.assert_close(ga, gb, msg=name)
            assert ya.shape == (*x.shape[:-1], 6)
            (ga,) = torch.autograd.grad(nf4_linear(a, q).sum(), a)  # an expanded gradient
            torch.testing.assert_close(ga, dequantize_nf4(q, ga.dtype).sum(0).expand_as(ga), msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device):
    """Zero rows, zero features either way, NaN in one row only."""
    d = device.torch_device
    with device.use(), support.poisoned():
        for M, N, K in [(0, 6, 20), (3, 0, 20), (3, 6, 0)]:
            q = quantize_nf4(torch.empty(N, K, device=d))
            x = torch.randn(M, K, device=d, requires_grad=True)
            b = torch.randn(N, device=d)
            y = nf4_linear(x, q, b)
            y.sum().backward()
            assert torch.equal(y, b.expand(M, N)) if K == 0 else y.numel() == 0
            assert x.grad.shape == (M, K) and not x.grad.any()
            assert dequantize_nf4(q, torch.float32).shape == (N, K)
        q = quantize_nf4(torch.randn(6, 20)).to(d)
        x = torch.randn(4, 20, device=d)
        x[2] = torch.nan
        assert nf4_linear(x, q).isnan().any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_and_repeatable(device):
    q = quantize_nf4(torch.randn(70, 130)).to(device.torch_device)
    x = torch.randn(33, 130, device=device.torch_device, requires_grad=True)
    with device.use():
        y = nf4_linear(x, q)
        (first,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        kept = first.clone()
        (second,) = torch.autograd.grad(y.square().sum(), x)
        assert torch.equal(kept, second) and torch.equal(first, kept) and torch.equal(y, nf4_linear(x, q))


def test_modes():
    q = quantize_nf4(torch.randn(6, 20))
    x = torch.randn(4, 20)
    with torch.inference_mode():
        a = nf4_linear(x, q)
        inside = nn.NF4Linear(20, 6)
        inside(x)
    with torch.no_grad():
        assert torch.equal(nf4_linear(x, q), a) and not nf4_linear(x.requires_grad_(), q).requires_grad
    w = dequantize_nf4(q, torch.float32)
    grad = torch.func.grad(lambda t: nf4_linear(t, q).square().sum())(x.detach())
    torch.testing.assert_close(grad, torch.func.grad(lambda t: (t @ w.t()).square().sum())(x.detach()))
    bias = torch.randn(6, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = nf4_linear(x, q, bias)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, torch.nn.functional.linear(x, w, bias), rtol=2**-6, atol=2**-6)
    y.sum().backward()
    assert bias.grad.dtype == torch.float32 and x.grad.dtype == torch.float32
    d = x.detach().double().requires_grad_()
    (g,) = torch.autograd.grad(nf4_linear(d, q).square().sum(), d, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    assert torch.autograd.gradgradcheck(lambda t: nf4_linear(t, q, impl="spec").pow(3), d)
    bf16 = torch.utils.checkpoint.checkpoint(
        lambda t: nf4_linear(t, q), x.detach().requires_grad_(), use_reentrant=False
    )
    bf16.sum().backward()


def test_a_bias_in_float32_under_bfloat16_rows():
    q = quantize_nf4(torch.randn(6, 20))
    b = torch.randn(6, requires_grad=True)
    y = nf4_linear(torch.randn(300, 20).bfloat16(), q, b)
    y.backward(torch.full_like(y, 1.0))
    assert y.dtype == torch.bfloat16 and torch.equal(b.grad, torch.full((6,), 300.0))


def test_the_bias_learns_from_a_single_vector():
    x, q, bias = torch.randn(70), quantize_nf4(torch.randn(5, 70)), torch.zeros(5, requires_grad=True)
    d_y = torch.randn(5)
    nf4_linear(x, q, bias).backward(d_y)
    assert torch.equal(bias.grad, d_y)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "nn"}, "dtype must be 'float32' or"),
        ({"quant_type": "fp4"}, "quant_type must be 'nf4'; got 'fp4'"),
        ({"shape": None}, "lacks shape"),
        ({"nested_blocksize": 1}, "4 absmax in blocks of 1 do not fit 1 nested_absmax"),
        ([], "must hold a JSON object; got list"),
    ],
)
def test_a_quant_state_that_cannot_be_meant(change, says):
    state = nn.NF4Linear(64, 4).state_dict()
    key = "weight.quant_state.bitsandbytes__nf4"
    info = json.loads(bytes(state[key].tolist()))
    info = {k: v for k, v in {**info, **change}.items() if v is not None} if change else change
    state[key] = torch.tensor(list(json.dumps(info).encode()), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=says):
        nn.NF4Linear(64, 4).load_state_dict(state)


def test_from_linear():
    linear = torch.nn.Linear(20, 6).bfloat16().eval()
    layer = nn.NF4Linear.from_linear(linear)
    assert layer.bias is linear.bias and not layer.training and layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight.codes, quantize_nf4(linear.weight).codes)
    x = torch.randn(3, 20)
    assert not nn.NF4Linear(20, 6)(x).any()
    assert "block_size=64, double_quant=True" in repr(layer)
    assert layer.weight.nbytes() == 60 + 2 + 4 + 1024


def test_errors():
    w = torch.randn(6, 20)
    q, x = quantize_nf4(w), torch.randn(4, 20)
    for bad, text in [
        (lambda: quantize_nf4(w.double()), "float64"),
        (lambda: quantize_nf4(w, block_size=48), "got 48"),
        (lambda: nf4_linear(x, w), "NF4Weight.*got Tensor"),
        (lambda: nf4_linear(x[:, :19], q), r"\[..., 20\]; got torch.float32 \(4, 19\)"),
        (lambda: nf4_linear(x.long(), q), "floating"),
        (lambda: nf4_linear(x, q, torch.ones(5)), r"\(6,\); got torch.float32 \(5,\)"),
        (lambda: nf4_linear(x, q, impl="fast"), "'fast'"),
        (lambda: nf4_linear(x, quantize_nf4(torch.randn(2, 3, 20))), r"\(2, 3, 20\)"),
        (lambda: nf4_linear(x.to("meta"), q), "x on meta"),
        (lambda: dequantize_nf4(q, torch.int32), "int32"),
        (lambda: NF4Weight(q.codes, q.absmax, (6, 20)), "absmax.*must be torch.float32"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()


@pytest.mark.parametrize(
    "old,new",
    [
        ("values[full * block_size :].mul_(scale[full])", "pass"),
        ("mul_(scale[:full].unsqueeze(1))", "mul_(scale[:full].unsqueeze(1).flip(0))"),
        ("BYTES >> 4], TABLE[BYTES & 15]", "BYTES & 15], TABLE[BYTES >> 4]"),
    ],
)
def test_planted_bugs_on_the_cpu(old, new):
    support.assert_caught(cases, "riftco.kernels.nf4.cpu", old, new, "blocks across rows", device="cpu")
