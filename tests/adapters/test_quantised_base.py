"""A QLoRA adapter over NF4 weights means the same to transformers + PEFT over the dequantised base, and back."""

import pytest
import tiny_models
import torch
from real_model import smollm2_or_skip

from riftco.adapters import LoraSpec, apply_lora, load_adapter, save_adapter
from riftco.models import load_model, save_hf

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def check_both_ways(base, ids, tmp_path):
    """`base` names a model file; the adapter of one side gives the other the same logits."""
    spec = LoraSpec(rank=4, alpha=8)
    model, _ = load_model(base, weights="nf4", dtype=torch.float32, with_tokenizer=False)
    save_hf(model, tmp_path / "base")
    with torch.no_grad():
        plain = model(ids)
    apply_lora(model, spec, seed=1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.02)
        want = model(ids)
    assert (want - plain).abs().max() > 0.05
    save_adapter(model, spec, tmp_path / "ours", base=str(tmp_path / "base"))

    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(hf, tmp_path / "ours").eval()
    with torch.no_grad():
        assert (theirs(ids).logits - want).abs().max() <= 1e-3
        for name, p in theirs.named_parameters():
            if "lora_" in name:
                p.normal_(std=0.03)
        want = theirs(ids).logits
    theirs.save_pretrained(tmp_path / "theirs")
    again, _ = load_model(base, weights="nf4", dtype=torch.float32, with_tokenizer=False)
    load_adapter(again, tmp_path / "theirs")
    with torch.no_grad():
        assert (again(ids) - want).abs().max() <= 1e-3


@pytest.mark.parametrize("family", ["llama-tied", "qwen2", "qwen3"])
def test_tiny(family, tmp_path):
    tiny_models.hf_model(family).save_pretrained(tmp_path / "hf")
    check_both_ways(tmp_path / "hf", torch.arange(3, 23).view(2, 10), tmp_path)


def test_smollm2(tmp_path):
    check_both_ways(smollm2_or_skip(), torch.tensor([[1, 4093, 198, 2683, 359, 253, 5356, 5646, 11173, 2]]), tmp_path)
