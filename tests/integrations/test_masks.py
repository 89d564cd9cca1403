"""riftco's masks show what transformers' matrices show, without a matrix wherever a few numbers say it."""

import pytest
import torch
from transformers import masking_utils as hf

from riftco.integrations.transformers.masks import Mask, mask

B, T = 3, 12


def seen(made: Mask) -> torch.Tensor:
    """bool [B, T, S]: the matrix that a mask stands for."""
    t, s = torch.arange(made.T)[:, None], torch.arange(made.S)
    lens = torch.full((B,), made.S) if made.k_lens is None else made.k_lens
    at = t + lens[:, None, None] - made.T
    show = (s < lens[:, None, None]).expand(B, made.T, made.S)
    left, right = made.window
    if left is not None:
        show = show & (s >= at - left)
    if right is not None:
        show = show & (s <= at + right)
    if made.causal:
        show = show & (s <= at)
    if made.visible is not None:
        show = show & made.visible[:, 0]
    if made.documents is not None:
        rows = made.documents
        keys = rows if made.key_documents is None else made.key_documents
        show = torch.zeros(B, made.T, made.S, dtype=torch.bool)
        for q0, q1, k0, k1 in zip(rows, rows[1:], keys, keys[1:]):
            for row in range(int(q0), int(q1)):
                place = row - int(q0) + int(k1 - k0) - int(q1 - q0) + int(k0)
                low = int(k0) if left is None else max(int(k0), place - left)
                b = row // made.T
                show[b, row % made.T, low - b * made.S : max(place + 1, low) - b * made.S] = True
    return show


def matrix(**arguments) -> torch.Tensor:
    options = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return hf.sdpa_mask(**{**arguments, **options}).expand(B, 1, -1, -1)[:, 0]


def paddings():
    left, right, holes, full = (torch.ones(B, T, dtype=torch.bool) for _ in range(4))
    left[0, :5], left[2, :1] = False, False
    right[1, 7:], right[2, 11:] = False, False
    holes[0, 3:5], holes[1, :2], holes[2, 8:] = False, False, False
    empty = left.clone()
    empty[1] = False
    return {"none": None, "full": full, "left": left, "right": right, "holes": holes, "empty": empty}


FUNCTIONS = {
    "causal": hf.causal_mask_function,
    "window": hf.sliding_window_causal_mask_function(4),
    "both sides": hf.bidirectional_mask_function,
    "window both sides": hf.sliding_window_bidirectional_mask_function(3),
}
SIZES = {  # queries, keys, offset of the queries, offset of the keys
    "no cache": (T, T, 0, 0),
    "cache": (4, T, T - 4, 0),
    "one token": (1, T, T - 1, 0),
    "cut cache": (3, 7, T - 3, T - 7),
    "static cache, empty": (5, T, torch.tensor(0), 0),
    "static cache, filling": (3, T, torch.tensor(4), 0),
}


@pytest.mark.parametrize("padding", list(paddings()))
@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("function", list(FUNCTIONS))
def test_a_mask_shows_what_transformers_matrix_shows(function, sizes, padding):
    q, kv, q_at, kv_at = SIZES[sizes]
    valid = paddings()[padding]
    arguments = {
        "batch_size": B, "q_length": q, "kv_length": kv, "q_offset": q_at, "kv_offset": kv_at,
        "mask_function": FUNCTIONS[function], "attention_mask": valid,
    }  # fmt: skip
    made, want = mask(**arguments), matrix(**arguments)
    got = seen(made)
    if valid is not None and padding == "right" and q == kv:  # rows of padding behind all others may see themselves
        rows = valid[:, -q:, None]
        got, want = got & rows, want & rows
    assert torch.equal(got, want)
    aligned = not isinstance(q_at, torch.Tensor) or function in ("causal", "window", "both sides")
    if aligned:  # no matrix: at most one row of keys
        assert made.visible is None or made.visible.shape[-2] == 1
    if padding in ("none", "full") and aligned and q > 1:  # a decoding step does not look
        assert made.visible is None
    if padding in ("left", "right") and sizes == "no cache" and function in ("causal", "window"):
        assert made.visible is None


@pytest.mark.parametrize("window", [None, 3])
def test_packed_documents(window):
    positions = torch.tensor([[*range(5), *range(7)], [*range(1), *range(1), *range(10)], [*range(12)]])
    ids = hf.find_packed_sequence_indices(positions)
    inner = hf.causal_mask_function if window is None else hf.sliding_window_causal_mask_function(window)
    function = hf.and_masks(
        hf.remap_positions_for_packed_sequence(inner, positions), hf.packed_sequence_mask_function(ids)
    )
    arguments = {"batch_size": B, "q_length": T, "kv_length": T, "mask_function": function}
    made = mask(**arguments)
    assert made.documents.tolist() == [0, 5, 12, 13, 14, 24, 36] and made.documents.dtype == torch.int32
    assert made.visible is None and torch.equal(seen(made), matrix(**arguments))


UNKNOWN = {
    "a caller's or": hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: (q < 3) & (k < 3)),
    "a caller's and": hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k % 2 == 0),
    "blocks": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(torch.tensor([[-1] * 4 + [0] * 8] * B))),
    "chunks": hf.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.long)),
    "positions alone": hf.remap_positions_for_packed_sequence(
        hf.causal_mask_function, torch.tensor([[*range(5), *range(7)]] * B)
    ),
    "no function of transformers": lambda b, h, q, k: k <= q + 1,
}


@pytest.mark.parametrize("kind", list(UNKNOWN))
@pytest.mark.parametrize("padding", ["none", "left"])
def test_what_it_does_not_know_becomes_a_matrix(kind, padding):
    arguments = {
        "batch_size": B, "q_length": T, "kv_length": T, "mask_function": UNKNOWN[kind],
        "attention_mask": paddings()[padding],
    }  # fmt: skip
    made = mask(**arguments)
    assert made.visible is not None and made[2:] == (False, (None, None), None, None, None, made.visible)
    assert torch.equal(seen(made), matrix(**arguments))


def test_vmapped_functions_become_a_matrix():
    made = mask(B, T, T, mask_function=hf.causal_mask_function, use_vmap=True)
    assert torch.equal(seen(made), matrix(batch_size=B, q_length=T, kv_length=T))


def test_a_mask_that_is_ready_stays():
    made = mask(B, T, T)
    assert mask(B, T, T, attention_mask=made) is made


def test_a_document_that_begins_one_key_late_is_seen():
    """The comparison above tells it."""
    arguments = {"batch_size": B, "q_length": T, "kv_length": T, "attention_mask": paddings()["left"]}
    made = mask(**arguments)
    late = made.key_documents.clone()
    late[1] += 1
    assert not torch.equal(seen(made._replace(key_documents=late)), matrix(**arguments))
