"""The walk in every family: windows, softcaps, scaled embeddings and rotations that switch are those of one graph."""

import pytest
import torch
from families import FAMILIES
from tiny_models import hf_model

from riftco.models import Decoder, DecoderConfig
from riftco.train import walk


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_of_one_graph(family):
    reference = hf_model(family)
    model = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    model.load_state_dict(reference.state_dict())
    ids, target = torch.randint(0, 160, (2, 40))
    target[5:9] = -100
    want_loss = model.loss(ids[None], target[None])
    want_loss.backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    done = walk(model, ids, target, chunk=9, recompute=True)
    torch.testing.assert_close(done.loss, want_loss.detach(), rtol=1e-5, atol=1e-5)
    for p, grad in zip(model.parameters(), want):
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))
