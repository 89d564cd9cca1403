"""`recomputed`: what a layer saves of an activation is made again, bit for bit, and nothing else changes."""

import contextlib
import gc
import weakref

import pytest
import support
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from riftco.functional import geglu, last_product, layer_norm, recomputed, replay, rms_norm, swiglu
from riftco.kernels.swiglu import op as swiglu_op
from riftco.nn import LoRALinear, NF4Linear, SwiGLU

DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))
ACTIVATIONS = {
    "swiglu": lambda x: swiglu(x, 2 * x),
    "one tensor": lambda x: swiglu(torch.cat((x, -x), -1)),
    "geglu": lambda x: geglu(x, x.flip(-1), approximate="tanh"),
    "rms_norm": lambda x: rms_norm(x),
    "rms_norm of a sum": lambda x: rms_norm(x, residual=x.sin())[0],
    "layer_norm": lambda x: layer_norm(x, eps=1e-3),
    "a view": lambda x: swiglu(x, 2 * x).flatten(0, 1),
}


def saved(fn, numel: int) -> int:
    """How many distinct tensors of `numel` elements the graph of fn()'s result keeps."""
    kept = {}

    def pack(t):
        if t.numel() == numel:
            kept[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = fn()
    assert result.requires_grad
    return len(kept)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("adapted", [False, True])
def test_gradients_are_bit_equal(name, device, adapted):
    d = device.torch_device
    x0 = torch.randn(3, 5, 24, device=d)
    layer = nn.Linear(24, 16, device=d)
    if adapted:
        layer = LoRALinear(layer.requires_grad_(False), rank=4, alpha=8)
        nn.init.normal_(layer.lora_B.weight)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    results = []
    with device.use():
        for spare in (False, True):
            x = x0.clone().requires_grad_()
            h = ACTIVATIONS[name](x)
            if spare:
                with recomputed(h):
                    out = layer(h)
                gone = weakref.ref(h)
                del h
                gc.collect()
                assert gone() is None  # nothing keeps the activation itself
            else:
                out = layer(h)
            results.append((out, *torch.autograd.grad(out.sin().sum(), [x, *parameters])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_module_keeps_gate_and_up_only():
    mlp = SwiGLU(8, 1000)
    x = torch.randn(6, 8, requires_grad=True)
    assert saved(lambda: mlp(x), 6 * 1000) == 2
    assert saved(lambda: mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x))), 6 * 1000) == 3


def test_inside_checkpointing():
    """Nothing of the block outlives the forward, and its gradients are those of the plain block."""
    mlp = SwiGLU(8, 1000)
    x = torch.randn(6, 8, requires_grad=True)
    want = torch.autograd.grad(mlp(x).sin().sum(), [x, *mlp.parameters()])

    def wide():
        gc.collect()
        return {id(t) for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (6, 1000)}

    before = wide()
    out = checkpoint(mlp, x, use_reentrant=False)
    assert wide() <= before
    got = torch.autograd.grad(out.sin().sum(), [x, *mlp.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_other_hooks_see_what_else_is_saved():
    """An outer hook that counts and changes: it packs the weight and gate and up, and never the activation."""
    x, w = torch.randn(4, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    seen = []

    def pack(t):
        seen.append(tuple(t.shape))
        return t.numpy(force=True).copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        h = swiglu(x, 2 * x)
        del seen[:]
        with recomputed(h):
            out = nn.functional.linear(h, w)
    assert (4, 6) not in seen and any(sorted(s) == [3, 6] for s in seen)
    got = torch.autograd.grad(out.sum(), (x, w))
    want = torch.autograd.grad(nn.functional.linear(swiglu(x, 2 * x), w).sum(), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_a_changed_input_is_refused():
    x = torch.randn(4, 6, requires_grad=True)
    gate = 2 * x
    h = swiglu(gate, x)
    with recomputed(h):
        out = nn.Linear(6, 3)(h)
    gate.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_twice_through_one_graph():
    x = torch.randn(4, 6, requires_grad=True)
    h = rms_norm(x)
    layer = nn.Linear(6, 3)
    with recomputed(h):
        out = layer(h).square().sum()
    first = torch.autograd.grad(out, (x, *layer.parameters()), retain_graph=True)
    second = torch.autograd.grad(out, (x, *layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_reader_of_an_activation_is_counted(checkpointed, monkeypatch):
    """One that three layers read, one of them twice, is made again once for each that keeps it, and its gradient is the
    sum over all of them; a value that leaves the block and one that stays in it are told apart after the rewriting."""
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    x = torch.randn(4, 6, requires_grad=True)
    made, real = [], swiglu_op.GatedLinearUnit.again
    monkeypatch.setattr(swiglu_op.GatedLinearUnit, "again", staticmethod(lambda *a: (made.append(1), real(*a))[1]))

    def block(x, spare=True):
        h = swiglu(x, 2 * x)
        with recomputed(h) if spare else contextlib.nullcontext():
            a = layers[0](h) + layers[1](h) + layers[2](h) * layers[2](h).sin()
        return a + x, h  # h is read once more outside

    def grads(out, h):
        return torch.autograd.grad((out * h.cos()).sum(), [x, *layers.parameters()])

    want = grads(*block(x, spare=False))
    assert not made
    got = grads(*(checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)))
    assert len(made) == 4
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_where_it_does_nothing():
    x, layer = torch.randn(4, 6), nn.Linear(6, 3)
    want = layer(swiglu(x, x.exp()))

    def f(x):
        h = swiglu(x, x.exp())
        with recomputed(h):
            return layer(h)

    with torch.no_grad():
        assert torch.equal(f(x), want)
    assert torch.equal(f(x), want)  # a frozen input: no operation was recorded
    torch.testing.assert_close(torch.func.grad(lambda t: f(t).sum())(x).shape, x.shape)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x.requires_grad_()), want)


def test_errors():
    x = torch.randn(4, 6, requires_grad=True)
    _, total = rms_norm(x, residual=x.exp())
    for h in (x, x * 2, total):
        with pytest.raises(ValueError, match="must come from swiglu"), recomputed(h):
            pass


def test_a_graph_without_a_backward_dies_with_its_last_name():
    """A layer that saves what it returns must not hold itself through the block's hooks."""
    gate = torch.randn(3, 8, requires_grad=True)
    h = swiglu(gate, gate)
    with recomputed(h):
        out = torch.tanh(h * 1)
    seen = weakref.ref(out.untyped_storage())
    del h, out
    assert seen() is None


@pytest.mark.parametrize("adapted", [True, False])
def test_who_reads_a_last_product_in_a_replay_gets_nan_where_checks_are_asked_for(adapted, monkeypatch):
    """And who reads none, the gradients of the layer called by itself."""
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    base = NF4Linear.from_linear(nn.Linear(64, 64))
    layer = LoRALinear(base, rank=4, alpha=8) if adapted else base
    x = torch.randn(3, 64, requires_grad=True)

    def gradient(block):
        y = checkpoint(block, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), replay()))
        return torch.autograd.grad(y.sum(), x)[0]

    (plain,) = torch.autograd.grad((x + layer(2 * x)).sum(), x)
    assert torch.equal(gradient(lambda x: x + last_product(layer, 2 * x)), plain)
    assert gradient(lambda x: x + last_product(layer, 2 * x).square()).isnan().all()
