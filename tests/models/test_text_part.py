"""A Gemma 3 with images: its text model loads, with transformers' logits for text; what reads images is left out."""

import copy
import json

import pytest
import torch
from families import FAMILIES, SIZES
from safetensors.torch import load_file, save_file

from riftco.models import DecoderConfig, ModelError, load_model, save_hf
from riftco.models.rotary import Rope

IDS = torch.arange(3, 43).view(1, 40)


@pytest.fixture(scope="module")
def with_images(tmp_path_factory):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**SIZES, **FAMILIES["gemma3"][1]},
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=150,
        boi_token_index=151,
        eoi_token_index=152,
    )
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "language_model" in name:
                p.normal_(std=0.15) if p.dim() == 2 else p.add_(torch.randn_like(p) * 0.2)
    folder = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(folder)
    return folder, model


def load(path):
    return load_model(path, with_tokenizer=False)[0]


def test_the_text_model_has_transformers_logits(with_images, tmp_path):
    folder, reference = with_images
    model = load(folder)
    want = reference(IDS).logits
    assert (model(IDS) - want).abs().max() <= 1e-4 * want.abs().max()
    save_hf(model, tmp_path / "text")  # by itself: a gemma3_text
    assert json.loads((tmp_path / "text" / "config.json").read_text())["model_type"] == "gemma3_text"
    assert torch.equal(load(tmp_path / "text")(IDS), model(IDS))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_both_spellings_and_nothing_unknown(with_images, tmp_path, prefix):
    folder, _ = with_images
    tensors = load_file(folder / "model.safetensors")
    spellings = ("language_model.model.", "model.language_model.")
    own = {n: next((prefix + n.removeprefix(s) for s in spellings if n.startswith(s)), n) for n in tensors}
    assert sum(n.startswith(prefix) for n in own.values()) > 20
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file({own[n]: t for n, t in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(load(tmp_path)(IDS), load(folder)(IDS))
    save_file({**tensors, "audio_tower.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor audio_tower\.weight is in .*, but this model has no use for it"):
        load(tmp_path)


def test_what_a_published_config_leaves_out():
    config = DecoderConfig.from_hf(
        {
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.rope == Rope(256, 1e6, "linear", {"factor": 8.0}) and config.local_rope == Rope(256, 1e4)
    assert config.eos_token_ids == (1, 106) and config.sliding_window == 1024 and len(config.sliding_layers) == 29
    assert config.tie_word_embeddings and config.final_softcap == 0


WHOLE = "model.language_model.layers.0."  # a layer by its whole name
TARGETS = {
    "ends": ["q_proj", "down_proj"],
    "expression": r".*language_model.*\.(q_proj|down_proj)",
    "names": [f"{WHOLE}self_attn.q_proj", f"{WHOLE}mlp.down_proj"],
}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS)
def test_an_adapter_of_the_whole_model_is_one_of_its_text_model(with_images, tmp_path, targets):
    """As PEFT writes it, with names of the model with images."""
    peft = pytest.importorskip("peft")
    from riftco.adapters import AdapterError, load_adapter
    from riftco.adapters.peft_files import read_adapter

    folder, reference = with_images
    of_text = {"exclude_modules": r".*vision_tower.*"} if isinstance(targets, list) else {}
    of_text |= {"rank_pattern": {f"{WHOLE}mlp.down_proj": 2}, "alpha_pattern": {f"{WHOLE}mlp.down_proj": 3}}
    adapted = peft.get_peft_model(copy.deepcopy(reference), peft.LoraConfig(r=4, target_modules=targets, **of_text))
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.2)
    adapted.save_pretrained(tmp_path)
    model = load(folder)
    before = model(IDS)
    load_adapter(model, tmp_path)
    want = adapted(IDS).logits
    assert (model.eval()(IDS) - want).abs().max() <= 1e-4 * want.abs().max()
    assert (model(IDS) - before).abs().max() > 1e-2 * want.abs().max()
    spec, state = read_adapter(tmp_path, model)  # for a server
    assert all(name.startswith("model.layers.") for name in state) and spec.rank == 4
    images = peft.get_peft_model(copy.deepcopy(reference), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    images.save_pretrained(tmp_path / "images")
    with pytest.raises(AdapterError, match=r"nothing consumes: .*vision_tower"):
        load_adapter(load(folder), tmp_path / "images")
