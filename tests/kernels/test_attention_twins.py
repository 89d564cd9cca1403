"""PyTorch's attention functions on attention, beside PyTorch's own results."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

from riftco.functional import AuxRequest, attention, scaled_dot_product_attention, varlen_attn


def rand(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def both(*tensors, **options):
    """Outputs and gradients of PyTorch's function and its twin, on tensors that want one; a NaN gradient fails."""
    results = []
    for f in (F.scaled_dot_product_attention, scaled_dot_product_attention):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        out = f(*leaves, **options)
        wanted = [t for t in leaves if t.requires_grad]
        upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        results.append((out.detach(), *torch.autograd.grad(out, wanted, upstream)))
    for n, (want, got) in enumerate(zip(*results)):
        torch.testing.assert_close(got, want, msg=lambda m, n=n: f"result {n}: {m}")
    return results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T,S", [(7, 7), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_causal_is_aligned_at_the_top_left(causal, T, S, dtype):
    """PyTorch's alignment, T != S too; attention's own is at the bottom right."""
    q, k, v = (rand(*s, dtype=dtype) for s in ((2, 4, T, 8), (2, 2, S, 8), (2, 2, S, 6)))
    both(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True)
    if causal and T != S:
        ours = attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, scale=0.3).transpose(1, 2)
        assert not torch.allclose(ours, scaled_dot_product_attention(q, k, v, None, 0.0, True, 0.3, True))


@pytest.mark.parametrize(
    "lead,mask",
    [
        ((2, 4), (5, 7)),
        ((2, 4), (1, 7)),
        ((2, 4), (5, 1)),
        ((2, 4), (7,)),
        ((2, 4), (4, 5, 7)),
        ((2, 4), (2, 1, 5, 7)),
        ((2, 4), (2, 4, 1, 7)),
        ((2, 3, 4), (5, 7)),
        ((2, 3, 4), (3, 1, 5, 7)),  # some of several leading dimensions expanded
        ((2, 3, 4), (2, 1, 4, 5, 7)),
        ((2, 3, 4), (2, 3, 1, 1, 7)),
        ((4,), (5, 7)),
        ((4,), (4, 5, 7)),
        ((), (5, 7)),
    ],
)
@pytest.mark.parametrize("floating", [False, True])
def test_mask_broadcasts(lead, mask, floating):
    q, k, v = rand(*lead, 5, 8), rand(*lead, 7, 8), rand(*lead, 7, 6)
    m = rand(*mask)
    if not floating:
        m = m > -0.3
    if len(mask) == 1:  # PyTorch's own kernels refuse it
        torch.testing.assert_close(
            scaled_dot_product_attention(q, k, v, m), F.scaled_dot_product_attention(q, k, v, m[None])
        )
    else:
        both(q, k, v, m)
        both(*(t.float() for t in (q, k, v)), m.float() if floating else m)


def test_pytorchs_causal_biases():
    """They hold no elements: reading them as a mask would be silently wrong."""
    q = rand(2, 4, 3, 8)
    for S in (3, 6):
        k = rand(2, 4, S, 8)
        for make in (causal_upper_left, causal_lower_right):
            want = F.scaled_dot_product_attention(q, k, k, make(3, S)._materialize())
            torch.testing.assert_close(scaled_dot_product_attention(q, k, k, make(3, S)), want)
    with pytest.raises(ValueError, match="causal bias of 3 x 5"):
        scaled_dot_product_attention(q, k, k, causal_lower_right(3, 5))
    mask = torch.nn.Parameter(rand(3, 6))  # a subclass that is a mask
    both(q, k, k, mask.detach())
    assert torch.autograd.grad(scaled_dot_product_attention(q, k, k, mask).square().sum(), mask)[0].abs().max() > 0


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_modes_of_autograd(dropout):
    """inference_mode leaves nothing behind; a checkpoint replays the same dropout; torch.func agrees."""
    q, k, v, mask = rand(2, 4, 5, 8), rand(2, 4, 7, 8), rand(2, 4, 7, 8), rand(2, 1, 5, 7)

    def run(*tensors):
        torch.manual_seed(0)
        return scaled_dot_product_attention(*tensors, dropout_p=dropout).square().sum()

    leaves = [t.clone().requires_grad_() for t in (q, k, v, mask)]
    with torch.inference_mode():
        inference = run(*leaves)
    with torch.no_grad():
        assert torch.equal(run(*leaves), inference)
    want = torch.autograd.grad(run(*leaves), leaves)
    f = lambda *t: scaled_dot_product_attention(*t, dropout_p=dropout)  # noqa: E731
    torch.manual_seed(0)
    replayed = checkpoint(f, *leaves, use_reentrant=False)
    torch.manual_seed(7)
    for a, b in zip(torch.autograd.grad(replayed.square().sum(), leaves), want):
        torch.testing.assert_close(a, b)
    if not dropout:
        for a, b in zip(torch.func.grad(run, argnums=(0, 1, 2, 3))(q, k, v, mask), want):
            torch.testing.assert_close(a, b)


