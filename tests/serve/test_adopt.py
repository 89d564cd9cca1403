"""A fine-tuned adapter that a server begins with, and finds again."""

import json

import pytest
import torch
from objective import decoder

from riftco.adapters import LoraSpec, apply_lora, save_adapter
from riftco.serve import Engine, Refused, Store
from riftco.serve.adopt import adopt


def engine(folder):
    return Engine(decoder(), slots=1, window=40, cache_dtype="float32", store=Store(folder, "digest"))


@pytest.fixture
def tuned(tmp_path):
    model, spec = decoder(), LoraSpec(rank=2, alpha=8.0)
    apply_lora(model, spec, seed=3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    save_adapter(model, spec, tmp_path / "tuned")
    return tmp_path / "tuned"


@pytest.mark.parametrize("change", [{}, {"lora_alpha": 16}, {"alpha_pattern": {"q_proj": 64}}, {"use_rslora": True}])
def test_one_that_is_there_began_as_the_same_folder_with_the_same_scales(tmp_path, tuned, change):
    made = engine(tmp_path / "served")
    adopt(made, "a", str(tuned))
    made.store.close()
    config = tuned / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    again = engine(tmp_path / "served")
    if not change:
        adopt(again, "a", str(tuned))
        return
    with pytest.raises(Refused, match="did not begin as"):
        adopt(again, "a", str(tuned))
