"""The decoder against transformers: logits, losses and gradients of every family; packing, caching, checkpointing."""

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, covers
from support import close
from tiny_models import hf_model

from riftco.kernels import _contract
from riftco.memory import MemoryTrace
from riftco.models.config import DecoderConfig
from riftco.models.decoder import Decoder
from riftco.models.errors import ModelError
from riftco.models.kv_cache import KVCache


def from_transformers(model, **options) -> Decoder:
    """A Decoder with the weights of a transformers model: names match, so a state dict is all it takes."""
    decoder = Decoder(DecoderConfig.from_hf(model.config.to_dict()), **options)
    decoder.load_state_dict(model.state_dict(), strict=True)
    return decoder


@covers("forward")
def test_logits_equal_transformers(family):
    reference = hf_model(family)
    ids = torch.randint(0, 160, (2, 40))
    got = from_transformers(reference)(ids)
    assert got.std() > 0.1  # the weights are large enough for differences to show
    close(got, reference(ids).logits)


@covers("gradient")
def test_loss_and_gradients_equal_transformers(family):
    reference = hf_model(family)
    decoder = from_transformers(reference)
    ids, target = torch.randint(0, 160, (2, 40)), torch.randint(0, 160, (2, 40))
    target[0, :15] = -100
    want_loss = F.cross_entropy(reference(ids).logits.flatten(0, 1), target.flatten())
    loss = decoder.loss(ids, target)
    close(loss, want_loss)
    want_loss.backward()
    loss.backward()
    named = dict(decoder.named_parameters())
    assert named.keys() == dict(reference.named_parameters()).keys()
    for name, parameter in reference.named_parameters():
        close(named[name].grad, parameter.grad)


def test_loss_options():
    decoder = from_transformers(hf_model("llama"))
    ids, target = torch.randint(0, 160, (2, 12)), torch.randint(0, 160, (2, 12))
    target[1, 5:] = -100
    rows = decoder.loss(ids, target, reduction="none")
    assert rows.shape == (2, 12) and (rows[1, 5:] == 0).all() and (rows[0] > 0).all()
    weight = torch.rand(2, 12)
    close(decoder.loss(ids, target, weight), (rows * weight).sum() / 17)
    close(decoder.loss(ids, target, weight, 17, 34), (rows * weight).sum() / 34)
    close(decoder.loss(ids, target, reduction="sum"), rows.sum())
    decoder.lm_head = torch.nn.Sequential(decoder.lm_head)
    with pytest.raises(ModelError, match=r"the head must be a torch\.nn\.Linear, .*; got Sequential"):
        decoder.loss(ids, target)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_rows_of_their_own(family):
    decoder = from_transformers(hf_model(family))
    lengths = [7, 1, 40, 12]
    documents = [torch.randint(0, 160, (n,)) for n in lengths]
    cu = torch.tensor([0, 7, 8, 48, 60], dtype=torch.int32)
    packed = decoder(torch.cat(documents), cu_seqlens=cu, max_seqlen=40)
    for document, got in zip(documents, packed.split(lengths)):
        close(got, decoder(document[None])[0], 1e-5)
    shifted = decoder(torch.cat(documents), cu_seqlens=cu, positions=torch.cat([torch.arange(n) + 3 for n in lengths]))
    if not decoder.config.no_rope_layers and decoder.rotary.switches_at is None:
        close(shifted, packed, 1e-4)  # rotations see differences of positions only
    weight = decoder.model.layers[0].mlp.down_proj.weight
    grads = torch.autograd.grad(packed.square().mean(), weight)[0]
    total = sum((decoder(d[None]).square().sum() for d in documents), torch.zeros(())) / packed.numel()
    close(grads, torch.autograd.grad(total, weight)[0], 1e-5)


