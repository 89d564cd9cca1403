"""Adapters of embeddings, rows and tied heads where a step is cut or computed twice: the gradients of one graph."""

import pytest
import torch
from adapters.test_peft_options import close, decoder, shake, spec_of

from riftco.adapters import apply_lora
from riftco.adapters.lora import adapter_parameters
from riftco.train import walk

NAMES = (
    "embedding", "embedding and head", "rows", "tied, embedding and head together", "tied, rows", "tied, saved together"
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_checkpointing_change_no_gradient(name):
    model = decoder(name)
    apply_lora(model, spec_of(name), seed=0)
    parameters = adapter_parameters(model)
    shake(parameters.values())
    torch.manual_seed(0)
    ids = torch.randint(0, 160, (40,))

    def gradients(run):
        model.zero_grad()
        run()
        return {k: p.grad.clone() for k, p in parameters.items()}

    def step():
        model.loss(ids[None, :-1], ids[None, 1:]).backward()

    want = gradients(step)
    walked = gradients(lambda: walk(model, ids[:-1], ids[1:], chunk=7))
    model.activation_checkpointing = "block"
    again = gradients(step)
    for key, grad in want.items():
        assert grad.abs().max() > 0
        close(walked[key], grad, key)
        assert torch.equal(again[key], grad)
