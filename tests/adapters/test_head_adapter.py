"""A LoRA adapter on lm_head trains through the sliced loss as it does through whole logits."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import hf_model

from riftco.adapters import LoraSpec, apply_lora
from riftco.models.config import DecoderConfig
from riftco.models.decoder import Decoder
from riftco.models.errors import ModelError


def decoder(family):
    reference = hf_model(family)
    model = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    model.load_state_dict(reference.state_dict())
    return model


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_loss_and_gradients_equal_the_unfused_ones(family):
    model = decoder(family)
    names = apply_lora(model, LoraSpec(rank=4, alpha=8, target_modules=("lm_head", "q_proj")), seed=2)
    assert "lm_head" in names
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    ids, target = torch.randint(0, 160, (2, 12)), torch.randint(0, 160, (2, 12))
    target[1, 5:] = -100
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    want = F.cross_entropy(model(ids).flatten(0, 1), target.flatten())
    theirs = torch.autograd.grad(want, list(trained.values()))
    got = model.loss(ids, target)
    ours = torch.autograd.grad(got, list(trained.values()))
    torch.testing.assert_close(got, want)
    assert {"lm_head.lora_A.weight", "lm_head.lora_B.weight"} < trained.keys()
    for a, b, name in zip(ours, theirs, trained, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_dora_on_the_head_is_refused_by_name():
    model = decoder("llama")
    apply_lora(model, LoraSpec(rank=4, target_modules=("lm_head",), use_dora=True))
    ids = torch.arange(6)[None]
    with pytest.raises(ModelError, match="loss: the head's adapter is a DoRA"):
        model.loss(ids, ids)


def test_dropout_on_the_head_is_refused_by_name():
    model = decoder("llama").train()
    apply_lora(model, LoraSpec(rank=4, target_modules=("lm_head",), dropout=0.1))
    ids = torch.arange(6)[None]
    with pytest.raises(ModelError, match="loss: the head's adapter has dropout"):
        model.loss(ids, ids)
    model.eval().loss(ids, ids)
