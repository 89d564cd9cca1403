"""A fine-tuned adapter that a server begins with, and finds again."""

import json

import pytest
import torch
from objective import decoder
from safetensors.torch import load_file, save_file

from riftco.adapters import AdapterError, LoraSpec, apply_lora, save_adapter
from riftco.serve import Engine, Refused, Request, Scheduler, Store
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


@pytest.mark.parametrize("own", [True, False])
def test_a_head_comes_with_the_bases_weight_from_peft(tmp_path, own):
    """Which must be the model's own, and is no part of the adapter."""
    model, spec = decoder(), LoraSpec(rank=2, alpha=8.0, target_modules=("lm_head", "q_proj"))
    weight = model.lm_head.weight.detach().clone()
    apply_lora(model, spec, seed=3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    save_adapter(model, spec, tmp_path / "tuned")
    file = tmp_path / "tuned" / "adapter_model.safetensors"
    base = weight if own else weight + 1
    save_file({**load_file(file), "base_model.model.lm_head.base_layer.weight": base}, file)
    made = engine(tmp_path / "served")
    if not own:
        with pytest.raises(AdapterError, match=r"lm_head\.base_layer\.weight is not this model's weight"):
            adopt(made, "a", str(tmp_path / "tuned"))
        return
    adopt(made, "a", str(tmp_path / "tuned"))
    prompt = list(range(3, 15))
    scheduler = Scheduler(made)
    ticket = scheduler.submit(Request(prompt, max_new_tokens=6, adapters={"a": 1.0}))
    scheduler.run()
    ids = list(prompt)
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert ticket.tokens == ids[len(prompt) :]
