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
