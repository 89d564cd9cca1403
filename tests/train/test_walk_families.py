"""The walk in every family: windows, softcaps, scaled embeddings and rotations that switch are those of one graph."""

import pytest
import torch
from families import FAMILIES
from tiny_models import hf_model

from riftco.functional import Cache
from riftco.memory import MemoryTrace
from riftco.models import Decoder, DecoderConfig
from riftco.train import read, walk


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


@pytest.mark.parametrize("kind", ["float32", "float16", "q8_0"])
def test_memory_does_not_grow_with_the_window(kind):
    """Nothing of a chunk's graph is sized by the cache that it reads: no copy of it, in any type."""
    config = DecoderConfig.from_hf(hf_model("llama", head_dim=32, max_position_embeddings=4096).config.to_dict())
    model, ids = Decoder(config), torch.randint(0, 160, (40,))
    peaks = []
    for window in (64, 4096):
        cache = Cache.allocate(config.num_layers, 1, window, config.num_kv_heads, 32, dtype=kind)
        read(model, ids[:24], cache)
        model.zero_grad()
        with MemoryTrace() as trace:
            walk(model, ids[24:], ids[24:], chunk=8, cache=cache, prefix=24, recompute=True)
        parts = [t for of in cache.layers for t in (of.k, of.v, of.k_scale, of.v_scale) if t is not None]
        peaks.append(trace.peaks["step"][0] - sum(t.nbytes for t in parts))
    assert peaks[0] == peaks[1] > 0
