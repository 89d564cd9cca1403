"""Micro-batches padded to few shapes, as a step graph takes them; tests/tpu has XLA's."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from train.tiny import packed

from riftco.data import Buckets


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=8))
def test_shapes_grow_by_an_eighth_at_most_and_nothing_is_changed(batches):
    buckets, most, documents = Buckets(fine=True), 0, 0
    for lengths in batches:
        batch = packed(lengths)
        padded, n = buckets(batch), batch.physical_tokens
        most, documents = max(most, n), max(documents, len(lengths))
        assert documents <= padded.geometry.sequences < 2 * documents, "attention would take long documents for short"
        assert most <= padded.physical_tokens <= 9 * most // 8 + 1
        assert padded.n_labelled >= int((padded.target >= 0).sum()) == batch.n_labelled
        assert padded.n_labelled <= padded.physical_tokens and padded.max_seqlen >= batch.max_seqlen
        assert torch.equal(padded.input_ids[:n], batch.input_ids) and torch.equal(padded.target[:n], batch.target)
        assert bool((padded.target[n:] < 0).all()) and padded.row_weight is None
        cu, own = padded.cu_seqlens, batch.cu_seqlens
        assert torch.equal(cu[: len(own)], own) and bool((cu[len(own) :] == n).all())


def test_a_batch_that_fits_makes_no_new_shape():
    buckets, shapes = Buckets(fine=True), set()
    for lengths in ([4] * 16, [30, 34], [5], [64], [20, 20, 20]):
        padded = buckets(packed(lengths))
        shapes.add((padded.physical_tokens, padded.geometry.sequences, padded.n_labelled))
    assert shapes == {(64, 16, 64)}


def test_weights_that_some_batches_have_come_with_all_from_then_on():
    buckets = Buckets(fine=True)
    assert buckets(packed([3])).row_weight is None
    assert buckets(packed([3], weight=0.5)).row_weight.tolist() == [0.5] * 3
    assert buckets(packed([2])).row_weight.tolist() == [1.0, 1.0, 0.0]


def test_no_document_is_named_longer_than_the_model_takes():
    buckets = Buckets(fine=True, context=48)
    assert [buckets(packed([n])).max_seqlen for n in (9, 33, 48, 5)] == [16, 48, 48, 48]
    assert buckets(packed([49])).max_seqlen == 49, "a document that is too long stays one, for the model to refuse"


def test_shapes_go_on_where_they_were():
    first = Buckets(fine=True)
    for batch in (packed([30, 34], weight=0.5), packed([1] * 20), packed([5])):
        padded = first(batch)
    other = Buckets(fine=True)
    other.load_state_dict(first.state_dict())
    again = other(packed([5]))
    assert (again.physical_tokens, again.geometry.sequences, again.n_labelled, again.max_seqlen) == (64, 32, 64, 64)
    assert torch.equal(again.row_weight, padded.row_weight)
