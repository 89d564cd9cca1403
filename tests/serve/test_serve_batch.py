"""A batch and its views."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from riftco.serve import Batch, Refused

FIELDS = [f.name for f in dataclasses.fields(Batch)]


@st.composite
def batches(draw):
    parts = []
    for slot in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 6))
        label = draw(st.none() | st.lists(st.integers(-1, 9), min_size=n, max_size=n))
        weight = draw(st.none() | st.lists(st.floats(0, 4, width=32), min_size=n, max_size=n))
        ids = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
        start, output = draw(st.integers(0, 5)), draw(st.sampled_from(["last", "all", "none"]))
        parts.append(Batch.of(slot, start, ids, output=output, label=label, label_weight=weight))
    return parts


def same(a, b):
    return all(
        (s is None and t is None) or torch.equal(s, t) for s, t in ((getattr(a, f), getattr(b, f)) for f in FIELDS)
    )


@given(batches(), st.data())
def test_no_view_drops_a_field(parts, data):
    """Slices hold every field's rows; joined again they are the batch."""
    batch = Batch.join(parts)
    assert len(batch) == sum(map(len, parts)) and batch.n_labels == sum(p.n_labels for p in parts)
    cut = data.draw(st.integers(1, len(batch)))
    pieces = [p for p in (batch.slice(0, cut), batch.slice(cut, len(batch))) if len(p)]
    for piece in pieces:
        assert all((getattr(piece, f) is None) == (getattr(batch, f) is None) for f in FIELDS)
        assert all(len(getattr(piece, f)) == len(piece) for f in FIELDS if getattr(piece, f) is not None)
    assert same(Batch.join(pieces), batch)
    plain = batch.unlabelled()
    assert plain.label is None and plain.label_weight is None and torch.equal(plain.output, batch.output)


def test_runs_are_the_slots_in_order():
    batch = Batch.join([Batch.of(2, 5, [1, 2, 3]), Batch.of(0, 0, [4])])
    assert list(batch.runs()) == [(2, 5, 0, 3), (0, 0, 3, 4)]
    assert batch.output.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    "field,value", [("label", torch.ones(2)), ("output", torch.ones(3)), ("label_weight", torch.ones(4))]
)
def test_columns_are_checked(field, value):
    batch = dataclasses.replace(Batch.of(0, 0, [1, 2, 3], label=[-1, 2, 3]), **{field: value})
    with pytest.raises(Refused, match=f"{field} must be"):
        batch.check(9)
    with pytest.raises(Refused, match="output must be last, all or none"):
        Batch.of(0, 0, [1], output="first")
