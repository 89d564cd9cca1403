"""flash-attn 2's functions on attention, beside their meaning written out."""

import inspect
import itertools

import pytest
import torch

from riftco import functional
from riftco.functional import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    rope,
    rope_tables,
)

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
BOUNDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {  # flash-attn 2.8
    "flash_attn_func": f"q, k, v, {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {BOUNDS}, {OPTIONS}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {BOUNDS}, {OPTIONS}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)


def rand(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def meaning(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, sinks=None):
    """q [T, H, D], k [S, K, D], v [S, K, Dv] -> out [T, H, Dv], lse [H, T]: one document, as flash-attn defines it."""
    (T, H, D), (S, K, _) = q.shape, k.shape
    k, v = (t.repeat_interleave(H // K, 1) for t in (k, v))
    s = torch.einsum("thd,shd->hts", q, k) * (D**-0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    gap = torch.arange(S) - (torch.arange(T)[:, None] + S - T)
    if slopes is not None:
        s = s - slopes[:, None, None] * gap.abs()
    left, right = window[0], 0 if causal else window[1]
    see = torch.ones(T, S, dtype=torch.bool)
    see = see & (gap >= -left) if left >= 0 else see
    see = see & (gap <= right) if right >= 0 else see
    s = s.masked_fill(~see, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.view(-1, 1, 1).expand(-1, T, 1)], -1)
    lse = s.logsumexp(-1)
    p = torch.where(lse[..., None] == -torch.inf, 0.0, (s - lse[..., None]).exp())[..., :S]
    return torch.einsum("hts,shd->thd", p, v), lse


def batched(q, k, v, **options):
    pairs = [meaning(*t, **options) for t in zip(q, k, v)]
    return tuple(torch.stack(t) for t in zip(*pairs))


def same(got, want, leaves):
    """Results and the gradients of the first, and of lse where rows see something."""
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)
    weights = [rand(*t.shape) for t in want]

    def loss(pair):
        return sum((t.masked_fill(t.detach() == -torch.inf, 0.0) * w).sum() for t, w in zip(pair, weights))

    for name, a, b in zip("abcdef", *(torch.autograd.grad(loss(pair), leaves) for pair in (got, want))):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"gradient {name}: {m}")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns(name):
    """Names, order and defaults; what is added comes by keyword only, so a positional call can never drift."""
    scope: dict = {}
    exec(f"def theirs({SIGNATURES[name]}): pass", scope)
    theirs = list(inspect.signature(scope["theirs"]).parameters.values())
    ours = list(inspect.signature(getattr(functional, name)).parameters.values())
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert all(p.kind == p.KEYWORD_ONLY for p in ours[len(theirs) :])


@pytest.mark.parametrize("T,S", [(5, 5), (2, 5), (5, 2)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (2, 1)},
        {"window_size": (2, -1), "causal": True},
        {"window_size": (None, None), "softcap": 1.5},
        {"softmax_scale": 0.7, "causal": True},
        {"alibi": True},
        {"alibi": True, "causal": True},
        {"alibi": True, "causal": True, "window_size": (1, 4), "softcap": 2.0},
        {"learnable_sink": True, "causal": True},
    ],
    ids=str,
)
def test_flash_attn_func(T, S, options):
    """Bottom-right aligned; rows that see nothing give 0; lse is differentiable, alibi_slopes and sinks too."""
    q, k, v = rand(2, T, 4, 8), rand(2, S, 2, 8), rand(2, S, 2, 6)
    options = dict(options)
    slopes = SLOPES.clone() if options.pop("alibi", False) else None
    sinks = rand(4) if options.pop("learnable_sink", False) else None
    leaves = [t.requires_grad_() for t in (q, k, v, slopes, sinks) if t is not None]
    out, lse, probabilities = flash_attn_func(
        q, k, v, **options, alibi_slopes=slopes, learnable_sink=sinks, return_attn_probs=True
    )
    assert probabilities.numel() == 0
    window = tuple(-1 if side is None else side for side in options.get("window_size", (-1, -1)))
    want = batched(
        q, k, v, scale=options.get("softmax_scale"), causal=options.get("causal", False), window=window,
        softcap=options.get("softcap", 0.0), slopes=slopes, sinks=sinks,
    )  # fmt: skip
    same((out, lse), want, leaves)
    tail = {"alibi_slopes": slopes, "learnable_sink": sinks}
    assert torch.equal(flash_attn_func(q, k, v, **options, **tail), out)
    assert torch.equal(flash_attn_func(q, k, v, **options, **tail, return_lse=True)[1], lse)


def test_alibi_of_each_sequence():
    q, k, v = rand(2, 3, 4, 8), rand(2, 5, 4, 8), rand(2, 5, 4, 8)
    slopes = torch.stack([SLOPES, SLOPES.flip(0)])
    for causal in (False, True):
        got = flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes, return_attn_probs=True)
        for b in range(2):
            out, lse = meaning(q[b], k[b], v[b], causal=causal, slopes=slopes[b])
            torch.testing.assert_close(got[0][b], out)
            torch.testing.assert_close(got[1][b], lse)


