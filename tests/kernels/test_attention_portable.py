"""Attention's portable Triton kernels beyond the conformance cases: planted bugs, routes, tiles, hard shapes."""

import importlib
import math

import pytest
import support
import torch

from riftco.functional import attention
from riftco.kernels.attention import cases, spec
from riftco.kernels.attention import route as routes
from riftco.kernels.attention.route import LEAST_SHARED, TILES, route

DEVICES = support.device_params(("cpu-triton", "cuda"))
CUDA = "riftco.kernels.attention.cuda."
NAMES = ("out", "lse", "d_q", "d_k", "d_v")


@pytest.fixture
def portable(monkeypatch):
    """Portable routes, whatever the GPU."""
    monkeypatch.setattr(routes, "HOPPER_WIDTHS", {"forward": (), "backward": ()})


def run(q, k, v, d_out, **options):
    """(out, lse, d_q, d_k, d_v)."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


def nmse(got, want):
    got, want = got.cpu().double(), want.cpu().double()
    hidden = want == -torch.inf
    assert torch.equal(hidden, got == -torch.inf)
    got, want = got.masked_fill(hidden, 0.0), want.masked_fill(hidden, 0.0)
    return ((got - want).square().sum() / want.square().sum().clamp(min=1e-3 * want.numel())).item()


def agree(device, dtype, T, S, H, K, D, Dv=None, *, bound=None, d_out_size=1.0, **options):
    """Forward and gradients against the spec in float64."""
    generator = torch.Generator().manual_seed(T + S + D)
    lead = () if "cu_seqlens_q" in options else (1,)
    shapes = (*lead, T, H, D), (*lead, S, K, D), (*lead, S, K, Dv or D), (*lead, T, H, Dv or D)
    inputs = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    inputs[3] *= d_out_size
    there = {n: o.to(device.torch_device) if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    with device.use():
        got = run(*(t.to(device.torch_device) for t in inputs), **there)
    want = run(*(t.double() for t in inputs), **options)
    interpreted = device.name == "cpu-triton" and dtype == torch.bfloat16  # the interpreter truncates
    for name, a, b in zip(NAMES, got, want):
        assert nmse(a, b) <= (bound or (5e-5 if interpreted else 1e-5)), name


@pytest.mark.parametrize(
    "module,old,new,case",
    [
        ("portable_forward", "acc = acc * shrink[:, None] +", "acc = acc +", "causal, several tiles"),
        ("portable_forward", "shrink = tl.exp2(m * scale - m_scaled)", "shrink = tl.exp2(m_scaled * 0)",
         "causal, several tiles"),
        ("portable_forward", "start += tl.where(n >= gap_at, gap, 0) * N", "start += gap * N",
         "a wide window"),
        ("portable_forward", "(sink > -float(\"inf\")), 1.0", "(sink > -float(\"inf\")), 2.0", "sinks"),
        ("portable_forward", "sink * scores.LOG2E / scale if FOLD", "sink * scores.LOG2E if FOLD", "sinks"),
        ("portable_forward", "weight *= inv_keep", "weight *= 1.0", "dropout"),
        ("portable_forward", "live = exists & (total != 0.0)", "live = total != 0.0", "packed, spare rows of NaN"),
        ("portable_dkdv", "d_v += dot(", "d_v -= dot(", "odd sizes"),
        ("portable_dkdv", "d_s = p * (d_p - delta[None, :])", "d_s = p * d_p", "odd sizes"),
        ("portable_dkdv", "for g in range(H // K):", "for g in range(1):", "odd sizes"),
        ("portable_dkdv", "d_s *= 1.0 - t * t", "d_s *= 1.0 - t", "softcap"),
        ("portable_dkdv", "weight = tl.where(keep, p, 0.0)", "weight = p", "dropout"),
        ("portable_dkdv", "tl.where(keep, d_p * inv_keep, 0.0)", "tl.where(keep, d_p, 0.0)", "dropout"),
        ("portable_dkdv", "key = key_start // 4 * 4 + tile * N", "key = tile * N", "gradients of the last keys"),
        ("portable_dkdv", "d_v = tl.where(seen[:, None], d_v, 0.0)", "d_v += 0.0", "packed, sinks"),
        ("portable_dkdv", "i[None, :] < hi[:, None]", "i[None, :] <= hi[:, None]", "window, causal, a few keys a row"),
        ("portable_dq", "d_s *= 1.0 - t * t", "d_s *= 1.0", "softcap"),
        ("portable_dq", "d_p * inv_keep, 0.0", "d_p * inv_keep, d_p", "dropout"),
        ("portable_dq", "d_s = p * (d_p - delta[:, None])", "d_s = p * d_p", "odd sizes"),
        ("portable_dbias", "(d_p - delta[:, None]), 0.0)", "d_p, 0.0)", "bias"),
        ("portable_dbias", "B if ALL_B else 1", "1", "one bias for two sequences"),
        ("portable_dbias", "walk_h = H if ALL_H else 1", "walk_h = 1", "bias for all heads, -inf in it"),
        ("portable_dbias", "tiles_t if ALL_T else 1", "1", "bias a key"),
        ("portable_delta", "delta -= tl.load(d_lse_ptr + at, mask=i < T, other=0.0)", "delta += 0.0", "sinks"),
        ("masks", "hi = tl.minimum(k1, k1 - (q1 - i) + right + 1)", "hi = tl.minimum(k1, k0 + i + right + 1)",
         "causal, more keys"),
        ("masks", "lo = tl.maximum(k0, k1 - (q1 - i) - left)", "lo = tl.maximum(k0, k1 - (q1 - i) - left + 1)",
         "window"),
        ("masks", "lo = tl.maximum(q0, q1 - (k1 - j) - right)", "lo = tl.maximum(q0, q1 - (k1 - j) - right + 1)",
         "causal, more keys"),
        ("masks", "hi = tl.minimum(q1, q1 - (k1 - j) + left + 1)", "hi = tl.minimum(q1, q1 - (k1 - j) + left)",
         "window"),
        ("masks", "tl.max(tl.where(exists, lo, 0), 0)", "least", "a wide window"),
        ("masks", "tl.maximum(tl.load(k_lens_ptr + batch), 0)", "tl.maximum(tl.load(k_lens_ptr + batch), 1)",
         "key lengths"),
        ("scores", "tl.where(hidden, 0.0, bias) * LOG2E", "tl.where(hidden, 0.0, bias)", "bias"),
        ("scores", "tl.where(bias != 0, s, -float(\"inf\"))", "tl.where(bias == 0, s, -float(\"inf\"))", "mask"),
        ("scores", "tl.join(tl.join(a, c), tl.join(b, d))", "tl.join(tl.join(a, b), tl.join(c, d))", "dropout"),
        ("scores", "1.0 - 2.0 / (tl.exp2(x2) + 1.0)", "1.0 - 2.0 / (tl.exp2(x2) + 1.1)", "softcap"),
    ],
)  # fmt: skip
def test_planted_bugs(module, old, new, case, portable):
    """Negated dV among them."""
    name = "cpu-triton"
    if torch.cuda.is_available():
        if module in ("masks", "scores"):
            pytest.skip("kernels compiled before keep the helpers that they were compiled with")
        name = "cuda"
    device = next(d for d in support.DEVICES if d.name == name)
    if not device.available:
        pytest.skip(f"{name}: {device.why_not}")
    chosen = next(c for c in (*cases.CASES, *EXTRA) if c.name == case)
    with support.mutant(CUDA + module, old, new), pytest.raises(AssertionError):
        support.check_case(cases, chosen, torch.float32, device)


EXTRA = (
    cases.Case("a wide window", dict(B=1, T=170, S=170, H=1, K=1, D=16, DV=16), dict(window=(90, 30))),
    cases.Case("one bias for two sequences", dict(B=2, T=20, S=50, H=2, K=2, D=16, DV=16), dict(bias=(1, 2, 20, 50))),
)


@pytest.mark.parametrize("room,capability", [(LEAST_SHARED, 80), pytest.param(227 << 10, 90, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "call",
    [pytest.param("float16 64 64 packed,mask", id="sample")]
    + [
        pytest.param(f"{dtype} {D} {DV}", id=f"{dtype}-{D}-{DV}", marks=pytest.mark.slow)
        for dtype in ("float32", "bfloat16", "float16")
        for D, DV in ((64, 64), (128, 128), (256, 256), (512, 512), (40, 7))
    ],
)
def test_every_kernel_compiles_into_the_shared_memory_it_is_given(call, room, capability):
    lines = support.compiled("compile_kernels.py", capability, room, *call.split())
    shared = [(name, int(size)) for name, size, _ in lines]
    assert {"attention_fwd", "attention_delta", "attention_dkdv", "attention_dq"} <= {name for name, _ in shared}
    assert max(size for _, size in shared) <= room, shared


def test_route():
    assert [route(torch.float16, d, d).name for d in (8, 64, 96, 256)] == ["tiled"] * 4
    assert route(torch.float16, 96, 96).D == 128
    assert route(torch.float32, 7, 7).why == "head dim 7 is no multiple of 8 up to 256"
    assert route(torch.float32, 64, 128).why == "head dims 64 and 128 differ"
    assert route(torch.bfloat16, 512, 512).name == "padded"
    assert route(torch.float32, 8, 64).tiles is TILES[LEAST_SHARED, 4, 64]
    assert route(torch.float32, 512, 512).name == route(torch.float16, 520, 8).name == "rows"


def test_route_by_shared_memory():
    """Every dtype and head dim has tiles for the least shared memory; a room between two gets the smaller's."""
    assert {key[1:] for key in TILES} == {key[1:] for key in TILES if key[0] == LEAST_SHARED}
    for room, size, pad in TILES:
        dtype = {2: torch.float16, 4: torch.float32}[size]
        assert route(dtype, pad, pad, shared=room).tiles is TILES[room, size, pad]
        assert route(dtype, pad, pad, shared=LEAST_SHARED - 1).tiles is TILES[LEAST_SHARED, size, pad]
        assert route(dtype, pad, pad, shared=room, options=frozenset({"bias"})).tiles is TILES[LEAST_SHARED, size, pad]
        assert route(dtype, pad, pad, shared=163 << 10).tiles is TILES[LEAST_SHARED, size, pad]


