"""The Hopper backward for head dims above 128 against attention in float64, and its kernels compiled for sm_90."""

import math

import pytest
import support
import torch
from hopper_backward import BUDGET, DEV, check, dense, launched, nmse, noise, packed

BF, HALF = torch.bfloat16, torch.float16


def _hopper(test):
    there = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason="needs a GPU of capability 9.0")(test))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(B, T, S, H, K, D, dtype=BF):
    return tuple(noise(B, n, h, D, dtype=dtype) for n, h in ((T, H), (S, K), (S, K), (T, H)))


def launch(q, k, v, d_out, want, *cu, **options):
    """The gradients by the kernels, which start from the exact out and lse of `want`, rounded."""
    from riftco.kernels.attention.cuda.hopper.backward_wide import backward

    return launched(backward, q, k, v, d_out, want[0].to(q.dtype), want[1].float(), *cu, **options)


SHAPES = [  # B, T, S, H, K, D
    (1, 256, 256, 2, 2, 256),
    (2, 333, 333, 6, 2, 256),
    (1, 77, 517, 3, 1, 256),
    (1, 517, 77, 5, 1, 256),
    (1, 1, 300, 28, 4, 256),
    (2, 300, 1, 32, 16, 256),  # a head rounds one dS: many heads, or chance decides
    (1, 257, 383, 3, 3, 192),
    (1, 130, 129, 4, 2, 136),
    (1, 130, 700, 4, 2, 200),
]
WINDOWS = [(None, 0), (None, None), (40, 0), (70, 30), (3, 0)]


