"""flash-attn 2's function over a cache, beside its meaning written out."""

import pytest
import torch
from test_flash_attn_twins import SLOPES, meaning, rand, same

from riftco.functional import flash_attn_with_kvcache, rope, rope_tables


def cached(B=3, T=2, new=2, W=8, H=4, K=2, D=8, held=(3, 0, 6), slots=4):
    """q, k_cache, v_cache, k, v and lengths; the caches hold NaN beyond what is held."""
    caches = [rand(slots, W, K, D) for _ in range(2)]
    for b, n in enumerate(held):
        for cache in caches:
            cache[b, n:] = torch.nan
    return rand(B, T, H, D), *caches, rand(B, new, K, D), rand(B, new, K, D), torch.tensor(held, dtype=torch.int32)


def joined(k_cache, v_cache, k, v, held, slots=None):
    """What each sequence attends to, (k, v) each."""
    order = range(len(held)) if slots is None else slots
    return [
        tuple(torch.cat([cache[s, :n], rows[b]]) for cache, rows in ((k_cache, k), (v_cache, v)))
        for b, (s, n) in enumerate(zip(order, held.tolist()))
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {},
        {"window_size": (3, 0)},
        {"causal": True, "softcap": 1.5, "softmax_scale": 0.4},
        {"causal": True, "alibi": True},
        {"alibi": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("T", [1, 2])
def test_kvcache_appends_and_attends(options, T):
    q, k_cache, v_cache, k, v, held = cached(T=T)
    before = [t.clone() for t in (k_cache, v_cache)]
    options = dict(options)
    slopes = SLOPES if options.pop("alibi", False) else None
    leaves = [t.requires_grad_() for t in (q, k, v)]
    pair = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=held, **options, alibi_slopes=slopes, return_softmax_lse=True
    )
    plain = {
        "scale": options.get("softmax_scale"), "causal": options.get("causal", False),
        "window": options.get("window_size", (-1, -1)), "softcap": options.get("softcap", 0.0), "slopes": slopes,
    }  # fmt: skip
    want = [meaning(q[b], *kv, **plain) for b, kv in enumerate(joined(*before, k, v, held))]
    same(pair, tuple(torch.stack(t) for t in zip(*want)), leaves)
    for cache, old, rows in ((k_cache, before[0], k), (v_cache, before[1], v)):
        for b, n in enumerate(held.tolist()):
            assert torch.equal(cache[b, n : n + 2], rows[b])
            old[b, n : n + 2] = rows[b].detach()
        assert torch.equal(cache.nan_to_num(9.0), old.nan_to_num(9.0))  # nothing else was touched


def test_kvcache_without_new_keys():
    """Lengths include the queries' rows; an int stands for every sequence, and None for the whole cache."""
    q, k_cache, v_cache, *_ = cached(held=(8, 8, 8), T=3)
    q.requires_grad_()
    for lens in (torch.tensor([5, 1, 8]), 4, None):
        pair = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, causal=True, return_softmax_lse=True)
        each = lens.tolist() if isinstance(lens, torch.Tensor) else [8 if lens is None else lens] * 3
        want = [meaning(q[b], k_cache[b, :n], v_cache[b, :n], causal=True) for b, n in enumerate(each)]
        same(pair, tuple(torch.stack(t) for t in zip(*want)), [q])
    empty = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=0)
    assert (empty == 0).all()


def test_kvcache_slots_and_pages():
    """A scalar length with pages belongs to q's batch, not to the pages."""
    q, k_cache, v_cache, k, v, _ = cached(held=())
    idx, held = torch.tensor([3, 0, 2]), torch.tensor([2, 2, 2])
    want = [meaning(q[b], *kv, causal=True)[0] for b, kv in enumerate(joined(k_cache, v_cache, k, v, held, idx))]
    slots = [t.clone() for t in (k_cache, v_cache)]
    out = flash_attn_with_kvcache(q, *slots, k, v, cache_seqlens=held, cache_batch_idx=idx, causal=True)
    torch.testing.assert_close(out, torch.stack(want))
    assert torch.equal(slots[0][3, 2:4], k[0]) and torch.equal(slots[0][1], k_cache[1])

    table = torch.tensor([[7, 1, 0], [2, 3, 99], [5, 4, -3]], dtype=torch.int32)  # pages of 3 rows
    pages = [rand(8, 3, 2, 8) for _ in range(2)]
    old = [t.clone() for t in pages]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=2, block_table=table, causal=True)
    flat = [t[table.clamp(0, 7).long()].flatten(1, 2) for t in old]
    want = torch.stack([meaning(q[b], *kv, causal=True)[0] for b, kv in enumerate(joined(*flat, k, v, held))])
    same((out,), (want,), leaves)
    assert torch.equal(pages[0][7, 2], k[0, 0]) and torch.equal(pages[0][1, 0], k[0, 1])
    assert torch.equal(pages[0][6], old[0][6])


