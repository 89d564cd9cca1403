"""What a captured step depends on, and that nothing in it is read on the host."""

import dataclasses

import pytest
import torch
from train.tiny import VOCABULARY, TinyModel, packed

from riftco.adapters import LoraSpec, apply_lora
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.nn import NF4Linear
from riftco.optim import Adam
from riftco.train.step_key import Layout, step_key


def key_of(batch=None, *, model=None, optimizer=None):
    model = model or TinyModel()
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    return step_key(batch or packed([4, 6]), model, Layout(model, optimizer), torch.device("cpu"))


def test_the_key():
    model = Decoder(DecoderConfig("llama", 32, 16, 24, 2, 2, 1, 8, 64, Rope(8, 1e4)))
    apply_lora(model, LoraSpec(rank=2))
    optimizer = Adam([p for p in model.parameters() if p.requires_grad])

    def now(batch=None):
        return key_of(batch, model=model, optimizer=optimizer)

    first = now()
    assert first == now() and first.differs(now()) == ""
    hash(first)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.labelled = 3
    assert first.differs(now(packed([4, 3, 3]))) == "tokens, documents", "the longest is another one"
    assert first == now(packed([6, 4])), "where documents lie is an input"
    assert first.differs(now(packed([5, 6]))) == "tokens, labelled"
    half = packed([4, 6])
    fewer = dataclasses.replace(half, n_labelled=9)
    assert first.differs(now(fewer)) == "labelled"
    assert first.differs(now(packed([4, 6], weight=0.5))) == "labels"
    assert first.differs(now(dataclasses.replace(half, input_ids=half.input_ids.int()))) == "tokens"
    model.attention = "materialized"
    assert first.differs(now()) == "attention"
    model.attention, model.activation_checkpointing = "flash", "block"
    assert first.differs(now()) == "checkpointing"
    model.activation_checkpointing = "disabled"
    model.eval()
    assert first.differs(now()) == "numerics"
    model.train()
    with torch.autocast("cpu"):
        assert first.differs(now()) == "numerics"
    layer = model.model.layers[0].mlp.up_proj
    layer.lora_A.weight.requires_grad_(False)
    assert first.differs(now()) == "trainable, frozen"
    layer.lora_A.weight.requires_grad_(True)
    assert first == now()
    held = layer.lora_A.weight.data
    layer.lora_A.weight.data = held.clone()
    assert "trainable" in first.differs(now()), "a parameter that lies elsewhere"
    layer.lora_A.weight.data = held
    base = model.model.norm.weight.data
    model.model.norm.weight.data = base.clone()
    assert first.differs(now()) == "frozen"
    model.model.norm.weight.data = base
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert first.differs(now()) == "optimizer"
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], state="paged")
    assert first.differs(now()) == "optimizer"


def test_a_glance_at_the_layout_sees_what_the_key_would():
    model = Decoder(DecoderConfig("llama", 32, 64, 24, 2, 2, 1, 32, 64, Rope(32, 1e4)))
    block = model.model.layers[0]
    block.mlp.up_proj = NF4Linear.from_linear(block.mlp.up_proj)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad])
    model.register_buffer("counts", torch.zeros(3))
    up, norm, p = block.mlp.up_proj, model.model.norm, block.self_attn.q_proj.weight

    def swap(owner, name, value):
        before = getattr(owner, name)
        setattr(owner, name, value)
        return lambda: setattr(owner, name, before)

    def added():
        model.extra = torch.nn.Linear(2, 2)
        return lambda: delattr(model, "extra")

    def longer():
        optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2)))
        return optimizer.param_groups[0]["params"].pop

    def another_group():
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        return optimizer.param_groups.pop

    changes = {
        "a parameter's data": lambda: swap(p, "data", p.data.clone()),
        "what needs a gradient": lambda: swap(p, "requires_grad", False),
        "a parameter": lambda: swap(norm, "weight", torch.nn.Parameter(torch.ones(64))),
        "a quantised weight": lambda: swap(up, "weight", up.weight.map(lambda t: t.clone())),
        "a buffer": lambda: swap(model, "counts", torch.ones(3)),
        "a module": lambda: swap(block.mlp, "down_proj", torch.nn.Linear(24, 64, bias=False)),
        "a module more": added,
        "a parameter more to optimize": longer,
        "a group more": another_group,
    }
    layout = Layout(model, optimizer)
    fields = layout.trainable, layout.frozen, layout.optimizer
    for name, change in changes.items():
        assert layout.same(model, optimizer), name
        undo = change()
        assert not layout.same(model, optimizer), name
        now = Layout(model, optimizer)
        assert fields != (now.trainable, now.frozen, now.optimizer), name
        undo()
    assert layout.same(model, optimizer) and not layout.same(model, Adam(model.parameters()))
    with torch.no_grad():
        p.add_(1)  # an update changes values, and no place
    assert layout.same(model, optimizer)


@pytest.mark.parametrize("attention", ["flash", "materialized"])
@pytest.mark.parametrize("replay", ["disabled", "block", "selective"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_no_value_of_a_step_is_read_on_the_host(method, replay, attention):
    """A capture could not go on: meta tensors have no values, and refuse to be read."""
    config = DecoderConfig("llama", VOCABULARY, 16, 24, 2, 2, 1, 8, 64, Rope(8, 1e4))
    model = Decoder(config, activation_checkpointing=replay, attention=attention)
    if method == "lora":
        apply_lora(model, LoraSpec(rank=2, dropout=0.3), seed=1)
    model.to("meta")
    there = packed([4, 6], weight=0.5).to("meta")
    where = {"positions": there.positions, "cu_seqlens": there.cu_seqlens, "max_seqlen": there.max_seqlen}
    denominator = torch.empty((), device="meta")
    loss = model.loss(there.input_ids, there.target, there.row_weight, there.n_labelled, denominator, **where)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with pytest.raises(RuntimeError, match="meta"):
        loss.item()
