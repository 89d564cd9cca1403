"""Weights side by side in memory: one product for layers of one input, the same numbers, and what keeps them apart."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import hf_model
from torch.utils._python_dispatch import TorchDispatchMode

from riftco.models import Decoder, DecoderConfig, KVCache
from riftco.models.joined import GROUPS, lay_side_by_side, product
from riftco.nn import LoRALinear, NF4Linear

PRODUCTS = ("riftco::nf4_linear_fwd", "aten::mm", "aten::addmm", "aten::linear")


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.widths = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS:
            self.widths.append(out.shape[-1])
        return out


def decoder(family="llama", nf4=False, dtype=torch.float32):
    source = hf_model(family).eval()
    torch.manual_seed(1)
    model = Decoder(DecoderConfig.from_hf(source.config.to_dict())).eval()
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    model.to(dtype)
    for module in list(model.modules()) if nf4 else []:
        for name in {name for group in GROUPS for name in group}:
            if isinstance(getattr(module, name, None), torch.nn.Linear):
                setattr(module, name, NF4Linear.from_linear(getattr(module, name)))
    return model


def run(model, rows=5):
    ids = torch.arange(rows)[None] + 3
    cache = KVCache(model.config, 1, 16)
    with torch.no_grad(), Products() as products:
        model(ids, kv_cache=cache)
        out = model(ids[:, :1] + 1, kv_cache=cache)
    return out, products.widths


@pytest.mark.parametrize("nf4", [False, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_product_a_group(family, nf4):
    model = decoder(family, nf4)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    want, apart = run(model)
    lay_side_by_side(model)
    got, joined = run(model)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    layers = model.config.num_layers
    assert len(apart) - len(joined) == 2 * 3 * layers, "two of q, k, v and one of gate, up, twice"
    assert max(joined[:-1]) >= 2 * model.config.intermediate_size
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[n], t) for n, t in before.items())


def layers(kind=torch.nn.Linear, bias=False, widths=(64, 32, 32)):
    made = torch.nn.Module()
    for name, width in zip(GROUPS[0], widths):
        linear = torch.nn.Linear(64, width, bias=bias)
        setattr(made, name, linear if kind is torch.nn.Linear else NF4Linear.from_linear(linear))
    lay_side_by_side(made)
    return made, [getattr(made, name) for name in GROUPS[0]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.Linear, NF4Linear])
@pytest.mark.parametrize("rows", [1, 7])
def test_each_gets_its_own_part(kind, bias, rows):
    _, group = layers(kind, bias)
    x = torch.randn(rows, 64)
    with torch.no_grad():
        ys = product(x, group)
        assert [y.shape for y in ys] == [(rows, layer.out_features) for layer in group]
        for y, layer in zip(ys, group):
            torch.testing.assert_close(y, layer(x))


@torch.no_grad()
def test_tensors_without_addresses_are_left_as_they_are():
    _, group = layers()
    assert product(torch.randn(3, 64, device="meta"), [layer.to("meta") for layer in group]) is None
    _, group = layers()
    seen = []
    torch.compile(lambda x: seen.append(product(x, group)), backend="eager")(torch.randn(3, 64))
    assert seen == [None]


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.Linear, NF4Linear])
def test_what_is_apart_stays_apart(kind, bias):
    x = torch.randn(3, 64)
    with torch.enable_grad():
        assert product(x, layers(kind, bias)[1]) is None, "gradients go through linear_group"
    for spoil in (hooked, moved, adapted, changed, compiled, another_kind):
        _, group = layers(kind, bias)
        assert product(x, group) is not None
        assert product(x, spoil(group)) is None, spoil.__name__
    if bias:
        _, group = layers(kind, bias)
        group[1].bias.data = group[1].bias.data.clone()
        assert product(x, group) is None
    _, group = layers(kind, bias)
    assert product(x, group[::-1]) is None, "another order"
    assert product(x, [group[0], group[2]]) is None, "a gap"


def hooked(group):
    group[1].register_forward_hook(lambda *_: None)
    return group


def moved(group):
    if isinstance(group[1], NF4Linear):
        group[1].weight = group[1].weight.map(torch.clone)
    else:
        group[1].weight.data = group[1].weight.data.clone()
    return group


def adapted(group):
    return [group[0], LoRALinear(group[1], 2, 2.0), group[2]]


def changed(group):
    group[1].forward = lambda x: F.linear(x, torch.zeros(32, 64))
    return group


def compiled(group):
    group[1].compile()
    return group


def another_kind(group):
    other = torch.nn.Linear(64, 32) if isinstance(group[1], NF4Linear) else NF4Linear(64, 32)
    return [group[0], other, group[2]]


def test_mixed_layers_are_left_where_they_are():
    made = torch.nn.Module()
    made.gate_proj, made.up_proj = torch.nn.Linear(64, 8), torch.nn.Linear(64, 8, bias=False)
    before = made.gate_proj.weight.data_ptr()
    lay_side_by_side(made)
    assert made.gate_proj.weight.data_ptr() == before


def test_a_hook_on_a_block_is_called():
    model, calls = decoder(), []
    want, _ = run(model)
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    got, _ = run(model)
    torch.testing.assert_close(got, want)
    assert len(calls) == 2