@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_of_another_dtype(causal):
    """The cache stores what its dtype holds; q keeps its own."""
    q, k_cache, v_cache, k, v, held = (t.nan_to_num(0.0) for t in cached())
    caches = [t.bfloat16() for t in (k_cache, v_cache)]
    kv = joined(*(t.double() for t in caches), k, v, held)
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=held, causal=causal)
    assert out.dtype == q.dtype and torch.equal(caches[0][0, 3:5], k[0].bfloat16())
    want = torch.stack([meaning(q[b], *kv[b], causal=causal)[0] for b in range(3)])
    torch.testing.assert_close(out, want, atol=1e-7 if causal else 1e-2, rtol=1e-2)


def test_kvcache_left_padding():
    q, k_cache, v_cache, k, v, held = cached(held=(5, 4, 6))
    pad = torch.tensor([2, 0, 5])
    want = [
        meaning(q[b], *(t[p:] for t in kv), causal=True)
        for b, (kv, p) in enumerate(zip(joined(k_cache, v_cache, k, v, held), pad.tolist()))
    ]
    pair = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=held, cache_leftpad=pad, causal=True, return_softmax_lse=True
    )
    for got, expected in zip(pair, zip(*want)):
        torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_rotary(interleaved, causal):
    """k is turned at its place in the cache, and so is q if causal; else all of q at the cache's length."""
    q, k_cache, v_cache, k, v, held = cached(T=2)
    cos, sin = rope_tables(8, 16)
    places = held[:, None] + torch.arange(2)
    at = places if causal else held[:, None].expand(3, 2)
    kv = joined(k_cache, v_cache, rope(k, k, cos, sin, positions=places, interleaved=interleaved)[0], v, held)
    turned = rope(q, q, cos, sin, positions=at, interleaved=interleaved)[0]
    want = torch.stack([meaning(turned[b], *kv[b], causal=causal)[0] for b in range(3)])
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, held, causal=causal, rotary_interleaved=interleaved
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(k_cache[0, 3:5], kv[0][0][3:])


def test_kvcache_backward_after_the_next_append():
    """A later step writes other rows of the same cache before the earlier one's backward."""
    q, k_cache, v_cache, k, v, held = cached()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    before = [t.clone() for t in (k_cache, v_cache)]
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=held, causal=True)
    alone = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=held + 2, causal=True)
    with torch.no_grad():
        flash_attn_with_kvcache(
            q[:, :1], k_cache, v_cache, k[:, :1] + 1, v[:, :1], cache_seqlens=held + 2 - (held == 6).int()
        )
    want = torch.stack([meaning(q[b], *kv, causal=True)[0] for b, kv in enumerate(joined(*before, k, v, held))])
    got, expected = (torch.autograd.grad(o[:2].square().sum(), leaves) for o in (out, want))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(torch.autograd.grad(alone[:2].square().sum(), q)[0], expected[0])


def test_kvcache_compiled():
    q, k_cache, v_cache, k, v, held = cached()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    copies = [t.clone() for t in (k_cache, v_cache)]
    got = compiled(q, *copies, k, v, cache_seqlens=held, causal=True)
    torch.testing.assert_close(got, flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=held, causal=True))
    assert torch.equal(copies[0].nan_to_num(9.0), k_cache.nan_to_num(9.0))


def test_kvcache_refusals(monkeypatch):
    q, k_cache, v_cache, k, v, held = cached()
    cos, sin = rope_tables(8, 16)
    table = torch.zeros(3, 2, dtype=torch.int32)
    call = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": held}
    for text, bad in [
        ("4 dimensions", {"q": q[0]}),
        ("k and v must be given together", {"k": k}),
        ("k must be", {"k": k[:, :, :1], "v": v}),
        ("need cache_seqlens", {"k": k, "v": v, "cache_seqlens": None}),
        ("rotary_cos and rotary_sin must be given", {"k": k, "v": v, "rotary_cos": cos}),
        ("need k and v", {"rotary_cos": cos, "rotary_sin": sin}),
        ("cannot be combined", {"block_table": table, "cache_batch_idx": held}),
        (r"cache_seqlens must be int32 or int64 \[3\]", {"cache_seqlens": held.float()}),
        (r"cache_seqlens must be int32 or int64 \[3\]", {"cache_seqlens": held[:1]}),
        (r"cache_batch_idx must be", {"cache_batch_idx": held[:2]}),
        (r"cache_leftpad must be", {"cache_leftpad": held[:2]}),
        (r"block_table must be int32 or int64 \[3, pages\]", {"block_table": table[0]}),
        ("give cache_batch_idx", {"k_cache": k_cache[:2], "v_cache": v_cache[:2]}),
        ("must have one shape", {"v_cache": v_cache[..., :4]}),
    ]:
        with pytest.raises(ValueError, match=text):
            flash_attn_with_kvcache(**{**call, **bad})
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    untouched = k_cache.clone()
    with pytest.raises(ValueError, match="do not fit a cache of 8 rows"):
        flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=held + 1)
    assert torch.equal(k_cache.nan_to_num(9.0), untouched.nan_to_num(9.0))
