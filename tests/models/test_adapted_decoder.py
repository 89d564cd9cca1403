"""The decoder's q, k, v and gate, up as one call each where they carry adapters: same numbers, less kept, fewer ops."""

import collections

import pytest
import torch
from support import poisoned
from tiny_models import hf_config
from torch.utils._python_dispatch import TorchDispatchMode

import riftco.models.decoder as decoder_file
from riftco.adapters import LoraSpec, apply_lora
from riftco.functional import GGUFWeight
from riftco.kernels._frozen_weight import Base
from riftco.kernels.gguf_linear.cases import random_blocks
from riftco.models.config import DecoderConfig
from riftco.models.decoder import Decoder
from riftco.nn import GGUFLinear, NF4Linear

IDS = torch.arange(3, 43).view(2, 20)
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted_decoder(nf4=False, family="llama-biases", **options):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig.from_hf(hf_config(family).to_dict()))
    if nf4:
        for name, layer in list(model.named_modules()):
            if name.endswith(NAMES):
                model.set_submodule(name, NF4Linear.from_linear(layer))
    apply_lora(model, LoraSpec(**{"rank": 4, "alpha": 8, **options}), seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    return model


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step(model):
    """Loss, gradients by name, bytes kept for the backward (each storage once, without parameters), ops."""
    kept = {}
    held = [*model.state_dict().values(), *(m.weight.scale for m in model.modules() if isinstance(m, NF4Linear))]
    skip = {t.untyped_storage().data_ptr() for t in held}

    def keep(t):
        if t.untyped_storage().data_ptr() not in skip:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    model.zero_grad()
    with Counted() as counted:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = model.loss(IDS, IDS.roll(-1, 1))
        loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads, sum(kept.values()), counted.names


def one_by_one(x, layers, rows=None):
    return tuple(layer(x) for layer in layers)


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"target_modules": ("q_proj", "v_proj", "up_proj")}], ids=str
)
def test_a_step_in_groups_is_the_step_without(nf4, options, monkeypatch):
    model = adapted_decoder(nf4, **options)
    loss, grads, kept, ops = step(model)
    monkeypatch.setattr(decoder_file, "linear_group", one_by_one)
    loss_1, grads_1, kept_1, ops_1 = step(model)
    torch.testing.assert_close(loss, loss_1, rtol=1e-6, atol=1e-6)
    assert grads.keys() == grads_1.keys() and len(grads) >= 12
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_1[name], rtol=1e-4, atol=1e-6, msg=name)
    groups = 2 if "target_modules" not in options else 1  # of a layer: q, k, v and gate, up; or q, v
    alone = 7 - 5 + groups if "target_modules" not in options else 2
    layers = model.config.num_layers
    adapters = len([n for n in grads if n.endswith("lora_A.weight")])
    assert ops["lora_linear_fwd"] == ops["lora_linear_bwd"] == layers * alone
    assert ops_1["lora_linear_fwd"] == ops_1["lora_linear_bwd"] == adapters
    assert sum(ops.values()) < sum(ops_1.values())
    assert kept <= kept_1  # one storage of x either way: layers one by one keep references to the same x


def test_names_and_hooks_are_untouched():
    """The state is that of modules called one by one, and a hook on one of them still runs."""
    model = adapted_decoder()
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in model.state_dict()
    seen = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    step(model)
    assert seen == [(2, 20, 96)]


def test_block_checkpointing_repeats_the_mask():
    model = adapted_decoder(dropout=0.3)
    model.train()
    torch.manual_seed(5)
    loss, grads, _, _ = step(model)
    model.activation_checkpointing = "block"
    torch.manual_seed(5)
    again, grads_1, _, _ = step(model)
    assert torch.equal(loss, again)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, grads_1[name])
    model.eval()
    assert not torch.equal(step(model)[0], loss)