def test_rows_behind_the_last_document_do_not_matter():
    decoder = from_transformers(hf_model("llama"))
    ids = torch.randint(0, 160, (16,))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    got = decoder(ids, cu_seqlens=cu)
    assert torch.isfinite(got).all()
    close(got[:12], decoder(ids[:12], cu_seqlens=cu), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_blocks_give_equal_losses_and_gradients(family):
    decoder = from_transformers(hf_model(family))
    ids, target = torch.randint(0, 160, (2, 24)), torch.randint(0, 160, (2, 24))
    runs = []
    calls = []
    layers = decoder.model.layers
    hooks = [
        layer.register_forward_pre_hook(lambda layer, *a: calls.append(list(layers).index(layer))) for layer in layers
    ]
    for mode in ("disabled", "block", "selective"):
        decoder.activation_checkpointing = mode
        decoder.zero_grad()
        calls.clear()
        loss = decoder.loss(ids, target)
        loss.backward()
        runs.append((loss.detach(), [p.grad for p in decoder.parameters()], list(calls)))
    for hook in hooks:
        hook.remove()
    once = list(range(len(layers)))
    again = [*once, *reversed(once)]
    assert [r[2] for r in runs] == [once, again, again]
    for run in runs[1:]:
        assert torch.equal(runs[0][0], run[0])
        assert all(torch.equal(a, b) for a, b in zip(runs[0][1], run[1]))
    with pytest.raises(ModelError, match="must be one of disabled, block, selective; got 'some'"):
        decoder.activation_checkpointing = "some"


@pytest.mark.parametrize("packed", [False, True])
def test_selective_checkpointing_does_not_run_attention_again(packed, monkeypatch):
    """It keeps each layer's input and attention's out and lse, no more; the loss and gradients are the same bits."""
    decoder = from_transformers(hf_model("llama"))
    ids = torch.randint(0, 160, (96,))
    where = {"cu_seqlens": torch.tensor([0, 40, 96], dtype=torch.int32)} if packed else {}
    calls, choose = [], _contract.choose
    monkeypatch.setattr(_contract, "choose", lambda name, *rest: (calls.append(name), choose(name, *rest))[1])
    ran, kept, gradients = [], [], []
    for mode in ("disabled", "block", "selective"):
        decoder.activation_checkpointing = mode
        decoder.zero_grad()
        trace = MemoryTrace(decoder)
        with trace:
            loss = decoder.hidden(*((ids,) if packed else (ids[None],)), **where).square().mean()
            kept.append(trace.bytes)
            loss.backward()
        ran.append(calls.count("attention_fwd"))
        calls.clear()
        gradients.append([p.grad for p in decoder.parameters() if p.grad is not None])
    layers, out_and_lse = len(decoder.model.layers), 96 * 64 * 4 + 96 * 4 * 4
    assert kept[2] - kept[1] == layers * out_and_lse and kept[2] < kept[0]
    assert ran == [layers, 2 * layers, layers]
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3-window"])
def test_materialized_attention_is_flash_attention(family):
    decoder = from_transformers(hf_model(family))
    ids, target = torch.randint(0, 160, (48,)), torch.randint(0, 160, (48,))
    runs = []
    for attention in ("flash", "materialized"):
        decoder.attention = attention
        decoder.zero_grad()
        loss = decoder.loss(ids, target, cu_seqlens=torch.tensor([0, 20, 48], dtype=torch.int32))
        loss.backward()
        runs.append([loss.detach(), *(p.grad for p in decoder.parameters())])
    assert {layer.self_attn.impl for layer in decoder.model.layers} == {"materialized"}
    for a, b in zip(*runs):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    with pytest.raises(ModelError, match="attention must be one of flash, materialized; got 'spec'"):
        decoder.attention = "spec"


def test_a_tied_head_is_one_parameter_with_one_gradient():
    decoder = from_transformers(hf_model("llama-tied"))
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(decoder.named_parameters())
    new = Decoder(decoder.config)
    assert new.lm_head.weight is new.model.embed_tokens.weight


def test_new_weights():
    decoder = Decoder(DecoderConfig.from_hf(hf_model("llama-biases").config.to_dict()))
    layer = decoder.model.layers[0]
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (layer.self_attn.q_proj.bias == 0).all() and (layer.input_layernorm.weight == 1).all()


@pytest.mark.parametrize(
    "ids, options, says",
    [
        (torch.zeros(2, 3), {}, "input_ids must be int32 or int64"),
        (torch.zeros(3, dtype=torch.int64), {}, r"input_ids must be \[B, T\]"),
        (torch.zeros(1, 3, dtype=torch.int64), {"cu_seqlens": torch.tensor([0, 3])}, r"input_ids must be \[B, T\]"),
        (torch.zeros(1, 3, dtype=torch.int64), {"positions": torch.arange(4)}, "positions"),
        (torch.zeros(1, 129, dtype=torch.int64), {}, "a context of 129 tokens is longer than this model's 128"),
        (
            torch.zeros(300, dtype=torch.int64),
            {"cu_seqlens": torch.tensor([0, 300]), "max_seqlen": 300},
            "a context of 300 tokens",
        ),
    ],
)
def test_what_is_refused(ids, options, says):
    decoder = Decoder(DecoderConfig.from_hf(hf_model("llama").config.to_dict()))
    with pytest.raises(ModelError, match=says):
        decoder(ids, **options)


def test_bfloat16_follows_float32():
    decoder = from_transformers(hf_model("llama-3.1"))
    ids = torch.randint(0, 160, (1, 60))
    want = decoder(ids)
    got = decoder.to(torch.bfloat16)(ids)
    assert got.dtype == torch.bfloat16
    close(got.float(), want, 0.06)


def test_int32_ids_and_given_positions():
    decoder = from_transformers(hf_model("llama"))
    ids = torch.randint(0, 160, (2, 10))
    want = decoder(ids)
    assert torch.equal(decoder(ids.int()), want)
    assert torch.equal(decoder(ids, positions=torch.arange(10)), want)
    assert torch.equal(decoder(ids, positions=torch.arange(10).expand(2, 10)), want)
    spread = decoder(ids, positions=torch.arange(10) * 3)
    assert (spread - want).abs().max() > 0.05


@pytest.mark.parametrize(
    ("family", "mode"),
    [("qwen3", "disabled"), ("qwen3", "block"), ("gemma3", "selective"), ("phi3-longrope", "disabled")],
)
def test_a_packed_loss_compiles_as_one_graph(family, mode):
    decoder = from_transformers(hf_model(family), activation_checkpointing=mode)
    weight = decoder.model.layers[0].mlp.down_proj.weight
    ids, cu = torch.randint(0, 160, (40,)), torch.tensor([0, 10, 40], dtype=torch.int32)
    want = decoder.loss(ids, ids.roll(-1), cu_seqlens=cu)
    compiled = torch.compile(decoder.loss, fullgraph=True, backend="aot_eager")
    got = compiled(ids, ids.roll(-1), cu_seqlens=cu)
    close(got, want, 1e-6)
    close(torch.autograd.grad(got, weight)[0], torch.autograd.grad(want, weight)[0], 1e-6)


def test_autocast_follows_float32():
    decoder = from_transformers(hf_model("qwen3"))
    ids = torch.randint(0, 160, (2, 30))
    want = decoder.loss(ids, ids.roll(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = decoder.loss(ids, ids.roll(-1))
    assert got.dtype == torch.float32 and got != want
    close(got, want, 0.02)
    got.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in decoder.parameters())


@pytest.mark.gpu
@covers("forward")
def test_a_gpu_gives_the_same_logits_and_gradients(family):
    reference = hf_model(family)
    here, there = from_transformers(reference), from_transformers(reference).cuda()
    ids = torch.randint(0, 160, (2, 40))
    close(there(ids.cuda()).cpu(), here(ids))
    here.loss(ids, ids.roll(-1)).backward()
    there.loss(ids.cuda(), ids.roll(-1).cuda()).backward()
    for a, b in zip(there.parameters(), here.parameters()):
        close(a.grad.cpu(), b.grad)
    cache = KVCache(there.config, 2, 40, device="cuda")
    with torch.no_grad():
        got = [there(part, kv_cache=cache) for part in ids.cuda().split([30, 1, 9], 1)]
    close(torch.cat(got, 1).cpu(), here(ids))
