"""Laws of the sampler and of packing, over generated cases."""

import collections
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from riftco.data import DataError, Example, Geometry, Loader, RowPlan, WindowSampler, best_fit, pack
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope

quick = settings(max_examples=60, deadline=None)


# --- the sampler ------------------------------------------------------------------------------------------------------


@quick
@given(context=st.integers(1, 20), more=st.integers(1, 40), batch=st.integers(1, 9), seed=st.integers())
def test_every_window_is_a_valid_start_and_its_targets_follow(context, more, batch, seed):
    corpus = list(range(1000, 1000 + context + more))
    sampler = WindowSampler(corpus, context, batch, seed)
    assert sampler.starts == more
    for _ in range(3):
        inputs, targets = sampler.next()
        assert len(inputs) == len(targets) == batch
        for x, y in zip(inputs, targets, strict=True):
            start = x[0] - 1000
            assert 0 <= start < more
            assert x == corpus[start : start + context]
            assert y == corpus[start + 1 : start + 1 + context]


@quick
@given(context=st.integers(1, 9), more=st.integers(1, 30), batch=st.integers(1, 5), seed=st.integers())
def test_a_seed_is_a_sequence_that_resumes_and_touches_no_other_randomness(context, more, batch, seed):
    corpus = list(range(context + more))
    a, b = (WindowSampler(corpus, context, batch, seed) for _ in range(2))
    theirs, torchs = random.getstate(), torch.get_rng_state()
    first = a.draw()
    state = a.state_dict()
    rest = [a.draw() for _ in range(4)]
    random.random(), torch.rand(3)  # the model's seed is another's affair
    random.setstate(theirs), torch.set_rng_state(torchs)
    assert [b.draw() for _ in range(5)] == [first, *rest]
    resumed = WindowSampler(corpus, context, batch, seed + 1)
    resumed.load_state_dict(state)
    assert [resumed.draw() for _ in range(4)] == rest
    assert random.getstate() == theirs
    assert torch.equal(torch.get_rng_state(), torchs)


@quick
@given(context=st.integers(1, 50), fewer=st.integers(0, 50))
def test_a_corpus_must_exceed_its_context(context, fewer):
    with pytest.raises(DataError, match=f"needs at least {context + 1}"):
        WindowSampler(range(max(context - fewer, 0)), context, 1, 0)
    one = WindowSampler(range(context + 1), context, 3, fewer)
    assert one.next()[0] == [list(range(context))] * 3  # one window, for every row


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_starts_are_uniform_and_rows_independent(seed):
    """Chi-square at 5 standard deviations of its law: of single starts, and of the pairs that two rows make."""
    sampler = WindowSampler(range(12), 5, 2, seed)
    draws = [tuple(sampler.draw()) for _ in range(20_000)]
    for counts, cells in ((collections.Counter(s for d in draws for s in d), 7), (collections.Counter(draws), 49)):
        expected = sum(counts.values()) / cells
        assert len(counts) == cells
        chi = sum((n - expected) ** 2 / expected for n in counts.values())
        assert chi < cells - 1 + 5 * math.sqrt(2 * (cells - 1))
    # with replacement: the same window twice in one batch, as often as chance has it
    same = sum(a == b for a, b in draws) / len(draws)
    assert abs(same - 1 / 7) < 5 * math.sqrt(6 / 49 / len(draws))


# --- packing ----------------------------------------------------------------------------------------------------------


@st.composite
def documents(draw, most=12):
    """Examples whose tokens are all different, so that each can be followed through a batch."""
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=most))
    out, at = [], 0
    for n in lengths:
        weights = draw(st.lists(st.sampled_from([0.0, 1.0, 0.5]), min_size=n, max_size=n))
        out.append(Example(tuple(range(at, at + n)), tuple(weights)))
        at += n
    return out


def drained(loader):
    batches = []
    while (batch := loader.next()) is not None:
        batches.append(batch)
    return batches


@quick
@given(lengths=st.lists(st.integers(1, 50), max_size=40), more=st.integers(0, 30))
def test_best_fit_places_each_once_and_wastes_little(lengths, more):
    capacity = max(lengths, default=1) + more
    rows = best_fit(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in rows)
    assert len(rows) <= 11 / 9 * math.ceil(sum(lengths) / capacity) + 1 or any(2 * n > capacity for n in lengths)


def test_best_fit_takes_the_fullest_row_that_still_fits():
    assert best_fit([6, 5, 3, 2, 2], 9) == [[0, 2], [1, 3, 4]]
    with pytest.raises(ValueError, match="10 tokens does not fit a row of 9"):
        best_fit([10], 9)
    with pytest.raises(ValueError, match="lengths must be at least 0; got -1"):
        best_fit([3, -1], 9)


