"""Attention where callers are careless: vectors that lie apart, NaN and infinity, extreme caps, one tensor thrice."""

import pytest
import support
import torch

from riftco import functional as F
from riftco import nn
from riftco.functional import attention
from riftco.kernels._contract import load
from riftco.kernels.attention import cuda, route
from riftco.kernels.attention.cuda.hopper import preprocess

DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))


def made(*shape, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def apart(t):
    """The same numbers as a column of a table whose other column is misleading."""
    return torch.stack([t, torch.full_like(t, 3)], 1)[:, 0]


def gradients(inputs, **options):
    inputs = [t.detach().requires_grad_() for t in inputs]
    out, lse = attention(*inputs, return_lse=True, **options)
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    return out.detach(), lse.detach(), *torch.autograd.grad(out.square().sum() + seen.sum(), inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_and_sinks_may_lie_apart_in_memory(device, packed):
    place = device.torch_device
    lead = () if packed else (3,)
    q, k, v = (made(*lead, 33, heads, 16, seed=heads, device=place) for heads in (4, 2, 2))
    vectors = {"sinks": made(4, seed=9, device=place)}
    if packed:
        vectors["cu_seqlens_q"] = torch.tensor([0, 5, 20, 33], device=place)
        vectors["cu_seqlens_k"] = torch.tensor([0, 9, 9, 31], device=place)
    else:
        vectors["k_lens"] = torch.tensor([33, 0, 17], dtype=torch.int32, device=place)
    with device.use():
        want = gradients((q, k, v), causal=True, **vectors)
        got = gradients((q, k, v), causal=True, **{name: apart(t) for name, t in vectors.items()})
        same = gradients((q, k, v), sinks=torch.full((1,), 0.5, device=place).expand(4), **_only(vectors, "sinks"))
        full = gradients((q, k, v), sinks=torch.full((4,), 0.5, device=place), **_only(vectors, "sinks"))
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert all(torch.equal(a, b) for a, b in zip(same, full))


def _only(vectors, without):
    return {name: t for name, t in vectors.items() if name != without}


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's, under the interpreter
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"causal": True}, {"sinks": True}])
def test_a_bad_query_is_seen_in_its_row_and_in_no_other(device, bad, options):
    if options.get("softcap") and bad == float("inf"):
        bad = float("nan")  # a capped infinity is a number
    q, k, v = (made(1, 20, 2, 16, seed=n, device=device.torch_device) for n in range(3))
    q[0, 15, 0] = bad
    if "sinks" in options:
        options = {"sinks": torch.zeros(2, device=device.torch_device)}
    with device.use():
        out, lse, d_q, *_ = gradients((q, k, v), **options)
    hit = torch.zeros(1, 20, 2, dtype=torch.bool, device=device.torch_device)
    hit[0, 15, 0] = True
    assert torch.equal(out.isnan().any(-1), hit) and torch.equal(d_q.isnan().any(-1), hit)
    assert not lse[0, 0, 15].isfinite() and lse[0, 0, 15] != -torch.inf


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("softcap", [1e-3, 1.0, 1e3, 1e6, 1e20])
def test_softcaps_of_any_size(device, softcap):
    inputs = [made(1, 33, 2, 16, seed=n) for n in range(3)]
    want = gradients([t.double() for t in inputs], softcap=softcap)
    with device.use():
        got = gradients([t.to(device.torch_device) for t in inputs], softcap=softcap)
    for a, b in zip(got, want):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4, 1), (4, 1, 4), (1, 1, 4), (1, 4, 1)])
def test_heads_of_keys_and_values_broadcast_as_in_torch(heads):
    q, k, v = (made(2, h, n, 8, seed=h) for h, n in zip(heads, (5, 7, 7)))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), want)


def test_one_tensor_as_query_key_and_value_compiles_to_one_graph():
    x, cu = made(12, 2, 8).requires_grad_(), torch.tensor([0, 5, 12])

    def f(x):
        return F.flash_attn_varlen_func(x, x, x, cu, cu, 7, 7, causal=True).square().sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(torch.autograd.grad(compiled, x), torch.autograd.grad(f(x), x))


@pytest.mark.parametrize("device", DEVICES)
def test_cache_rows_before_the_left_padding_may_hold_nan(device):
    place = device.torch_device
    cache = [made(2, 16, 2, 8, seed=n, device=place) for n in range(2)]
    pad = torch.tensor([3, 0], dtype=torch.int32, device=place)
    held = torch.tensor([8, 9], dtype=torch.int32, device=place)
    q = made(2, 3, 4, 8, seed=5, device=place).requires_grad_()
    results = []
    for hole in (0.0, float("nan")):
        for t in cache:
            t[0, :3] = hole
        with device.use():
            out = F.flash_attn_with_kvcache(q, *cache, cache_seqlens=held, cache_leftpad=pad, causal=True)
            results.append((out, *torch.autograd.grad(out.sum(), q)))
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(*results))


@pytest.mark.parametrize("lens", [[3, 10], [-1, 9]])
def test_checked_key_lengths(lens, monkeypatch):
    q = made(2, 9, 2, 8)
    attention(q, q, q, k_lens=torch.tensor(lens))  # clamped where nobody asks
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    with pytest.raises(ValueError, match="k_lens must be in"):
        attention(q, q, q, k_lens=torch.tensor(lens))


