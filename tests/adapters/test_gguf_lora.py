"""LoRA files for llama.cpp: what the gguf package reads of them, and what llama.cpp computes with them."""

import llama_cpp_runs
import pytest
import torch
from families import FAMILIES
from tiny_models import hf_model

from riftco.adapters import LoraSpec, apply_lora, merge_adapter, save_gguf_lora
from riftco.adapters.lora import adapter_parameters
from riftco.models import DecoderConfig, generate_tokens, save_gguf
from riftco.models.decoder import Decoder

gguf = pytest.importorskip("gguf")
IDS = [5, 3, 5, 99, 7, 5, 2, 8, 100, 200]
# config -> what differs, so that llama.cpp computes the same function
LLAMA_CPP = {name: {} for name in FAMILIES if not name.endswith("-window") and name != "phi3-longrope"} | {
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},  # llama.cpp's own pattern
    "gemma2": {"query_pre_attn_scalar": 32},  # it knows no other than the head size
    "gemma3": {"query_pre_attn_scalar": 32},
}
GELU_TABLE = ("gemma2", "gemma3")  # llama.cpp looks GELU up in float16
SPECS = {
    "all-linear": dict(),
    "patterns": dict(rank_pattern={"k_proj": 2, "o_proj": 7}, alpha_pattern={"v_proj": 3}),
    "rslora": dict(use_rslora=True),
    "embedding and head": dict(target_modules=("embed_tokens", "lm_head", "q_proj"), use_rslora=True),
}


def adapted_decoder(family, spec=None, **changes):
    reference = hf_model(family, vocab_size=llama_cpp_runs.VOCABULARY, **changes)
    model = Decoder(DecoderConfig.from_hf(reference.config.to_dict())).eval()
    model.load_state_dict(reference.state_dict())
    if spec is not None:
        apply_lora(model, LoraSpec(**{"rank": 4, "alpha": 6, **spec}), seed=1)
        torch.manual_seed(2)
        with torch.no_grad():
            for p in adapter_parameters(model).values():
                p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.mark.parametrize("name", SPECS)
def test_what_is_in_the_file(name, tmp_path):
    model = adapted_decoder("llama", SPECS[name])
    save_gguf_lora(model, tmp_path / "lora.gguf")
    reader = gguf.GGUFReader(tmp_path / "lora.gguf")
    said = {k: f.contents() for k, f in reader.fields.items()}
    assert said["general.type"] == "adapter" and said["adapter.type"] == "lora"
    assert said["general.architecture"] == "llama" and said["adapter.lora.alpha"] == 6.0
    tensors = {t.name: torch.tensor(t.data) for t in reader.tensors}
    q = model.model.layers[1].self_attn.q_proj
    a, b = (tensors[f"blk.1.attn_q.weight.lora_{x}"] for x in "ab")
    assert torch.equal(a, q.lora_A.weight)
    factor = q.scale * q.rank / 6.0
    assert factor == (1.0 if "use_rslora" not in SPECS[name] else pytest.approx(2.0))
    # rows of a head: 0, 1, 2, ... lie as 0, D/2, 1, D/2 + 1, ...
    first, last = b.view(4, 8, 2, -1)[:, :, 0], b.view(4, 8, 2, -1)[:, :, 1]
    halves = (q.lora_B.weight * factor).view(4, 2, 8, -1)
    assert torch.equal(first, halves[:, 0]) and torch.equal(last, halves[:, 1])
    if name == "embedding and head":
        embedding = model.model.embed_tokens
        assert torch.equal(tensors["token_embd.weight.lora_a"], embedding.lora_embedding_A.t())
        assert torch.equal(tensors["token_embd.weight.lora_b"], embedding.lora_embedding_B * 2)
        assert "output.weight.lora_a" in tensors
    else:
        o = model.model.layers[0].self_attn.o_proj
        scale = o.alpha / o.rank * (o.rank**0.5 if "use_rslora" in SPECS[name] else 1)
        b = tensors["blk.0.attn_output.weight.lora_b"]
        torch.testing.assert_close(b * 6.0 / o.rank, o.lora_B.weight.detach() * scale)
        assert len(tensors) == 2 * 14