def test_route_to_hopper(monkeypatch):
    monkeypatch.setattr(routes, "HOPPER_WIDTHS", {"forward": (64, 128, 256), "backward": (64, 128)})
    facts = dict(capability=(9, 0), shared=227 << 10)
    assert route(torch.bfloat16, 128, 128, **facts).name == "hopper"
    assert route(torch.bfloat16, 128, 128).name == "tiled"
    assert route(torch.float16, 256, 256, **facts).name == "hopper"
    assert route(torch.float16, 256, 256, backward=True, **facts).name == "tiled"
    for change, why in [
        (dict(capability=(8, 0)), ""),
        (dict(capability=(10, 0)), ""),
        (dict(aligned=False), "TMA needs"),
        (dict(document=100), "documents of 100 rows"),
        (dict(options=frozenset({"bias", "dropout", "window"})), "do not know bias, dropout"),
    ]:
        way = route(torch.bfloat16, 64, 64, **{**facts, **change})
        assert way.name == "tiled" and why in way.why and ("not hopper" in way.why) == bool(why), way
    assert "not of 16 bits" in route(torch.float32, 64, 64, **facts).why
    assert route(torch.bfloat16, 64, 128, **facts).name == "padded"
    assert route(torch.bfloat16, 64, 64, document=4096, **facts).name == "hopper"
    t = torch.empty(2, 5, 3, 64, dtype=torch.float16)
    assert all(map(routes.descriptors_take, (t, t.transpose(1, 2), t[:1].expand(2, -1, -1, -1))))
    assert not any(map(routes.descriptors_take, (t[..., ::2], t[..., 4:], t[..., :9].contiguous())))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "D,H,K,S,T",
    [(128, 8, 2, 64, 33), (64, 4, 2, 75, 37), (256, 4, 1, 70, 24)]
    + [
        pytest.param(*shape, marks=pytest.mark.gpu)
        for shape in ((128, 8, 2, 512, 64), (64, 4, 2, 300, 37), (256, 16, 4, 2048, 256))
    ],
)  # fmt: skip
def test_bound_of_every_output(device, dtype, D, H, K, S, T, portable):
    if device.name == "cpu-triton" and S > 100:
        pytest.skip("the interpreter takes minutes")
    agree(device, dtype, T, S, H, K, D, causal=True, d_out_size=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("D", [40, 63, 80, 96, 192])
def test_head_dims(device, D, portable):
    agree(device, torch.float16, 20, 35, 2, 1, D, causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group", [3, 5, 7, 10])
def test_groups(device, group, portable):
    agree(device, torch.bfloat16, 18, 30, group, 1, 16, causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("S", [1, 127, 128, 129, pytest.param(1025, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [(None, None), (60, None)])
def test_lengths(device, S, window, portable):
    agree(device, torch.float32, S, S, 1, 1, 16, causal=True, window=window, bound=1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_documents_of_every_kind(device, portable):
    """Without rows, without keys, one token, more rows than keys, more keys than rows."""
    cu_q, cu_k = torch.tensor([0, 0, 8, 20, 20, 21, 40]), torch.tensor([0, 12, 20, 20, 33, 34, 60])
    for causal in (False, True):
        agree(device, torch.float32, 40, 60, 2, 1, 16, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, bound=1e-10)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_hidden_by_a_bias(device, portable):
    """A row that a bias hides whole gives 0 and -inf, forward and backward, whatever kind of bias."""
    q, k, v = (torch.randn(1, 9, 2, 16, device=device.torch_device) for _ in range(3))
    for kind in (torch.bool, torch.float32):
        bias = torch.ones(9, 9, device=q.device, dtype=kind)
        bias[4] = False if kind == torch.bool else -torch.inf
        with device.use():
            out, lse, *grads = run(q, k, v, torch.ones_like(q), bias=bias)
        assert not out[:, 4].any() and bool((lse[..., 4] == -torch.inf).all()) and not grads[0][:, 4].any()
        assert all(bool(t.isfinite().all()) for t in (out, *grads))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("start", [37, pytest.param(64, marks=pytest.mark.slow), 90])
def test_gradients_of_the_last_keys_are_a_slice(device, start, packed, portable):
    q, k, v, d_out = (torch.randn(1, 90, h, 16, device=device.torch_device) for h in (4, 2, 2, 4))
    options: dict = dict(causal=True)
    if packed:
        q, k, v, d_out = (t[0] for t in (q, k, v, d_out))
        options["cu_seqlens_q"] = torch.tensor([0, 30, 50, 80], device=q.device)
    with device.use(), support.poisoned():
        full, last = (run(q, k, v, d_out, kv_grad_start=s, **options) for s in (0, start))
    for name, a, b in zip(NAMES, full, last):
        if name in ("d_k", "d_v"):
            a, b = a[..., start:, :, :], b[..., start:, :, :]
        torch.testing.assert_close(b, a, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("D,route_name", [(512, "padded"), (520, "rows")])
def test_gradients_of_the_last_keys_in_wide_heads(device, D, route_name, portable):
    assert route(torch.float16, D, D).name == route_name
    sizes = (6, 2), (21, 1), (21, 1), (6, 2)
    q, k, v, d_out = (torch.randn(1, t, h, D, device=device.torch_device).half() for t, h in sizes)
    with device.use(), support.poisoned():
        full, last = (run(q, k, v, d_out, causal=True, kv_grad_start=s) for s in (0, 11))
    assert all(torch.equal(full[n], last[n]) for n in (0, 1, 2))
    assert all(nmse(last[n][:, 11:], full[n][:, 11:]) < 1e-7 for n in (3, 4))


@pytest.mark.parametrize("device", DEVICES)
def test_equal_in_every_run(device, portable):
    for options in ({}, {"window": (9, 3)}, {"bias": torch.randn(1, 1, 40, 40, device=device.torch_device)}):
        q, k, v, d_out = (torch.randn(2, 40, 6, 16, device=device.torch_device).half() for _ in range(4))
        with device.use():
            first, second = (run(q, k, v, d_out, **options) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("device", DEVICES)
def test_far_strides(device, portable):
    """Rows so far apart that a tile's offsets need 64 bits; the memory between them is never touched."""
    big = torch.empty(1, device=device.torch_device, dtype=torch.float16)
    if device.name == "cuda":
        big = torch.empty(5 << 30, device="cuda", dtype=torch.float16)
    step = (1 << 25) if device.name == "cuda" else 0
    if not step:
        pytest.skip("needs 10 GiB")
    q, k, v, d_out = (big.as_strided((1, 128, 2, 16), (0, step, 16, 1), 64 * n) for n in range(4))
    for t in (q, k, v, d_out):
        t.normal_()
    with device.use():
        got, want = run(q, k, v, d_out), run(*(t.clone() for t in (q, k, v, d_out)))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestFullSize:
    def test_ten_thousand_documents_of_one_token(self, portable):
        """Each token sees itself; no more programs than one long document takes."""
        q, k, v, d_out = (torch.randn(10_000, 16, 128, device="cuda").bfloat16() for _ in range(4))
        out, lse, d_q, d_k, d_v = run(q, k, v, d_out, cu_seqlens_q=torch.arange(10_001, device="cuda"))
        assert torch.equal(out, v) and torch.equal(d_v, d_out)
        assert d_q.abs().max() < 0.1 and d_k.abs().max() < 0.1
        torch.testing.assert_close(lse, (q.float() * k.float()).sum(-1).mT / 128**0.5, atol=1e-4, rtol=1e-5)

    def test_more_heads_than_65535(self, portable):
        q, k, v, d_out = (torch.randn(4100, 16, 16, 8, device="cuda").half() for _ in range(4))
        got = run(q, k, v, d_out, causal=True)
        want = run(*(t[-3:] for t in (q, k, v, d_out)), causal=True)
        assert all(torch.equal(a[-3:], b) for a, b in zip(got, want))

    def test_more_than_two_to_the_31_elements(self, portable):
        q = torch.empty(135_000, 128, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(135_000, 1, 128, device="cuda").bfloat16()
        q[-100:].normal_()
        cu = torch.tensor([0, 134_900, 135_000], device="cuda")
        q[:134_900] = 0.0
        out, _, d_q, d_k, d_v = run(q, k, k, q, causal=True, window=(100, 0), cu_seqlens_q=cu)
        last = run(q[-100:], k[-100:], k[-100:], q[-100:], causal=True, cu_seqlens_q=cu[-2:] - 134_900)
        for a, b in zip((out, d_q, d_k, d_v), (last[0], *last[2:])):
            torch.testing.assert_close(a[-100:], b)

    def test_gradients_of_the_last_keys(self, portable):
        start = 2048 - 37
        q, k, v, d_out = (
            torch.randn(1, t, h, 256, device="cuda").half() for t, h in ((256, 16), (2048, 4), (2048, 4), (256, 16))
        )
        full, last = (run(q, k, v, d_out, causal=True, kv_grad_start=s) for s in (0, start))
        assert all(torch.equal(full[n], last[n]) for n in (0, 1, 2))
        assert all(nmse(last[n][:, start:], full[n][:, start:]) < 1e-7 for n in (3, 4))


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_is_the_documented_mask(packed):
    """With v the identity, the output is the dropped softmax itself."""
    device = next(d for d in support.DEVICES if d.name == ("cuda" if torch.cuda.is_available() else "cpu-triton"))
    T, S = (35, 35) if packed else (20, 35)
    q, k = (torch.randn(1, n, 2, 16, device=device.torch_device) for n in (T, S))
    v = torch.eye(S, device=q.device)[None, :, None].expand(1, S, 2, S)
    tensors = (torch.tensor([0, 17, 35], device=q.device), *(None,) * 4) if packed else (None,) * 5
    q, k, v = (t[0] for t in (q, k, v)) if packed else (q, k, v)
    seed = torch.tensor([12345678901234567], device=q.device)
    options = None, None, 0, 0.0, 0.3
    with device.use():
        got, _ = torch.ops.riftco.attention_fwd(q, k, v, *tensors, seed, *options)
    want, _ = spec.forward(q, k, v, *tensors, seed, *options)
    assert torch.equal(got == 0, want == 0)
    torch.testing.assert_close(got, want)


def test_the_lowest_score_is_a_power_of_two():
    """Compiled code fuses m * scale - round(m * scale); only an exact product leaves 0 there, and exp2(0) = 1."""
    pytest.importorskip("triton")
    lowest = importlib.import_module(CUDA + "portable_forward").LOWEST.value
    assert math.frexp(lowest)[0] == -0.5


def test_every_gradient_alone(portable):
    """Any subset of gradients is what all of them together are."""
    device = next(d for d in support.DEVICES if d.name == ("cuda" if torch.cuda.is_available() else "cpu-triton"))
    q, k, v, d_out = (torch.randn(1, 12, 2, 16, device=device.torch_device) for _ in range(4))
    bias, sinks = torch.randn(1, 1, 12, 12, device=q.device), torch.randn(2, device=q.device)
    tensors, options = (None, None, None, bias, sinks, None), (None, None, 0, 3.0, 0.0)
    with device.use():
        out, lse = torch.ops.riftco.attention_fwd(q, k, v, *tensors, *options)
        args = d_out, torch.randn_like(lse), q, k, v, out, lse, *tensors, *options, 0, False
        full = torch.ops.riftco.attention_bwd(*args, *(True,) * 5)
        for need in (*torch.eye(5, dtype=torch.bool).tolist(), (True, False, True, False, True)):
            for grad, all_, n in zip(torch.ops.riftco.attention_bwd(*args, *need), full, need):
                assert torch.equal(grad, all_) if n else grad.numel() == 0
