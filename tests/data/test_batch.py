"""Packing, order, epochs, windows."""

import collections

import pytest
import torch

from riftco.data import DataError, Example, Loader, ShuffledOrder, WindowSampler, pack


def example(*ids, weights=None, line=0):
    return Example(tuple(ids), tuple(weights or [1.0] * len(ids)), line)


def test_pack_shifts_once_and_crosses_no_boundary():
    batch = pack([example(1, 2, 3), example(4, 5), example(6, 7, 8, weights=[0, 0, 1])], (7, 8, 9))
    assert batch.input_ids.tolist() == [1, 2, 4, 6, 7]
    assert batch.target.tolist() == [2, 3, 5, -100, 8]
    assert batch.positions.tolist() == [0, 1, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 5]
    assert batch.cu_seqlens.dtype == torch.int32
    assert (batch.max_seqlen, batch.n_labelled, batch.physical_tokens) == (2, 4, 5)
    assert batch.row_weight is None
    assert batch.documents == (7, 8, 9)


def test_pack_keeps_weights_where_they_matter():
    batch = pack([example(1, 2, 3, weights=[0, 0.5, 2])])
    assert batch.row_weight.tolist() == [0.5, 2.0]
    assert batch.row_weight.dtype == torch.float32


def test_pack_refuses_what_has_nothing_to_predict():
    with pytest.raises(DataError, match="line 4: an example of 1 tokens"):
        pack([example(1, line=4)])
    with pytest.raises(DataError, match="no examples"):
        pack([])


EXAMPLES = [example(*range(n)) for n in (3, 4, 5, 6, 3, 2, 7)]


def drain(loader):
    out = []
    while (batch := loader.next()) is not None:
        out.append(batch)
    return out


def test_each_epoch_has_every_document_once_within_the_budget():
    loader = Loader(EXAMPLES, tokens=8, seed=3, epochs=2)
    promised = loader.count()
    batches = drain(loader)
    assert len(batches) == promised
    assert all(b.physical_tokens <= 8 for b in batches)
    assert any(len(b.documents) > 1 for b in batches)
    seen = [d for b in batches for d in b.documents]
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    assert seen[:7] != seen[7:]
    # an epoch's end is a batch's end
    ends = {sum(len(b.documents) for b in batches[: i + 1]) for i in range(len(batches))}
    assert 7 in ends


def test_order_is_the_seed_and_resumes_anywhere():
    all_of = [b.documents for b in drain(Loader(EXAMPLES, 8, seed=5, epochs=3))]
    assert all_of == [b.documents for b in drain(Loader(EXAMPLES, 8, seed=5, epochs=3))]
    assert all_of != [b.documents for b in drain(Loader(EXAMPLES, 8, seed=6, epochs=3))]
    for cut in range(len(all_of)):
        first = Loader(EXAMPLES, 8, seed=5, epochs=3)
        for _ in range(cut):
            first.next()
        second = Loader(EXAMPLES, 8, seed=5, epochs=3)
        second.load_state_dict(first.state_dict())
        assert [b.documents for b in drain(second)] == all_of[cut:]


def test_order_leaves_torchs_generator_alone():
    before = torch.get_rng_state()
    drain(Loader(EXAMPLES, 8, seed=5, epochs=1))
    assert torch.equal(before, torch.get_rng_state())


def test_a_state_of_another_dataset_is_refused():
    state = ShuffledOrder(5, seed=1).state_dict()
    with pytest.raises(DataError, match="5 examples with seed 1; this run has 6 with seed 1"):
        ShuffledOrder(6, seed=1).load_state_dict(state)
    with pytest.raises(DataError, match="no position 9"):
        ShuffledOrder(5, seed=1).load_state_dict({**state, "position": 9})


def test_an_example_beyond_the_budget_is_refused_by_line():
    with pytest.raises(DataError, match="line 7: an example of 10 tokens does not fit --batch-tokens 8; raise it to 9"):
        Loader([example(*range(10), line=7)], 8, seed=0)
    examples = [example(*range(n), line=line) for line, n in ((1, 10), (2, 12), (3, 9))]
    says = (
        "line 2: an example of 12 tokens does not fit --batch-tokens 8, as 1 others do not; raise it to 11 or more, or"
    )
    with pytest.raises(DataError, match=says):  # the longest: nothing is beyond what it asks for
        Loader(examples, 8, seed=0)


def test_sequential_is_every_example_in_order():
    batches = Loader(EXAMPLES, 8, seed=0).sequential()
    assert [d for b in batches for d in b.documents] == list(range(7))
    assert all(b.physical_tokens <= 8 for b in batches)
    assert sum(b.n_labelled for b in batches) == sum(e.n_labelled for e in EXAMPLES)


def test_windows_are_next_token_pairs_from_every_start():
    sampler = WindowSampler(range(100, 110), context=4, batch=50, seed=1)
    assert sampler.starts == 6
    counts: collections.Counter = collections.Counter()
    for _ in range(40):
        for x, y in zip(*sampler.next(), strict=True):
            assert y == [i + 1 for i in x]
            assert x == list(range(x[0], x[0] + 4))
            counts[x[0]] += 1
    assert set(counts) == set(range(100, 106))
    assert min(counts.values()) > 2000 / 6 * 0.8  # uniform: 333 each, standard deviation 17


def test_window_edges():
    with pytest.raises(DataError, match="4 tokens; a context of 4 needs at least 5"):
        WindowSampler([1, 2, 3, 4], 4, 1, 0)
    one = WindowSampler([1, 2, 3, 4, 5], context=4, batch=3, seed=0)
    assert one.next() == ([[1, 2, 3, 4]] * 3, [[2, 3, 4, 5]] * 3)


def test_window_sampler_owns_its_randomness_and_resumes():
    a, b = (WindowSampler(list(range(50)), 5, 4, seed=2) for _ in range(2))
    torch.manual_seed(123)
    first = a.draw()
    assert first == b.draw()
    state = a.state_dict()
    want = [a.draw() for _ in range(3)]
    c = WindowSampler(list(range(50)), 5, 4, seed=9)
    c.load_state_dict(state)
    assert [c.draw() for _ in range(3)] == want