@pytest.mark.parametrize("family", LLAMA_CPP)
def test_every_family_has_names_for_its_layers(family, tmp_path):
    model = adapted_decoder(family, {}, **LLAMA_CPP[family])
    save_gguf_lora(model, tmp_path / "lora.gguf", dtype="F16")
    reader = gguf.GGUFReader(tmp_path / "lora.gguf")
    assert len(reader.tensors) == len(list(adapter_parameters(model)))
    assert {t.tensor_type.name for t in reader.tensors} == {"F16"}


@pytest.mark.parametrize("family", LLAMA_CPP)
def test_llama_cpp_computes_the_same_logits(family, tmp_path):
    """Over the base as riftco writes it, in float32, with and without the adapter."""
    model = adapted_decoder(family, **LLAMA_CPP[family])
    save_gguf(model, tmp_path / "base.gguf", kind="F32", tokenizer=llama_cpp_runs.TOKENIZER)
    budget = 1e-3 if family in GELU_TABLE else 1e-5
    with torch.no_grad():
        plain = model(torch.tensor([IDS]))[0]
    assert (llama_cpp_runs.logits(tmp_path / "base.gguf", IDS) - plain).abs().max() <= budget * plain.abs().max()
    specs = [{}, SPECS["patterns"]] if family != "llama" else list(SPECS.values())
    for i, spec in enumerate(specs):
        model = adapted_decoder(family, spec, **LLAMA_CPP[family])
        save_gguf_lora(model, tmp_path / f"{i}.gguf")
        with torch.no_grad():
            want = model(torch.tensor([IDS]))[0]
        assert (want - plain).abs().max() > 0.1 * plain.abs().max()
        got = llama_cpp_runs.logits(tmp_path / "base.gguf", IDS, tmp_path / f"{i}.gguf")
        assert (got - want).abs().max() <= budget * want.abs().max(), i


def test_llama_cpp_writes_the_text_of_the_merged_model(tmp_path):
    base = adapted_decoder("qwen3")
    save_gguf(base, tmp_path / "base.gguf", kind="F32", tokenizer=llama_cpp_runs.TOKENIZER)
    model = adapted_decoder("qwen3", SPECS["rslora"])
    save_gguf_lora(model, tmp_path / "lora.gguf")
    merge_adapter(model)
    want = list(generate_tokens(model, IDS, max_new_tokens=24, temperature=0))
    assert want != list(generate_tokens(base, IDS, max_new_tokens=24, temperature=0))
    assert llama_cpp_runs.greedy(tmp_path / "base.gguf", IDS, len(want), tmp_path / "lora.gguf") == want


@pytest.mark.parametrize(
    ("family", "spec", "says"),
    [
        ("llama", dict(use_dora=True), r"cannot hold DoRA, which model\.layers\.0\.self_attn\.q_proj has; merge"),
        ("llama", dict(modules_to_save=("lm_head",)), r"cannot hold lm_head\.weight, which was trained whole"),
        ("llama", dict(trainable_token_indices=(3,)), "cannot hold trained rows of the embedding"),
        ("llama-tied", dict(target_modules=("embed_tokens",)), "of a model that ties embedding and head"),
        ("llama-tied", dict(target_modules=("lm_head",)), "an adapter on lm_head of a model that ties"),
    ],
)
def test_what_llama_cpp_has_no_form_for_is_refused(family, spec, says, tmp_path):
    model = adapted_decoder(family, spec)
    with pytest.raises(ValueError, match=says):
        save_gguf_lora(model, tmp_path / "lora.gguf")
    assert not any(tmp_path.iterdir())


def test_a_model_without_an_adapter_and_a_used_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="carries no LoRA"):
        save_gguf_lora(adapted_decoder("llama"), tmp_path / "lora.gguf")
    (tmp_path / "lora.gguf").write_text("mine")
    with pytest.raises(ValueError, match="already there; name a new file"):
        save_gguf_lora(adapted_decoder("llama", {}), tmp_path / "lora.gguf")
    assert (tmp_path / "lora.gguf").read_text() == "mine"
    with pytest.raises(ValueError, match="dtype must be one of F32, F16; got 'Q4_0'"):
        save_gguf_lora(adapted_decoder("llama", {}), tmp_path / "other.gguf", dtype="Q4_0")
