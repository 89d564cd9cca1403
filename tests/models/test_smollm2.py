"""The real model of the quickstart, where its package is installed."""

import pytest
import torch
from real_model import smollm2_or_skip

from riftco.models import generate, load_model, save_hf
from riftco.models.decoder import Decoder


@pytest.fixture(scope="module")
def loaded():
    return load_model(smollm2_or_skip(), weights="fp32")


def test_logits_equal_transformers_over_the_saved_folder(loaded, tmp_path):
    from transformers import AutoModelForCausalLM

    model, tokenizer = loaded
    save_hf(model, tmp_path / "hf")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    text = tokenizer.render_chat([{"role": "user", "content": "Name three rivers of Europe, and 12 x 12."}])
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        want, got = reference(ids).logits, model(ids)
    assert want.std() > 1
    assert (got - want).abs().max() <= 1e-3


def test_it_knows_what_it_should(loaded):
    model, tokenizer = loaded
    assert isinstance(model, Decoder) and model.lm_head.weight is model.model.embed_tokens.weight
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    reply = "".join(generate(model, tokenizer, chat, max_new_tokens=20))
    assert "Paris" in reply
