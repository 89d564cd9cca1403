"""A merged model is the adapted one: every option, tied heads, quantised bases; and what merging reports."""

import pytest
import torch
from adapters.test_peft_options import IDS, OPTIONS, close, decoder, shake, spec_of

from riftco.adapters import AdapterError, LoraSpec, adapted, apply_lora, merge_adapter
from riftco.adapters.lora import adapter_parameters
from riftco.models import load_model, save_gguf, save_hf
from riftco.nn import NF4Linear

transformers = pytest.importorskip("transformers")
MORE = {
    "dora, rslora": ("llama-biases", dict(use_dora=True, use_rslora=True, rank_pattern={"q_proj": 2})),
    "head": ("llama", dict(target_modules=("lm_head",), use_dora=True)),
}
STILL_TIED = ("tied, saved together", "tied, rows", "tied, embedding and head together")


@pytest.fixture(autouse=True)
def more(monkeypatch):
    monkeypatch.setitem(OPTIONS, "dora, rslora", MORE["dora, rslora"])
    monkeypatch.setitem(OPTIONS, "head", MORE["head"])


@pytest.mark.parametrize("name", [*OPTIONS, *MORE])
def test_a_merged_model_is_the_adapted_one(name, tmp_path):
    model = decoder(name)
    modules = {n: type(m) for n, m in model.named_modules()}
    apply_lora(model, spec_of(name), seed=1)
    shake(adapter_parameters(model).values())
    with torch.no_grad():
        want = model(IDS)
    merged = merge_adapter(model)
    assert {n: type(m) for n, m in model.named_modules()} == modules
    with torch.no_grad():
        close(model(IDS), want)
    assert all(0.01 < r < 100 for r in merged.relative.values()) and merged.relative
    assert all(r == 0 for r in merged.lost.values())  # float32 over float32 rounds nothing more
    tied = "tied" in OPTIONS[name][0]
    apart = name.startswith("tied") and name not in STILL_TIED
    assert model.config.tie_word_embeddings == (tied and not apart) and merged.untied == apart
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings
    save_hf(model, tmp_path / "merged")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    close(theirs(IDS).logits, want)


@pytest.mark.parametrize("use_dora", [False, True])
def test_onto_a_dequantised_base(use_dora, tmp_path):
    save_hf(decoder("embedding"), tmp_path / "base")
    model, _ = load_model(tmp_path / "base", weights="nf4", with_tokenizer=False)
    apply_lora(model, LoraSpec(rank=4, alpha=8, use_dora=use_dora), seed=1)
    shake(adapter_parameters(model).values())
    with torch.no_grad():
        want = model(IDS)
    layer = model.model.layers[0].mlp.up_proj
    base = layer.base_layer.weight.decoded(0, layer.out_features, torch.float32)
    merged = merge_adapter(model, dtype=torch.bfloat16)
    up = model.model.layers[0].mlp.up_proj
    assert type(up) is torch.nn.Linear and up.weight.dtype == torch.bfloat16
    assert not any(isinstance(m, NF4Linear) for m in model.modules())
    name = "model.layers.0.mlp.up_proj"
    assert merged.relative[name] == pytest.approx(float((up.weight.float() - base).norm() / base.norm()), rel=0.02)
    assert 0 < merged.lost[name] < 0.05
    close_enough = model.float()(IDS)
    assert (close_enough - want).abs().max() <= 0.05 * want.abs().max()
    text = "\n".join(merged.lines())
    assert "merged 14 layers; the delta is " in text and "% of the base's norm" in text


def test_refusals():
    model = decoder("embedding")
    with pytest.raises(AdapterError, match="carries no adapter to merge"):
        merge_adapter(model)
    apply_lora(model, spec_of("embedding"))
    assert adapted(model)
    with pytest.raises(ValueError, match=r"save_hf: model\.embed_tokens is a LoRAEmbedding; merge the adapter first"):
        save_hf(model, "never")
    with pytest.raises(ValueError, match=r"save_gguf: model\.embed_tokens is a LoRAEmbedding; merge the adapter first"):
        save_gguf(model, "never.gguf")