def test_mask_of_expanded_heads_is_not_copied(monkeypatch):
    """A mask of [B, 1, T, S] goes to the op as it is."""
    from riftco.kernels.attention import twins

    seen = []
    monkeypatch.setattr(twins, "attention", lambda *a, **o: seen.append(o["bias"]) or attention(*a, **o))
    q, mask = rand(2, 4, 5, 8), rand(2, 1, 5, 5).expand(2, 4, 5, 5)
    scaled_dot_product_attention(q, q, q, mask)
    assert seen[0].data_ptr() == mask.data_ptr() and seen[0].stride() == mask.stride()


@pytest.mark.parametrize("floating", [False, True])
def test_rows_that_see_nothing_are_zero_and_poison_nothing(floating):
    q, k, v = (rand(2, 3, 5, 8).requires_grad_() for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    if floating:
        mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    out = scaled_dot_product_attention(q, k, v, mask)
    assert (out[:, :, 2] == 0).all()
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert (grads[0][:, :, 2] == 0).all() and all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask))


def test_leading_dimensions_broadcast_as_in_pytorch():
    for q, k in [
        ((1, 4, 5, 8), (2, 4, 6, 8)),
        ((2, 4, 5, 8), (4, 6, 8)),
        ((2, 4, 5, 8), (2, 1, 6, 8)),
        ((2, 1, 5, 8), (2, 4, 6, 8)),
        ((3, 1, 4, 5, 8), (2, 4, 6, 8)),
        ((5, 8), (6, 8)),
        ((4, 5, 8), (6, 8)),
    ]:
        both(rand(*q), rand(*k), rand(*k))
    both(rand(2, 3, 4, 5, 8), rand(2, 3, 2, 6, 8), rand(2, 3, 2, 6, 8), enable_gqa=True)
    for shape in [(0, 4, 5, 8), (2, 4, 0, 8)]:
        assert scaled_dot_product_attention(rand(*shape), *[rand(*shape[:2], 6, 8)] * 2).shape == shape
    q = rand(2, 3, 5, 8)
    assert (scaled_dot_product_attention(q, q[:, :, :0], q[:, :, :0]) == 0).all()


def test_strides_of_inputs_upstream_and_result():
    """Transposed and sliced inputs, an upstream gradient of other strides; the result takes view and in-place work."""
    x = rand(2, 6, 3, 4, 8).requires_grad_()  # [B, T, 3, H, D]
    q, k, v = (t.transpose(1, 2) for t in x.unbind(2))
    upstream = rand(8, 6, 4, 2).permute(3, 2, 1, 0)
    for mask in (None, rand(6, 4).T.new_zeros(1, 6).expand(6, 6)):
        want, got = (
            torch.autograd.grad(f(q, k, v, mask), x, upstream)[0]
            for f in (F.scaled_dot_product_attention, scaled_dot_product_attention)
        )
        torch.testing.assert_close(got, want)
    out = scaled_dot_product_attention(q, k, v)
    assert out.shape == q.shape
    assert out.transpose(1, 2).flatten(2)._base is not None or out.transpose(1, 2).is_contiguous()
    out.mul(2).add_(1.0).transpose(1, 2).view(2, 6, 32)


