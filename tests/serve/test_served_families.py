"""Serving is what it is without learning, in every family of the decoder and kind of cache, through the engine."""

import pytest
import torch
from families import FAMILIES
from test_bytes import bytes_of
from tiny_models import hf_model

from riftco.adapters import LoraSpec
from riftco.models import Decoder, DecoderConfig
from riftco.serve import Batch, Engine

PREFILL, DECODES, UNDONE = 100, 4, 2
CACHES = [{}, {"page_size": 7}, {"cache_dtype": "q8_0"}, {"cache_dtype": "q8_0", "page_size": 7}]


def decoder_of(family):
    reference = hf_model(family)
    made = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    made.load_state_dict(reference.state_dict())
    return made


def engine(model, **options):
    made = Engine(model, slots=2, window=128, chunk=64, **{"cache_dtype": "float32", **options})
    made.create("a", LoraSpec(rank=2, alpha=4))
    return made


def rows_of(made, slot):
    """The bytes of what a slot holds."""
    saved = made.cache.snapshot(slot)
    return [(start, bytes_of(*tensors)) for start, tensors in saved.rows]


def run(made, ids, learns):
    """Prefill and decodes; two undone and done again. Where it learns: behind every step, on the slot and beside it."""
    logits = [made.decode(Batch.of(0, 0, ids[:PREFILL])).logits]
    steps = [*range(PREFILL, PREFILL + DECODES), *range(PREFILL + DECODES - UNDONE, PREFILL + DECODES)]
    for i in steps:
        if learns:
            reply = ids[i : i + 3]
            outcome = made.learn(0, len(made.slots[0].tokens), reply[:-1], reply[1:], adapter="a", lr=1e-2)
            assert outcome.success, outcome.reason
        if i < len(made.slots[0].tokens):
            made.cut(0, i)
        logits.append(made.decode(Batch.of(0, i, ids[i : i + 1])).logits)
    return torch.cat(logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", CACHES, ids=str)
def test_serving_is_unchanged(family, options):
    """Without learning and with it, and with more room to undo: the same logits, and every byte that the slot holds."""
    if "q8_0" in options.values() and decoder_of(family).config.head_dim % 32:
        pytest.skip("q8_0 has blocks of 32 along the head dim")
    ids = torch.randint(0, 160, (PREFILL + DECODES + 3,)).tolist()
    ended = []
    for undo, learns in ((UNDONE, False), (UNDONE, True), (4, True), (None, True)):
        made = engine(decoder_of(family), undo=undo, **options)
        logits = run(made, ids, learns)
        assert torch.equal(logits[-UNDONE:], logits[-2 * UNDONE : -UNDONE]), "undone and done again"
        ended.append((logits, rows_of(made, 0)))
    assert ended[0][1] == ended[1][1]
    assert all(torch.equal(logits, ended[0][0]) for logits, _ in ended[1:])