def test_packed_forms_are_views():
    qkv, cu = rand(2, 6, 3, 4, 8).requires_grad_(), torch.tensor([0, 6, 12], dtype=torch.int32)
    q, k, v = qkv.unbind(2)
    flat = qkv.flatten(0, 1)
    for options in ({}, {"causal": True, "softmax_scale": 0.3, "window_size": (3, 0)}):
        want = flash_attn_func(q, k, v, **options)
        gradient = torch.autograd.grad(want.square().sum(), qkv)[0]
        for out in (
            flash_attn_qkvpacked_func(qkv, **options),
            flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options),
            flash_attn_varlen_qkvpacked_func(flat, cu, 6, **options).view_as(want),
            flash_attn_varlen_kvpacked_func(flat[:, 0], flat[:, 1:], cu, cu, 6, 6, **options).view_as(want),
        ):
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(torch.autograd.grad(out.square().sum(), qkv)[0], gradient)
    positional = (0.0, 0.3, True, (3, 0), 1.5, SLOPES, True, True)
    for a, b in zip(flash_attn_qkvpacked_func(qkv, *positional), flash_attn_func(q, k, v, *positional)):
        assert torch.equal(a, b)
    for a, b in zip(flash_attn_kvpacked_func(q, qkv[:, :, 1:], *positional), flash_attn_func(q, k, v, *positional)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal):
    cu_q, cu_k = (0, 4, 4, 5, 9), (0, 2, 8, 8, 14)  # empty queries, empty keys
    q, k, v = rand(11, 4, 8), rand(14, 2, 8), rand(14, 2, 8)
    q[9:] = torch.nan  # rows of no document
    leaves = [t.requires_grad_() for t in (q, k, v)]
    bounds = torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)
    options = {"causal": causal, "window_size": (3, -1), "softcap": 2.0, "return_attn_probs": True}
    out, lse, _ = flash_attn_varlen_func(q, k, v, *bounds, 4, 6, **options)
    assert (out[9:] == 0).all() and (lse[:, 9:] == -torch.inf).all()
    pieces = zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k))
    want = [meaning(q[a:b], k[c:d], v[c:d], causal=causal, window=(3, -1), softcap=2.0) for (a, b), (c, d) in pieces]
    same((out[:9], lse[:, :9]), (torch.cat([o for o, _ in want]), torch.cat([x for _, x in want], -1)), leaves)

    pages_k, pages_v = (rand(5, 3, 2, 8).requires_grad_() for _ in range(2))
    table = torch.tensor([[3, -1], [4, 3], [99, 99], [0, 1]], dtype=torch.int32)
    leaves = [q, pages_k, pages_v]
    pair = flash_attn_varlen_func(q, pages_k, pages_v, *bounds, 4, 6, **options, block_table=table)[:2]
    want = []
    for (a, b), n, row in zip(itertools.pairwise(cu_q), (2, 6, 0, 6), table.clamp(0, 4).long()):
        k, v = (t[row].flatten(0, 1)[:n] for t in (pages_k, pages_v))
        want.append(meaning(q[a:b], k, v, causal=causal, window=(3, -1), softcap=2.0))
    same((pair[0][:9], pair[1][:, :9]), (torch.cat([o for o, _ in want]), torch.cat([x for _, x in want], -1)), leaves)


def test_strides_of_the_upstream_gradient():
    """A gradient that arrives transposed, expanded or from a slice; MQA, as in the report that found it elsewhere."""
    q, k, v = rand(2, 8, 4, 16), rand(2, 8, 1, 16), rand(2, 8, 1, 16)
    for shape in ((2, 8, 4, 16), (2, 4, 8, 16)):
        q = rand(*shape) if shape[1] == 8 else rand(*shape).transpose(1, 2)  # transposed q too
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = flash_attn_func(*leaves)
        for d_out in (
            rand(16, 4, 8, 2).permute(3, 2, 1, 0),
            rand(2, 1, 4, 1).expand(2, 8, 4, 16),
            rand(2, 8, 4, 32)[..., ::2],
        ):
            got, want = (torch.autograd.grad(out, leaves, d, retain_graph=True) for d in (d_out, d_out.contiguous()))
            for a, b in zip(got, want):
                torch.testing.assert_close(a, b)
        want = torch.autograd.grad(batched(*leaves)[0], leaves, d_out)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)