@_hopper
@pytest.mark.parametrize("left,right", WINDOWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(shape, left, right):
    q, k, v, d_out = inputs(*shape)
    d_lse = torch.randn(shape[0], shape[3], shape[1], device=DEV)
    want = dense(q, k, v, d_out, d_lse=d_lse, left=left, right=right)
    check(launch(q, k, v, d_out, want, d_lse=d_lse, left=left, right=right), want)


@_hopper
def test_rows_that_see_nothing_get_zeros():
    q, k, v, d_out = inputs(1, 200, 100, 2, 2, 256)
    want = dense(q, k, v, d_out, right=0)
    d_q, _, _, delta, exponent = launch(q, k, v, d_out, want, right=0)
    assert torch.isinf(want[1][:, :, :100]).all() and (d_q[:, :100] == 0).all() and exponent.numel() == 0
    of_rows = (want[0].to(BF).float() * d_out.float()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(delta, of_rows, atol=1e-4, rtol=1e-5)


@_hopper
@pytest.mark.parametrize("dtype", [BF, HALF])
@pytest.mark.parametrize("left,right", [(None, 0), (100, 20)])
@pytest.mark.parametrize("cu", [([0, 100, 100, 101, 500, 629],) * 2, ([0, 3, 3, 259, 400], [0, 50, 90, 90, 500])])
def test_packed_documents_with_nan_around(cu, left, right, dtype):
    cu_q, cu_k = cu
    T, S = cu_q[-1] + 37, cu_k[-1] + 150
    q, k, v, d_out = (noise(n, h, 256, dtype=dtype) for n, h in ((T, 6), (S, 2), (S, 2), (T, 6)))
    want = packed(q, k, v, d_out, cu_q, cu_k, left=left, right=right)
    for x, end in ((q, cu_q), (d_out, cu_q), (want[0], cu_q), (k, cu_k), (v, cu_k)):
        x[end[-1] :] = math.nan
    got = launch(q, k, v, d_out, want, cu_q, cu_k, left=left, right=right)
    check(got, want)
    assert (got[0][cu_q[-1] :] == 0).all() and (got[1][cu_k[-1] :] == 0).all() and (got[2][cu_k[-1] :] == 0).all()


@_hopper
def test_nan_stays_in_its_document():
    cu = [0, 70, 200, 300]
    q, k, v, d_out = (noise(300, 2, 256) for _ in range(4))
    want = packed(q, k, v, d_out, cu, cu, right=0)
    for x in (q, k, v, d_out):
        x[70:200] = math.nan
    for g, w in zip(launch(q, k, v, d_out, want, cu, right=0), want[2:]):
        for rows in (slice(0, 70), slice(200, 300)):
            assert nmse(g[rows], w[rows]) <= BUDGET


@_hopper
def test_thousands_of_one_token_documents():
    n = 8129
    q, k, v, d_out = (noise(n, 2, 256) for _ in range(4))
    lse = (q.float() * k.float()).sum(-1).t() / 16
    cu = torch.arange(n + 1, device=DEV)
    d_q, d_k, d_v, *_ = launch(q, k, v, d_out, (v, lse), cu, right=0)
    assert d_q.abs().max() < 1e-2 and d_k.abs().max() < 1e-2  # one key: its weight is 1 whatever the score
    assert nmse(d_v, d_out) <= BUDGET


@_hopper
def test_any_strides():
    B, T, H, D = 2, 200, 4, 256
    q, k, v = noise(B, T, 3, H, D).unbind(2)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    wide = noise(B, T, H, 2 * D)
    for d_out in (wide[..., :D], noise(1, 1, H, D).expand(B, T, H, D), noise(1).expand(B, T, H, D)):
        want = dense(q, k, v, d_out, right=0)
        out = torch.empty(B, H, T, D, dtype=BF, device=DEV).transpose(1, 2).copy_(want[0])
        check(launch(q, k, v, d_out, (out, want[1]), right=0), want)


@_hopper
@pytest.mark.parametrize("lies", ["packed", "in a longer cache", "sequence first"])
def test_keys_beyond_k_lens_do_not_exist(lies):
    q, k, v, d_out = inputs(3, 100, 400, 4, 2, 256)
    if lies == "in a longer cache":
        k, v = (torch.cat([x, x], 1)[:, :400] for x in (k, v))
    elif lies == "sequence first":
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    k_lens = [400, 170, 5]
    want = dense(q, k, v, d_out, k_lens, right=0)
    for b, n in enumerate(k_lens):
        k[b, n:] = math.nan
        v[b, n:] = math.nan
    got = launch(q, k, v, d_out, want, k_lens=k_lens, right=0)
    check(got, want)
    assert (got[1][2, 5:] == 0).all() and (got[2][1, 170:] == 0).all()


@_hopper
@pytest.mark.parametrize("dtype", [BF, HALF])
def test_softcap(dtype):
    q, k, v, d_out = inputs(1, 300, 300, 3, 1, 256, dtype=dtype)
    options = dict(right=0, softcap=2.0, scale=0.2)
    want = dense(q, k, v, d_out, **options)
    check(launch(q, k, v, d_out, want, **options), want)


@_hopper
@pytest.mark.parametrize("start", [0, 64, 100, 399, 400])
def test_gradients_from_a_key_on_are_the_slice_of_all(start):
    q, k, v, d_out = inputs(2, 300, 400, 4, 2, 256)
    want = dense(q, k, v, d_out, right=0)
    full = launch(q, k, v, d_out, want, right=0)
    got = launch(q, k, v, d_out, want, right=0, start=start)
    check(got, want, (slice(None), slice(start, None)))
    assert torch.equal(got[0], full[0])
    if start % 64 == 0:  # cut into the same tiles
        assert torch.equal(got[1], full[1][:, start:]) and torch.equal(got[2], full[2][:, start:])


@_hopper
@pytest.mark.parametrize("start", [0, 90, 300, 505])
def test_packed_gradients_from_a_key_on(start):
    cu = [0, 60, 250, 500]
    q, k, v, d_out = (noise(510, 4, 256) for _ in range(4))
    want = packed(q, k, v, d_out, cu, cu, right=0)
    check(launch(q, k, v, d_out, want, cu, right=0, start=start), want, (slice(start, None),))


@_hopper
def test_only_what_is_needed():
    q, k, v, d_out = inputs(1, 300, 300, 2, 2, 256)
    want = dense(q, k, v, d_out, right=0)
    for need in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 0)):
        got = launch(q, k, v, d_out, want, right=0, need=tuple(map(bool, need)))
        for g, w, n in zip(got, want[2:], need):
            assert nmse(g, w) <= BUDGET if n else g.numel() == 0