@pytest.mark.parametrize("device", DEVICES)
def test_windows_beyond_int32_limit_nothing(device):
    q, k, v = (made(1, 20, 2, 16, seed=n, device=device.torch_device) for n in range(3))
    with device.use():
        far, none = (gradients((q, k, v), window=w) for w in ((1 << 40, 1 << 40), (None, None)))
    assert all(torch.equal(a, b) for a, b in zip(far, none))
    assert cuda._limits(19, 0, 20, 20) == (19, 0) and cuda._limits(20, 20, 20, 20) == (None, None)


def test_caps_that_hopper_cannot_hold_take_the_portable_kernels():
    facts = dict(capability=(9, 0), shared=227 << 10)
    for backward in (False, True):
        for softcap, name in ((50.0, "hopper"), (2 * cuda.EXACT_CAP, "tiled")):
            options = cuda._options(None, None, None, None, None, 0, softcap)
            found = route.route(torch.bfloat16, 128, 128, backward=backward, options=options, **facts)
            assert found.name == name


@pytest.mark.parametrize("device", support.device_params(("cpu-triton", "cuda")))
def test_hopper_rows_that_saw_nothing_have_no_delta_whatever_their_gradient(device):
    place = device.torch_device
    out, d_out = (made(1, 70, 2, 64, seed=n, device=place) for n in range(2))
    lse, d_lse = (made(1, 2, 70, seed=n, device=place) for n in range(2))
    out[:, :9], lse[..., :9], d_lse[..., :9] = 0.0, -torch.inf, -torch.inf  # the gradient of lse squared
    rows = preprocess.prepare(d_out, d_lse, out, lse, None, 64, False)
    want = ((out * d_out).sum(-1).transpose(1, 2) - d_lse).masked_fill(lse == -torch.inf, 0.0)
    torch.testing.assert_close(rows.delta, want)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # PyTorch's own, the first time
def test_forward_mode_is_refused_and_not_silently_without_tangent():
    q, k, v = (made(1, 5, 2, 8, seed=n) for n in range(3))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        attention(q, k, v)  # without a tangent nothing is lost
        with pytest.raises(NotImplementedError, match="forward-mode"):
            attention(q, torch.autograd.forward_ad.make_dual(k, k), v)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_over_a_cache_too(device):
    place = device.torch_device
    cache = F.Cache.allocate(1, 2, 16, 2, 16, dtype="float32", device=place)
    for n, t in enumerate((cache.layers[0].k, cache.layers[0].v)):
        t.copy_(made(*t.shape, seed=n, device=place))
    q, k, v = (made(10, heads, 16, seed=heads, device=place) for heads in (4, 2, 2))
    slots, held = torch.tensor([1, 0], device=place), torch.tensor([7, 3], device=place)
    sinks = apart(made(4, seed=9, device=place))
    options = dict(softcap=1e5, return_lse=True)
    want = F.attention_with_cache(q, k, v, cache, 0, slots, held, sinks=sinks.clone(), impl="spec", **options)
    bad = q.clone()
    bad[4, 1, 3] = torch.nan
    with device.use():
        got = F.attention_with_cache(q, k, v, cache, 0, apart(slots), apart(held), sinks=sinks, **options)
        out, lse = F.attention_with_cache(bad, k, v, cache, 0, slots, held, sinks=sinks, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    hit = torch.zeros(10, 4, dtype=torch.bool, device=place)
    hit[4, 1] = True
    assert torch.equal(out.isnan().any(-1), hit) and torch.equal(lse.isnan(), hit.T)


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_a_mask_of_lowest_numbers_hides_is_empty(device):
    """As with -inf: every score of the row is the same number, which lse cannot hold beside the number of keys."""
    q, k, v = (torch.randn(1, n, 2, 16, device=device.torch_device, requires_grad=True) for n in (5, 40, 40))
    lowest = torch.zeros(1, 1, 5, 40, device=q.device)
    lowest[..., 2, :] = torch.finfo(torch.float32).min
    lowest[..., 3, 7:] = torch.finfo(torch.float32).min
    results = []
    with device.use():
        for bias in (lowest, lowest.masked_fill(lowest < 0, -torch.inf)):
            bias.requires_grad_()
            out, lse = attention(q, k, v, bias=bias, return_lse=True)
            assert (out[:, 2] == 0).all() and (lse[..., 2] == -torch.inf).all()
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_in_a_bias_is_seen(device):
    q, k, v = (made(1, 20, 2, 16, seed=n, device=device.torch_device) for n in range(3))
    bias = torch.zeros(1, 1, 20, 20, device=device.torch_device)
    bias[..., 7, 3], bias[..., 8, 3] = torch.nan, torch.finfo(torch.float32).min
    with device.use():
        out = attention(q, k, v, bias=bias)
    assert torch.equal(out.isnan().any(-1).any(-1)[0].nonzero().flatten().cpu(), torch.tensor([7]))


def test_weights_of_the_lowest_mask_agree_with_the_output():
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), made(1, 5, 16)
    mask = torch.zeros(5, 5)
    mask[2] = torch.finfo(torch.float32).min
    (with_weights, weights), (without, _) = (layer(x, x, x, attn_mask=mask, need_weights=n) for n in (True, False))
    torch.testing.assert_close(with_weights, without)
    assert (weights[:, 2] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gradient_of_a_sum_takes_the_route_of_its_inputs(monkeypatch):
    taken = []
    monkeypatch.setattr(cuda, "load", lambda path: taken.append(path) or load(path))
    q = made(1, 300, 2, 64, device="cuda").bfloat16().requires_grad_()
    for reduced in (lambda out: out.sum(), lambda out: out.square().sum()):
        reduced(attention(q, q, q, causal=True)).backward()
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert len([path for path in taken if "hopper.backward" in path]) == (2 if hopper else 0)