def test_dropout():
    q, k, v = (rand(2, 4, 6, 8) for _ in range(3))
    v = torch.eye(6, 6, dtype=torch.float64).expand(2, 4, 6, 6)  # out is the softmax itself
    torch.manual_seed(3)
    dropped = scaled_dot_product_attention(q, k, v, dropout_p=0.4)
    torch.manual_seed(3)
    assert torch.equal(dropped, scaled_dot_product_attention(q, k, v, dropout_p=0.4))
    assert not torch.equal(dropped, scaled_dot_product_attention(q, k, v, dropout_p=0.4))
    whole = scaled_dot_product_attention(q, k, v)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.6)
    assert 0.4 < kept.double().mean() < 0.8


def test_autocast_as_pytorch():
    q = torch.randn(2, 4, 5, 8)
    mask = torch.randn(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        ours = scaled_dot_product_attention(q, q, q, mask)
        theirs = F.scaled_dot_product_attention(q, q, q, mask)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    q, k, v, mask = rand(2, 4, 5, 8), rand(2, 4, 7, 8), rand(2, 4, 7, 8), rand(2, 1, 5, 7)
    for options in ({"attn_mask": mask}, {"is_causal": True}, {}):
        results = []
        for f in (scaled_dot_product_attention, compiled):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out = f(*leaves, **options)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), leaves)))
        torch.testing.assert_close(*results)


def test_scaled_dot_product_attention_refuses():
    q = torch.randn(1, 4, 5, 8)
    for text, bad in [
        ("attn_mask and is_causal", {"attn_mask": torch.ones(5, 5), "is_causal": True}),
        ("attn_mask must broadcast", {"attn_mask": torch.ones(5, 6)}),
        ("attn_mask must broadcast", {"attn_mask": torch.ones(3, 1, 5, 5)}),
        ("attn_mask must broadcast", {"attn_mask": torch.ones(1, 1, 1, 5, 5)}),
        ("bool or floating", {"attn_mask": torch.ones(5, 5, dtype=torch.int32)}),
        ("dropout_p", {"dropout_p": 1.0}),
        ("leading", {"query": q.expand(3, -1, -1, -1), "key": q.expand(2, -1, -1, -1)}),
        ("enable_gqa", {"key": q[:, :2], "value": q[:, :2]}),
        ("multiple of key heads", {"key": q[:, :3], "value": q[:, :3], "enable_gqa": True}),
        ("floating dtype", {"key": q.half()}),
        ("heads, length, head dim", {"key": q[0, 0, 0]}),
        ("one device", {"key": q.to("meta")}),
    ]:
        with pytest.raises(ValueError, match=text):
            scaled_dot_product_attention(**{"query": q, "key": q, "value": q, **bad})


def alone(q, k, v, cu_q, keys, window, scale=None):
    """Each document by itself through PyTorch, bottom-right aligned; keys: a slice of k and v a document."""
    outs = []
    for (a, b), rows in zip(itertools.pairwise(cu_q), keys):
        x, y, z = (t.transpose(0, 1) for t in (q[a:b], k[rows], v[rows]))
        T, S = x.shape[1], y.shape[1]
        gap = torch.arange(S) - (torch.arange(T)[:, None] + S - T)
        see = (gap >= (-S - T if window[0] < 0 else -window[0])) & (gap <= (S + T if window[1] < 0 else window[1]))
        outs.append(F.scaled_dot_product_attention(x, y, z, see, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 3)])
