"""Adapters over a GGUF file's own blocks, embedding and head too: what they are over the same weights decoded."""

import pytest
import torch
from adapters.test_peft_options import IDS, close, shake
from tiny_models import hf_model

from riftco.adapters import LoraSpec, apply_lora, load_adapter, merge_adapter, save_adapter
from riftco.adapters.lora import adapter_parameters
from riftco.models import DecoderConfig, load_model, save_gguf, save_hf
from riftco.models.decoder import Decoder
from riftco.nn import GGUFEmbedding, GGUFLinear

pytest.importorskip("gguf")
# name -> (config, specification); 64 and 96 columns are whole blocks of Q8_0
CASES = {
    "all-linear": ("llama", {}),
    "dora": ("llama", dict(use_dora=True)),
    "embedding and head": ("llama", dict(target_modules=("embed_tokens", "lm_head"))),
    "embedding, dora": ("llama", dict(target_modules=("embed_tokens",), use_dora=True)),
    "rows": ("llama", dict(trainable_token_indices=(5, 99, 0))),
    "tied, embedding alone": ("llama-tied", dict(target_modules=("embed_tokens", "q_proj"))),
    "tied, together": ("llama-tied", dict(target_modules=("embed_tokens",), ensure_weight_tying=True)),
    "tied, rows": ("llama-tied", dict(trainable_token_indices=(5, 99, 0))),
}


@pytest.fixture
def file(request, tmp_path):
    reference = hf_model(CASES[request.getfixturevalue("name")][0])
    model = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    model.load_state_dict(reference.state_dict())
    save_gguf(model, tmp_path / "model.gguf", kind="Q8_0")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_adapter_over_the_decoded_weights(name, file, tmp_path):
    spec = LoraSpec(**{"rank": 4, "alpha": 6, **CASES[name][1]})
    packed, _ = load_model(file, weights="packed", with_tokenizer=False)
    dense, _ = load_model(file, weights="fp32", with_tokenizer=False)
    assert isinstance(packed.model.embed_tokens, GGUFEmbedding) and isinstance(packed.lm_head, GGUFLinear)
    apply_lora(packed, spec, seed=1)
    shake(adapter_parameters(packed).values())
    save_adapter(packed, spec, tmp_path / "adapter", base_weights="packed")
    load_adapter(dense, tmp_path / "adapter")
    with torch.no_grad():
        want = dense(IDS)
        close(packed(IDS), want)
    grads = []
    for model in (packed, dense):
        model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
        grads.append({k: p.grad for k, p in adapter_parameters(model).items()})
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[1].items():
        assert grad.abs().max() > 0, key
        close(grads[0][key], grad, key)

    merge_adapter(packed)
    with torch.no_grad():
        close(packed(IDS), want)
    save_hf(packed, tmp_path / "merged")
    back, _ = load_model(tmp_path / "merged", with_tokenizer=False)
    with torch.no_grad():
        close(back(IDS), want)


@pytest.mark.parametrize("name", ["all-linear"])
def test_a_packed_embedding_cannot_be_saved_whole(name, file):
    packed, _ = load_model(file, weights="packed", with_tokenizer=False)
    with pytest.raises(ValueError, match=r"names model\.embed_tokens, whose weights are quantised"):
        apply_lora(packed, LoraSpec(modules_to_save=("embed_tokens",)))
