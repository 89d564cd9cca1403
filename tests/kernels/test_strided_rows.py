"""Contracts A5.1, A5.2, A5.6, A5.7: softmax's gradient and padding at the left on rows apart; what has a gradient."""

import pytest
import support
import torch
import torch.nn.functional as F

import riftco.functional as riftco
from riftco.kernels import _contract

DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))
TORCH_DEVICES = support.device_params(("cpu", "cuda"))


def views(device: str) -> dict[str, torch.Tensor]:
    """Rows that are whole but lie apart in one of the dimensions, or in all of them."""
    wide = torch.randn(3, 4, 5, 24, device=device)
    return {
        "contiguous": wide,
        "rows of a twice-wide tensor": wide.unflatten(-1, (2, 12))[..., 1, :],
        "dim 1": wide[:, :, ::2],
        "dim 2": wide[:, 1::2],
        "dim 3": wide[::2],
        "permuted": wide.permute(2, 0, 1, 3),
        "columns apart": wide.transpose(2, 3),
    }


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize("name", views("cpu"))
def test_softmax_backward(device, name):
    """PyTorch's softmax, on which the materialised attention stands: p * (d - sum(d * p)) whatever the strides."""
    x = views(device.torch_device)[name].requires_grad_()
    d = views(device.torch_device)[name]
    p = x.softmax(-1)
    (got,) = torch.autograd.grad(p, x, d)
    exact = x.detach().double().softmax(-1)
    want = exact * (d.double() - (d * exact).sum(-1, keepdim=True))
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", TORCH_DEVICES)
@pytest.mark.parametrize("name", views("cpu"))
@pytest.mark.parametrize("dim", range(4))
def test_left_padding(device, name, dim):
    """out[i] = x[i - pad] in one dimension; the gradient is what lies behind the padding."""
    x = views(device.torch_device)[name].requires_grad_()
    pad = [0, 0] * (3 - dim) + [2, 0]
    out = F.pad(x, pad)
    assert torch.equal(out.narrow(dim, 2, x.shape[dim]), x) and not out.narrow(dim, 0, 2).any()
    d = torch.randn_like(out)
    assert torch.equal(torch.autograd.grad(out, x, d)[0], d.narrow(dim, 2, x.shape[dim]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("impl", [None, "materialized"])
def test_attention_of_a_batch_padded_at_the_left(device, impl):
    """q, k, v are rows of one wider tensor; each sequence gives what it gives alone, padding no gradient."""
    pads, T, H, D = (0, 3, 6), 9, 2, 16
    fused = torch.randn(len(pads), T, H, 3 * D, device=device.torch_device).requires_grad_()
    bias = torch.zeros(len(pads), 1, T, T, device=fused.device)
    for b, pad in enumerate(pads):
        bias[b, :, :, :pad] = -torch.inf
    seed = torch.randn(len(pads), T, H, D, device=fused.device)
    with device.use():
        out = riftco.attention(*fused.chunk(3, -1), causal=True, bias=bias, impl=impl)
        (got,) = torch.autograd.grad(out, fused, seed)
        for b, pad in enumerate(pads):
            alone = fused.detach()[b : b + 1, pad:].contiguous().requires_grad_()
            want = riftco.attention(*alone.chunk(3, -1), causal=True, impl=impl)
            torch.testing.assert_close(out[b : b + 1, pad:], want, rtol=1e-4, atol=1e-5)
            (grad,) = torch.autograd.grad(want, alone, seed[b : b + 1, pad:])
            torch.testing.assert_close(got[b : b + 1, pad:], grad, rtol=1e-4, atol=1e-5)
            assert not out[b, :pad].any() and not got[b, :pad].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", views("cpu"))
def test_rms_norm_backward(device, name):
    x = views(device.torch_device)[name].requires_grad_()
    d, w = views(device.torch_device)[name], torch.randn(x.shape[-1], device=x.device, requires_grad=True)
    with device.use(), support.poisoned():
        got = torch.autograd.grad(riftco.rms_norm(x, w), (x, w), d)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    want = torch.autograd.grad(riftco.rms_norm(*exact, impl="spec"), exact, d.double())
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", views("cpu"))
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "swiglu"])
def test_the_second_operand_lies_as_it_likes(device, name, op, monkeypatch):
    """A sum's residual, a product's other factor and the upstream, transposed too: read by their strides, with no copy
    beforehand, and the bits of contiguous ones (on a GPU those of another order of a row's sums)."""
    on = device.torch_device
    other, d = views(on)[name], views(on)[name]
    x, w = torch.randn(other.shape, device=on), torch.randn(other.shape[-1], device=on)
    functions = {
        "rms_norm": lambda x, w, r: riftco.rms_norm(x, w, residual=r)[0],
        "layer_norm": lambda x, w, r: riftco.layer_norm(x, w, residual=r)[0],
        "swiglu": lambda x, w, r: riftco.swiglu(x, r),
    }
    copied, real = [], torch.Tensor.contiguous

    def spy(t, *args, **kwargs):
        if t.data_ptr() in (other.data_ptr(), d.data_ptr()) and not t.is_contiguous():
            copied.append(t.stride())
        return real(t, *args, **kwargs)

    results = []
    for apart in (False, True):
        leaves = [t.detach().requires_grad_() for t in (x, w, other if apart else other.contiguous())]
        upstream = d if apart else d.contiguous()
        with device.use(), monkeypatch.context() as patch:
            if apart:
                patch.setattr(torch.Tensor, "contiguous", spy)
            out = functions[op](*leaves)
            results.append((out, *torch.autograd.grad(out, leaves, upstream, allow_unused=op == "swiglu")))
    assert not copied
    for a, b in zip(*results):
        if a is not None or b is not None:
            support.assert_same_sums(a, b)


def test_one_predicate_says_what_has_a_gradient():
    """Of every op and device; what has none is declared here."""
    names = {n for n in _contract.TABLE if not n.endswith(("_bwd", "_fwd_bwd", "_fwd_bwd_", "_scale_"))}
    without = {n for n in names if not _contract.has_backward(n, "cpu")}
    assert without == {
        "adam_advance", "adam_norm", "adam_paged_step", "adam_step", "cached_attention_decode",
        "cached_attention_write", "cross_entropy_labelled", "gguf_dequantize", "linear_cross_entropy_places",
        "nf4_dequantize", "rope_",
    }  # fmt: skip
    for name in names - without:
        for device in _contract.KEYS:
            assert _contract.has_backward(name, device) == (device in _contract.TABLE[name].launchers)
    assert not _contract.has_backward("adam_norm", "xla")


def test_a_gradient_that_lacks_a_device_is_refused_at_its_definition(monkeypatch):
    """The forward would run on that device and record a graph that nobody can compute."""
    monkeypatch.setattr(_contract, "TABLE", dict(_contract.TABLE))
    schema = "(Tensor x) -> Tensor"
    _contract.define("lopsided_fwd", schema, fake=torch.empty_like, spec="torch:clone", launchers={"mps": "torch:neg"})
    assert not _contract.has_backward("lopsided_fwd", "cpu")
    with pytest.raises(RuntimeError, match="riftco::lopsided_fwd runs on mps, where lopsided_bwd does not"):
        _contract.define("lopsided_bwd", schema, fake=torch.empty_like, spec="torch:clone", launchers={})
    assert "lopsided_bwd" not in _contract.TABLE
