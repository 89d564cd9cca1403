"""Micro-batches padded to few shapes, as a step graph takes them; tests/tpu has XLA's."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from train.tiny import packed

from riftco.data import Buckets


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=30), min_size=1, max_size=8))
def test_shapes_grow_by_an_eighth_at_most_and_nothing_is_changed(batches):
    buckets, most = Buckets(fine=True), 0
    for lengths in batches:
        batch = packed(lengths)
        padded, n = buckets(batch), batch.physical_tokens
        most = max(most, n)
        assert most <= padded.physical_tokens <= 9 * most // 8 + 1
        assert padded.n_labelled >= int((padded.target >= 0).sum()) == batch.n_labelled
        assert padded.n_labelled <= padded.physical_tokens and padded.max_seqlen >= batch.max_seqlen
        assert torch.equal(padded.input_ids[:n], batch.input_ids) and torch.equal(padded.target[:n], batch.target)
        assert bool((padded.target[n:] < 0).all()) and padded.row_weight is None
        cu, own = padded.cu_seqlens, batch.cu_seqlens
        assert torch.equal(cu[: len(own)], own) and bool((cu[len(own) :] == n).all())


def test_a_batch_that_fits_makes_no_new_shape():
    buckets, shapes = Buckets(fine=True), set()
    for lengths in ([30, 34], [5], [64], [1] * 16, [20, 20, 20]):
        padded = buckets(packed(lengths))
        shapes.add((padded.physical_tokens, padded.geometry.sequences, padded.n_labelled))
    assert shapes == {(64, 16, 64)}