def test_deterministic_is_passed_on(monkeypatch):
    from riftco.kernels.attention import flash_attn_twins, op

    seen = []
    monkeypatch.setattr(
        flash_attn_twins, "attention", lambda *a, **o: seen.append(o["deterministic"]) or op.attention(*a, **o)
    )
    q = rand(1, 3, 2, 8)
    flash_attn_func(q, q, q, deterministic=True)
    flash_attn_func(q, q, q)
    assert seen == [True, None]


def test_dropout_is_reproducible():
    q = rand(2, 6, 4, 8)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(flash_attn_func(q, q, q, 0.3, return_attn_probs=True))
    assert torch.equal(outs[0][0], outs[1][0]) and not torch.equal(outs[0][0], outs[2][0])
    assert torch.equal(outs[0][1], outs[2][1])  # lse is without dropout


def test_compile():
    q, k, v = (rand(2, 5, 4, 8).requires_grad_() for _ in range(3))
    for options in ({"causal": True}, {"alibi_slopes": SLOPES, "window_size": (2, 2)}):
        f = lambda q, k, v, options=options: flash_attn_func(q, k, v, **options, return_attn_probs=True)[:2]  # noqa: E731
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        same(compiled(q, k, v), f(q, k, v), [q, k, v])
    flat, cu = q.detach().flatten(0, 1), torch.tensor([0, 4, 10], dtype=torch.int32)
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    args = (flat, flat, flat, cu, cu, 6, 6)
    torch.testing.assert_close(compiled(*args, causal=True), flash_attn_varlen_func(*args, causal=True))
    q, k_cache, v_cache, k, v, held = cached()
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    copies = [t.clone() for t in (k_cache, v_cache)]
    got = compiled(q, *copies, k, v, cache_seqlens=held, causal=True)
    torch.testing.assert_close(got, flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=held, causal=True))
    assert torch.equal(copies[0].nan_to_num(9.0), k_cache.nan_to_num(9.0))


def test_autocast_and_half():
    q = torch.randn(2, 6, 4, 16)
    want = flash_attn_func(q, q, q, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast = flash_attn_func(q, q, q, causal=True)
    assert cast.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), want, atol=3e-2, rtol=3e-2)
    for dtype in (torch.float16, torch.bfloat16):
        out, lse = flash_attn_func(*[q.to(dtype)] * 3, causal=True, window_size=(2, 0), return_lse=True)
        assert out.dtype == dtype and lse.dtype == torch.float32
        torch.testing.assert_close(
            out.float(), flash_attn_func(q, q, q, causal=True, window_size=(2, 0)), atol=3e-2, rtol=3e-2
        )


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


def test_refusals():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 3, 8)
    cu = torch.tensor([0, 10], dtype=torch.int32)
    flat = q.flatten(0, 1)
    for error, text, call in [
        (ValueError, "multiple of key heads", lambda: flash_attn_func(q, k, k)),
        (ValueError, "alibi_slopes must be floating", lambda: flash_attn_func(q, q, q, alibi_slopes=torch.ones(3))),
        (ValueError, "window", lambda: flash_attn_func(q, q, q, window_size=(-3, 0))),
        (ValueError, "softcap", lambda: flash_attn_func(q, q, q, softcap=-1.0)),
        (ValueError, "dropout_p", lambda: flash_attn_func(q, q, q, 1.0)),
        (ValueError, "sinks", lambda: flash_attn_func(q, q, q, learnable_sink=torch.ones(3))),
        (ValueError, r"qkv must be \[B, T, 3, heads, D\]", lambda: flash_attn_qkvpacked_func(q)),
        (ValueError, r"kv must be \[B, T, 2, heads, D\]", lambda: flash_attn_kvpacked_func(q, q[:, :, None])),
        (ValueError, r"qkv must be \[total, 3", lambda: flash_attn_varlen_qkvpacked_func(q, cu, 10)),
        (ValueError, r"kv must be \[total, 2", lambda: flash_attn_varlen_kvpacked_func(flat, q, cu, cu, 10, 10)),
        (
            NotImplementedError,
            "alibi_slopes",
            lambda: flash_attn_varlen_func(flat, flat, flat, cu, cu, 10, 10, alibi_slopes=torch.ones(4)),
        ),
        (
            ValueError,
            r"block_table must be int32 or int64 \[1, pages\]",
            lambda: flash_attn_varlen_func(flat, flat, flat, cu, cu, 10, 10, block_table=cu[None]),
        ),
    ]:
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(TypeError):  # no keyword of another version passes unread
        flash_attn_func(q, q, q, qv=q)


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
