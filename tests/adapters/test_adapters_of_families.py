"""An adapter on every family: PEFT over transformers' model and riftco's decoder, both ways, with gradients."""

import pytest
import torch
from adapters.test_peft_options import IDS, close, peft_config, shake, their_gradients
from families import FAMILIES
from tiny_models import hf_model

from riftco.adapters import LoraSpec, apply_lora, load_adapter, save_adapter
from riftco.adapters.lora import adapter_parameters
from riftco.models.config import DecoderConfig
from riftco.models.decoder import Decoder

peft = pytest.importorskip("peft")
SPEC = LoraSpec(rank=4, alpha=6, target_modules=r".*(proj|embed_tokens)", rank_pattern={"down_proj": 3})


def decoder(family):
    reference = hf_model(family)
    model = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    model.load_state_dict(reference.state_dict())
    return model


@pytest.mark.filterwarnings("ignore")  # PEFT advises on tied weights and embeddings
@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways(family, tmp_path):
    theirs = peft.get_peft_model(hf_model(family), peft_config(SPEC))
    shake([p for p in theirs.parameters() if p.requires_grad])
    theirs.save_pretrained(tmp_path / "theirs")
    model = decoder(family)
    load_adapter(model, tmp_path / "theirs")
    close(model(IDS), theirs(IDS).logits)
    theirs(IDS, labels=IDS).loss.backward()
    model.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    want, parameters = their_gradients(theirs), adapter_parameters(model)
    assert want.keys() == parameters.keys() and any("embed_tokens" in k for k in want)
    for key, parameter in parameters.items():
        close(parameter.grad, want[key], key)

    mine = decoder(family)
    apply_lora(mine, SPEC, seed=3)
    shake(adapter_parameters(mine).values())
    save_adapter(mine, SPEC, tmp_path / "mine")
    back = peft.PeftModel.from_pretrained(hf_model(family), tmp_path / "mine")
    with torch.no_grad():
        close(back(IDS).logits, mine(IDS))
