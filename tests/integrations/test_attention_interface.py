"""attn_implementation="riftco" alone: models that riftco.patch does not know, options, and what is refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from riftco.integrations.transformers import register
from riftco.integrations.transformers.attention import attention
from riftco.integrations.transformers.masks import Mask, mask

B, H, K, T, D = 2, 4, 2, 9, 16


@pytest.fixture(autouse=True)
def _registered():
    register()
    register()  # twice is once


class Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = H // K


def qkv(T=T, S=T):
    q, k, v = torch.randn(B, H, T, D), torch.randn(B, K, S, D), torch.randn(B, K, S, D)
    return [t.requires_grad_() for t in (q, k, v)]


def compare(ours: dict, theirs: dict, tensors) -> None:
    """Outputs and gradients of riftco's attention and SDPA's."""
    results = []
    for function, options in ((attention, ours), (sdpa_attention_forward, theirs)):
        out, weights = function(Layer(), *tensors, **options)
        assert weights is None
        results.append((out, *torch.autograd.grad((out * torch.arange(D)).sum(), tensors)))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def model_of(kind: str, cls=AutoModelForCausalLM, **options):
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **{**sizes, **options})
    return cls.from_config(config, attn_implementation="eager").eval()


def logits_of(model, implementation: str, **inputs) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    out = model(**inputs)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def test_sinks_and_windows_of_gpt_oss():
    model = model_of(
        "gpt_oss", num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    ids = torch.randint(1, 96, (2, 14))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, :4] = 0
    grads = []
    for implementation in ("eager", "riftco"):
        model.zero_grad()
        logits_of(model, implementation, **inputs)[:, 5:].square().sum().backward()
        grads.append([p.grad.clone() for n, p in model.named_parameters() if "sinks" in n or "q_proj" in n])
    for a, b in zip(*grads):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_encoders_see_both_sides(kind):
    options = {"local_attention": 6, "global_attn_every_n_layers": 2} if kind == "modernbert" else {}
    model = model_of(kind, AutoModel, **options)
    ids = torch.randint(1, 96, (2, 12))
    for first, last in ((0, 12), (0, 7), (3, 12)):
        valid = torch.zeros_like(ids)
        valid[0, first:last], valid[1] = 1, 1
        want, got = (logits_of(model, i, input_ids=ids, attention_mask=valid) for i in ("eager", "riftco"))
        torch.testing.assert_close(got[valid.bool()], want[valid.bool()], rtol=1e-4, atol=1e-5)


def test_a_cache_filled_in_pieces():
    """Several new rows over rows that are there: dynamic and static."""
    from transformers import DynamicCache, StaticCache

    model = model_of("llama", num_key_value_heads=2)
    ids = torch.randint(1, 96, (2, 12))
    want = logits_of(model, "eager", input_ids=ids)
    model.set_attn_implementation("riftco")
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=20)):
        parts = [model(part, cache=cache).logits for part in ids.split([5, 4, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "added"])
def test_a_mask_of_the_callers_is_all_there_is_to_see(kind):
    shown = (torch.rand(B, 1, T, T) < 0.5) | torch.eye(T, dtype=torch.bool)
    given = shown if kind == "bool" else torch.zeros(B, 1, T, T).masked_fill(~shown, torch.finfo(torch.float32).min)
    compare({"attention_mask": given, "sliding_window": 2}, {"attention_mask": given}, qkv())
    model = model_of("mistral", num_key_value_heads=2, sliding_window=4)
    ids = torch.randint(1, 96, (B, T))
    want, got = (logits_of(model, i, input_ids=ids, attention_mask=given.float() if kind == "added" else given)
                 for i in ("sdpa", "riftco"))  # fmt: skip
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_no_mask_at_all():
    compare({"attention_mask": None}, {"attention_mask": None}, qkv())
    compare({"attention_mask": None, "is_causal": False}, {"attention_mask": None, "is_causal": False}, qkv(4, 9))
    compare({"attention_mask": None}, {"attention_mask": None}, qkv(1, 9))


def test_position_bias():
    bias = torch.randn(1, H, T, T)
    compare(
        {"attention_mask": Mask(T, T, causal=True), "position_bias": bias},
        {"attention_mask": None, "position_bias": bias}, qkv(),
    )  # fmt: skip
    shown = torch.rand(B, 1, 1, T) < 0.7
    shown[..., 0] = True
    both = shown & torch.ones(T, T, dtype=torch.bool).tril()
    compare(
        {"attention_mask": Mask(T, T, causal=True, visible=shown), "position_bias": bias},
        {"attention_mask": both, "position_bias": bias}, qkv(),
    )  # fmt: skip


def test_documents_from_a_flattening_collator():
    q, k, v = (t[:1].detach().requires_grad_() for t in qkv())
    cu = torch.tensor([0, 4, T], dtype=torch.int32)
    shown = torch.block_diag(torch.ones(4, 4), torch.ones(5, 5)).bool().tril()[None, None]
    compare(
        {"attention_mask": mask(1, T, T), "cu_seq_lens_q": cu, "cu_seq_lens_k": cu}, {"attention_mask": shown},
        (q, k, v),
    )  # fmt: skip


def test_dropout_is_applied_and_repeats():
    tensors = qkv()

    def run(seed, p):
        torch.manual_seed(seed)
        return attention(Layer(), *tensors, Mask(T, T, causal=True), dropout=p)[0]

    assert torch.equal(run(0, 0.5), run(0, 0.5)) and not torch.equal(run(0, 0.5), run(1, 0.5))
    mean = torch.stack([run(seed, 0.2) for seed in range(400)]).mean(0)
    off = (mean - run(0, 0.0)).abs().max()
    assert 0 < off < 0.35
    model = model_of("llama", attention_dropout=0.5).train()
    ids = torch.randint(1, 96, (1, 8))
    a, b = (logits_of(model, "riftco", input_ids=ids) for _ in range(2))
    assert not torch.equal(a, b)


def refused(match: str, *tensors, **options):
    with pytest.raises(ValueError, match=match):
        attention(Layer(), *(tensors or qkv()), **options)


def test_refusals_name_what_is_not_served():
    refused('for output_attentions take "eager"', attention_mask=None, output_attentions=True)
    refused(r"a mask must be \[B, 1 or H, T, S\]; got \[2, 9\]", attention_mask=torch.ones(B, T, dtype=torch.bool))
    refused("3 causal queries over 9 keys need a mask", *qkv(3, 9), attention_mask=None)
    refused("the mask is of 4 queries and 9 keys; got 9 and 9", attention_mask=Mask(4, 9))
    refused("a window to both sides", attention_mask=None, is_causal=False, sliding_window=3)
    left = torch.ones(B, T, dtype=torch.bool)
    left[0, :3] = False
    made = mask(B, T, T, attention_mask=left)
    refused("a position bias over packed", attention_mask=made, position_bias=torch.zeros(1, H, T, T))
    refused("bias must be bool or floating", attention_mask=torch.zeros(B, 1, T, T, dtype=torch.long))


def test_a_hidden_softcap_is_seen():
    """gemma2's softcap reaches the operator: without it the outputs differ."""
    tensors = qkv()
    capped, plain = (
        attention(Layer(), *tensors, Mask(T, T, causal=True), softcap=cap, scaling=1.0)[0] for cap in (1.0, None)
    )
    assert (capped - plain).abs().max() > 0.05