def test_varlen_attn(window):
    cu_q, cu_k = (0, 4, 4, 5, 9), (0, 6, 8, 9, 11)
    q, k, v = rand(9, 4, 8), rand(11, 2, 8), rand(11, 2, 8)
    bounds = torch.tensor(cu_q, dtype=torch.int32), torch.tensor(cu_k, dtype=torch.int32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = varlen_attn(
        q, k, v, *bounds, 4, 6, window_size=window, enable_gqa=True, return_aux=AuxRequest(lse=True), scale=0.4
    )
    want = alone(q, k, v, cu_q, [slice(a, b) for a, b in itertools.pairwise(cu_k)], window, 0.4)
    torch.testing.assert_close(out, want)
    assert lse.shape == (4, 9)
    weight = rand(*out.shape)
    for got, expected in zip(*(torch.autograd.grad((o * weight).sum(), leaves) for o in (out, want))):
        torch.testing.assert_close(got, expected)
    for aux in (None, AuxRequest()):
        assert torch.equal(
            varlen_attn(q, k, v, *bounds, 4, 6, window_size=window, enable_gqa=True, return_aux=aux, scale=0.4), out
        )


def test_varlen_attn_over_used_keys_and_pages():
    """seqused_k ends a document early; pages lie anywhere and are shared; gradients reach both."""
    cu_q, used, window = (0, 2, 5, 6), (5, 0, 3), (-1, 0)
    q = rand(6, 4, 8).requires_grad_()
    seqused = torch.tensor(used, dtype=torch.int32)
    cu = torch.tensor(cu_q, dtype=torch.int32)
    k, v = (rand(20, 4, 8).requires_grad_() for _ in range(2))
    slots = torch.tensor([0, 7, 14, 20], dtype=torch.int32)
    out = varlen_attn(q, k, v, cu, slots, 3, 7, window_size=window, seqused_k=seqused)
    want = alone(q, k, v, cu_q, [slice(s, s + n) for s, n in zip((0, 7, 14), used)], window)
    torch.testing.assert_close(out, want)
    grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, want)]
    for got, expected in zip(*grads):
        torch.testing.assert_close(got, expected)

    k, v = (rand(6, 4, 4, 8).requires_grad_() for _ in range(2))  # 6 pages of 4 rows
    table = torch.tensor([[5, 1], [99, -7], [5, 0]], dtype=torch.int32)  # the second document uses none
    out = varlen_attn(q, k, v, cu, None, 3, 8, window_size=window, seqused_k=seqused, block_table=table)
    flat = [t.flatten(0, 1) for t in (k, v)]
    rows = [torch.tensor([20, 21, 22, 23, 4]), slice(0, 0), torch.tensor([20, 21, 22])]
    want = alone(q, *flat, cu_q, rows, window)
    torch.testing.assert_close(out, want)
    for got, expected in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, want))):
        torch.testing.assert_close(got, expected)
    empty = varlen_attn(q, k[:0], v[:0], cu, None, 3, 8, seqused_k=seqused * 0, block_table=table)
    assert (empty == 0).all()


def test_varlen_attn_refuses():
    q, k, cu = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.tensor([0, 6], dtype=torch.int32)
    table, used = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    call = {"query": q, "key": q, "value": q, "cu_seq_q": cu, "cu_seq_k": cu, "max_q": 6, "max_k": 6}
    for text, bad in [
        ("enable_gqa", {"key": k, "value": k}),
        ("block_table needs seqused_k", {"block_table": table}),
        ("cu_seq_k may be None", {"cu_seq_k": None}),
        ("cu_seq_k may be None", {"cu_seq_k": None, "seqused_k": used}),
        (r"lengths of keys must be int32", {"seqused_k": used.float()}),
        (r"block_table must be int32 or int64 \[1, pages\]", {"seqused_k": used, "block_table": table}),
        ("window", {"window_size": (-2, 0)}),
    ]:
        with pytest.raises(ValueError, match=text):
            varlen_attn(**{**call, **bad})


def test_varlen_attn_has_pytorchs_signature():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    ours, theirs = (inspect.signature(f).parameters for f in (varlen_attn, varlen.varlen_attn))
    if "seqused_k" not in theirs or "num_splits" not in theirs:
        pytest.skip("this torch has an older signature than 2.13")
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
    assert AuxRequest._fields == varlen.AuxRequest._fields