@quick
@given(examples=documents(), more=st.integers(0, 20), seed=st.integers(0, 9), epochs=st.integers(1, 3))
def test_packing_never_leaks_loses_or_repeats(examples, more, seed, epochs):
    tokens = max(len(e) - 1 for e in examples) + more
    loader = Loader(examples, tokens, seed, epochs)
    promised = loader.count()
    batches = drained(loader)
    assert len(batches) == promised
    seen: collections.Counter = collections.Counter()
    document = {i: d for d, e in enumerate(examples) for i in e.ids}
    for batch in batches:
        assert batch.physical_tokens <= tokens
        assert batch.geometry.sequences == len(batch.documents)
        bounds = batch.cu_seqlens.tolist()
        for d, a, b in zip(batch.documents, bounds, bounds[1:], strict=False):
            ids, target = batch.input_ids[a:b].tolist(), batch.target[a:b].tolist()
            assert tuple(ids) == examples[d].ids[:-1]  # nothing lost, in order
            assert batch.positions[a:b].tolist() == list(range(b - a))
            for i, t in zip(ids, target, strict=True):
                assert t == -100 or (t == i + 1 and document[t] == document[i] == d)  # no label crosses a boundary
            seen[d] += 1
        labelled = {i for a, b in batch.spans for i in range(a, b)}
        assert labelled == {i for i, t in enumerate(batch.target.tolist()) if t >= 0}
        assert batch.n_labelled == len(labelled)
    assert seen == {d: epochs for d in range(len(examples))}
    plan = RowPlan.of(batches[:1], 3)
    assert (plan.physical_tokens, plan.labelled_tokens, plan.padding) == (
        batches[0].physical_tokens, batches[0].n_labelled, 2,
    )  # fmt: skip


@quick
@given(examples=documents(), times=st.integers(0, 4))
def test_a_halved_batch_has_the_same_rows_once(examples, times):
    whole = pack(examples, range(len(examples)))
    pieces = [whole]
    for _ in range(times):
        pieces = [half for p in pieces for half in p.halves()]
    assert len(pieces) <= 2**times
    assert len(pieces) >= min(len(examples), times + 1)
    for name in ("input_ids", "target", "positions"):
        assert torch.equal(torch.cat([getattr(p, name) for p in pieces]), getattr(whole, name))
    assert sum(p.n_labelled for p in pieces) == whole.n_labelled
    assert sum((p.documents for p in pieces), ()) == whole.documents
    assert all((p.row_weight is None) == (whole.row_weight is None) for p in pieces)


@quick
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_geometry_from_members_is_geometry_from_lengths(lengths):
    import numpy as np

    members = np.repeat(np.arange(len(lengths)), lengths)
    a, b = Geometry.of(lengths), Geometry.of_members(members)
    assert torch.equal(a.cu_seqlens, b.cu_seqlens)
    assert torch.equal(a.positions, b.positions)
    assert a.max_seqlen == b.max_seqlen == max(lengths)


# --- packed against alone, and accumulation -------------------------------------------------------------------------


def tiny_decoder():
    torch.manual_seed(3)
    config = DecoderConfig("llama", 128, 16, 24, 2, 2, 1, 8, 64, Rope(8, 1e4))
    model = Decoder(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4)
    return model


MODEL = tiny_decoder()


def gradients(batches, denominator):
    MODEL.zero_grad()
    total = 0.0
    for b in batches:
        loss = MODEL.loss(
            b.input_ids, b.target, b.row_weight, b.n_labelled, denominator,
            positions=b.positions, cu_seqlens=b.cu_seqlens, max_seqlen=b.max_seqlen,
        )  # fmt: skip
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in MODEL.parameters()])


def near(a, b):
    return float((a - b).norm()) <= 5e-5 * float(b.norm())  # a leak changes the first digits


@settings(max_examples=12, deadline=None)
@given(examples=documents(most=6))
def test_packed_equals_unpacked(examples):
    packed = pack(examples)
    where = {"positions": packed.positions, "cu_seqlens": packed.cu_seqlens, "max_seqlen": packed.max_seqlen}
    with torch.no_grad():
        together = MODEL.loss(packed.input_ids, packed.target, packed.row_weight, reduction="none", **where)
        alone = [pack([e]) for e in examples]
        apart = [
            MODEL.loss(a.input_ids[None], a.target[None], a.row_weight if a.row_weight is None else a.row_weight[None],
                       reduction="none")[0]
            for a in alone
        ]  # fmt: skip
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-5, atol=1e-6)
    labelled = max(packed.n_labelled, 1)
    one, many = gradients([packed], labelled), gradients(alone, labelled)
    assert one[0] == pytest.approx(many[0], rel=1e-5, abs=1e-6)
    assert near(one[1], many[1])


def test_accumulation_of_one_two_and_four_is_one_step():
    examples = [Example(tuple(range(7 * d, 7 * d + 3 + d)), (1.0,) * (3 + d)) for d in range(4)]
    labelled = sum(e.n_labelled for e in examples)
    want = gradients([pack(examples)], labelled)
    for cut in ([(0, 1), (2, 3)], [(0, 3), (1, 2)], [(0,), (1,), (2,), (3,)]):
        got = gradients([pack([examples[i] for i in group]) for group in cut], labelled)
        assert got[0] == pytest.approx(want[0], rel=1e-6)
        assert near(got[1], want[1])