def products_of_down_proj(monkeypatch, model):
    """The (rows, outputs) of each product of a down_proj's base, as they are made."""
    made, real = [], Base.forward
    C, inner = model.config.hidden_size, model.config.intermediate_size
    assert inner not in (C, model.config.num_heads * model.config.head_dim)

    def product(base, x, bias, find):
        y = real(base, x, bias, find)
        if x.shape[-1] == inner and y.numel():
            made.append(tuple(y.shape))
        return y

    monkeypatch.setattr(Base, "forward", product)
    return made


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize(
    ("options", "again"),
    [({}, 0), ({"dropout": 0.3}, 0), ({"use_dora": True}, 1), ({"family": "gemma2"}, 1)],
    ids=str,
)
def test_a_replayed_block_leaves_out_the_product_that_nobody_reads(nf4, options, again, monkeypatch):
    """The last product of a block, which stays poisoned; with DoRA, or a norm behind it, somebody reads it."""
    model = adapted_decoder(nf4, **options).train()
    layers = model.config.num_layers
    made = products_of_down_proj(monkeypatch, model)
    torch.manual_seed(5)
    loss, grads, _, _ = step(model)
    assert len(made) == layers
    model.activation_checkpointing = "block"
    made.clear()
    torch.manual_seed(5)
    with poisoned():
        loss_1, grads_1, _, _ = step(model)
    assert len(made) == layers * (1 + again)
    assert torch.equal(loss, loss_1) and grads.keys() == grads_1.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, grads_1[name]), name


@pytest.mark.parametrize("where", ["", "base_layer"])
def test_a_last_product_that_a_hook_sees_is_made_in_a_replay(where, monkeypatch):
    model = adapted_decoder()
    model.activation_checkpointing = "block"
    model.model.layers[0].mlp.down_proj.get_submodule(where).register_forward_pre_hook(lambda m, args: None)
    made = products_of_down_proj(monkeypatch, model)
    step(model)
    assert len(made) == model.config.num_layers + 1


@pytest.mark.parametrize("kind", ["nf4", "gguf"])
def test_a_frozen_last_product_without_an_adapter_is_left_out_too(kind):
    model = adapted_decoder(nf4=True, target_modules=("q_proj",))
    if kind == "gguf":
        for block in model.model.layers:
            N, blocks = block.mlp.down_proj.out_features, random_blocks("Q8_0", 64 * 96 // 32, torch.Generator())
            block.mlp.down_proj = GGUFLinear.from_weight(GGUFWeight(blocks.view(N, -1), "Q8_0", (N, 96)))
    loss, grads, _, ops = step(model)
    model.activation_checkpointing = "block"
    with poisoned():
        loss_1, grads_1, _, ops_1 = step(model)
    layers, name = model.config.num_layers, f"{kind}_linear_fwd"
    alone = {"nf4": 6, "gguf": 1}[kind]  # layers without an adapter
    assert ops[name] == layers * alone and ops_1[name] == ops[name] + layers * (alone - 1)
    assert torch.equal(loss, loss_1)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_1[name]), name


@pytest.mark.parametrize("targets", [NAMES, ("q_proj", "down_proj"), ("q_proj", "gate_proj")], ids=str)
def test_what_the_last_product_reads_is_made_once_in_a_replay(targets):
    """Forward, replay, and, where the backward needs it and began elsewhere, a third time: of norms always."""
    model = adapted_decoder(target_modules=targets)
    loss, grads, _, plain = step(model)
    model.activation_checkpointing = "block"
    loss_1, grads_1, _, again = step(model)
    layers = model.config.num_layers
    reads = "down_proj" in targets
    assert plain["swiglu_fwd"] == layers * (1 + reads)
    assert again["swiglu_fwd"] == plain["swiglu_fwd"] + layers * (1 - reads)
    assert torch.equal(loss, loss_1)
    for name, grad in grads.items():
        assert torch.equal(grad, grads_1[name]), name


def test_blocks_and_layers_that_were_compiled_are_called():
    """Module.compile changes what a call does, not forward: fused ways around the call must not go round it."""
    model, calls = adapted_decoder(), []

    def compiled(layer, name):
        layer._compiled_call_impl = lambda *args: (calls.append(name), layer._call_impl(*args))[1]

    block, plain = model.model.layers[1], step(model)
    compiled(block, "block")
    compiled(model.model.layers[0].mlp.up_proj, "up")
    compiled(model.model.layers[0].mlp.down_proj, "down")
    model.activation_checkpointing = "block"
    again = step(model)
    assert calls.count("block") == calls.count("up") == calls.count("down") == 2
    model.activation_checkpointing = "disabled"
    step(model)
    assert calls.count("block") == 3
    assert torch.equal(plain[0], again[0])
    for name, grad in plain[1].items():
        torch.testing.assert_close(grad, again[1][name], rtol=1e-4, atol=1e-6)