@_hopper
@pytest.mark.parametrize("factors", [(1e-6, 1e-6), (1e-6, 1.0), (1.0, 1e-6)])
def test_tiny_gradients_in_float16(factors):
    """dO of 1e-6 in one head and of 1 in the other of the same group."""
    q, k, v, d_out = inputs(1, 256, 256, 2, 1, 256)
    q, k, v = (x.half() * s for x, s in ((q, 0.5), (k, 4.0), (v, 4.0)))
    d_out = (d_out * torch.tensor(factors, device=DEV)[:, None]).half()
    want = dense(q, k, v, d_out, right=0)
    got = launch(q, k, v, d_out, want, right=0)
    assert got[4].shape == (1, 2)
    for h in range(2):
        assert 4 <= d_out[:, :, h].abs().max().double().item() * 2.0 ** got[4][0, h].item() < 8
    for g, w in zip(got, want[2:]):
        g, w = g.double(), w.half().double()
        assert (g * w).sum() / (g.norm() * w.norm()) > 0.99995
        assert 0.9998 <= g.norm() / w.norm() <= 1.0002


@_hopper
@pytest.mark.parametrize("packed_rows", [False, True])
@pytest.mark.parametrize("right", [0, None])
def test_equal_between_runs(right, packed_rows):
    q, k, v, d_out = inputs(2, 1500, 1500, 6, 2, 256)
    cu = None
    if packed_rows:
        q, k, v, d_out = (x.flatten(0, 1) for x in (q, k, v, d_out))
        cu = [0, 1000, 1001, 3000]
        want = packed(q, k, v, d_out, cu, cu, right=right)
    else:
        want = dense(q, k, v, d_out, right=right)
    first = launch(q, k, v, d_out, want, cu, right=right, deterministic=True)
    check(first, want)
    for run in range(6):
        again = launch(q, k, v, d_out, want, cu, right=right, deterministic=run % 2 == 0)
        assert all(torch.equal(a, b) for a, b in zip(first[:3], again))


@_hopper
def test_a_negated_dv_would_be_caught():
    q, k, v, d_out = inputs(1, 128, 128, 2, 2, 256)
    want = dense(q, k, v, d_out, right=0)
    got = launch(q, k, v, d_out, want, right=0)
    with pytest.raises(AssertionError):
        check((got[0], got[1], -got[2]), want)


@_hopper
def test_nothing_to_do():
    q = noise(0, 10, 2, 256)
    assert launch(q, q, q, q, (q, torch.empty(0, 2, 10, device=DEV)))[0].shape == q.shape
    q, k = noise(2, 10, 2, 256), noise(2, 0, 2, 256)
    d_q, d_k, *_ = launch(q, k, k, q, (q, torch.full((2, 2, 10), -math.inf, device=DEV)))
    assert (d_q == 0).all() and d_k.shape == k.shape
    q = noise(10, 2, 256, dtype=HALF)  # rows, and no document
    got = launch(q, q, q, q, (q, torch.full((2, 10), -math.inf, device=DEV)), [0])
    assert all(g.shape == q.shape and (g == 0).all() for g in got[:3])


@pytest.mark.parametrize(
    "options",
    [
        "",
        "right=None",
        "D=136, left=100",
        "left=100, right=20, softcap=30.0",
        "k_lens=True",
        "packed=True, start=128",
        "packed=True, dtype=torch.float16, left=50, softcap=30.0",
    ],
)
def test_kernels_compile_without_spills(options):
    pytest.importorskip("triton")
    lines = support.compiled("compile_hopper_wide.py", options)
    assert [name for name, *_ in lines if "kernel" in name] == ["dkdv_kernel", "dq_kernel"]
    for name, shared, spilled, _, warnings in lines:
        assert int(shared) <= 227 << 10, f"{name} wants {shared} bytes of shared memory"
        assert int(spilled) == 0, f"{name} spills {spilled} bytes"
        assert int(warnings) == 0, f"{name}: ptxas serialises its wgmma"
