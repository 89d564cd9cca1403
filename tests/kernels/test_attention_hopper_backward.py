"""The Hopper backward against attention in float64, and its kernels compiled for sm_90 without a GPU."""

import itertools
import math

import pytest
import support
import torch
from hopper_backward import BUDGET, DEV, check, dense, launched, nmse, noise, packed

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of capability 9.0")


def launch(*tensors, **options):
    from riftco.kernels.attention.cuda.hopper.backward import backward

    return launched(backward, *tensors, **options)


SHAPES = [  # B, T, S, H, K, D
    (1, 256, 256, 2, 2, 128),
    (2, 333, 333, 6, 2, 128),
    (1, 77, 517, 3, 1, 128),
    (1, 517, 77, 5, 1, 128),
    (1, 1, 300, 7, 1, 128),
    (2, 300, 1, 2, 2, 128),
    (1, 257, 383, 3, 3, 64),
    (1, 130, 129, 4, 2, 96),
    (1, 130, 129, 4, 2, 40),
]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("window", [(None, 0), (None, None), (40, 0), (70, 30), (0, 0)])
@pytest.mark.parametrize("shape", SHAPES, ids="B{0[0]}T{0[1]}S{0[2]}H{0[3]}K{0[4]}D{0[5]}".format)
def test_dense(shape, window):
    B, T, S, H, K, D = shape
    q, k, v, d_out = noise(B, T, H, D), noise(B, S, K, D), noise(B, S, K, D), noise(B, T, H, D)
    d_lse = torch.randn(B, H, T, device=DEV)
    options = dict(left=window[0], right=window[1])
    want = dense(q, k, v, d_out, d_lse=d_lse, **options)
    got = launch(q, k, v, d_out, want[0].to(q.dtype), want[1].float(), d_lse=d_lse, **options)
    check(got, want)


@on_hopper
@pytest.mark.gpu
def test_delta_is_in_float32_and_empty_rows_are_zero():
    q, k, v, d_out = (noise(1, 200, 2, 64) for _ in range(4))
    k, v = k[:, :100], v[:, :100]
    want = dense(q, k, v, d_out, right=0)  # rows 0..99 see nothing
    out = want[0].to(q.dtype)
    d_q, _, _, delta, exponent = launch(q, k, v, d_out, out, want[1].float(), right=0)
    assert torch.isinf(want[1][:, :, :100]).all() and (d_q[:, :100] == 0).all() and exponent.numel() == 0
    exact = (out.float() * d_out.float()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(delta, exact, atol=1e-4, rtol=1e-5)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(None, 0), (100, 20)])
@pytest.mark.parametrize("cu", [([0, 100, 100, 101, 500, 629],) * 2, ([0, 3, 3, 259, 400], [0, 50, 90, 90, 500])])
def test_packed_documents_with_nan_around(cu, window, dtype):
    cu_q, cu_k = cu
    T, S = cu_q[-1] + 37, cu_k[-1] + 150
    q, k, v, d_out = noise(T, 6, 128), noise(S, 2, 128), noise(S, 2, 128), noise(T, 6, 128)
    q, k, v, d_out = (x.to(dtype) for x in (q, k, v, d_out))
    options = dict(left=window[0], right=window[1])
    want = packed(q, k, v, d_out, cu_q, cu_k, **options)
    out, lse = want[0].to(dtype), want[1].float()
    for x, end in ((q, cu_q), (d_out, cu_q), (out, cu_q), (k, cu_k), (v, cu_k)):
        x[end[-1] :] = math.nan
    got = launch(q, k, v, d_out, out, lse, cu_q, cu_k, **options)
    check(got, want)
    assert (got[0][cu_q[-1] :] == 0).all() and (got[1][cu_k[-1] :] == 0).all() and (got[2][cu_k[-1] :] == 0).all()


@on_hopper
@pytest.mark.gpu
def test_nan_stays_in_its_document():
    cu = [0, 70, 200, 300]
    q, k, v, d_out = noise(300, 2, 128), noise(300, 2, 128), noise(300, 2, 128), noise(300, 2, 128)
    want = packed(q, k, v, d_out, cu, cu, right=0)
    for x in (q, k, v, d_out):
        x[70:200] = math.nan
    got = launch(q, k, v, d_out, want[0].to(q.dtype), want[1].float(), cu, cu, right=0)
    for g, w in zip(got, want[2:]):
        for rows in (slice(0, 70), slice(200, 300)):
            assert nmse(g[rows], w[rows]) <= BUDGET


@on_hopper
@pytest.mark.gpu
def test_thousands_of_one_token_documents():
    n = 8129
    q, k, v, d_out = (noise(n, 2, 64) for _ in range(4))
    cu = torch.arange(n + 1, device=DEV)
    lse = (q.float() * k.float()).sum(-1).t().contiguous() / 8
    d_q, d_k, d_v, *_ = launch(q, k, v, d_out, v, lse, cu, right=0)
    assert d_q.abs().max() < 1e-2 and d_k.abs().max() < 1e-2  # one key: its weight is 1 whatever the score
    assert nmse(d_v, d_out) <= BUDGET


@on_hopper
@pytest.mark.gpu
def test_any_strides():
    B, T, H, D = 2, 200, 4, 64
    qkv = noise(B, T, 3, H, D)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) if i else x for i, x in enumerate(qkv.unbind(2)))
    wide = noise(B, T, H, 2 * D)
    for d_out in (wide[..., :D], noise(1, 1, H, D).expand(B, T, H, D), noise(1).expand(B, T, H, D)):
        want = dense(q, k, v, d_out, right=0)
        out = torch.empty(B, H, T, D, dtype=q.dtype, device=DEV).transpose(1, 2).copy_(want[0])
        check(launch(q, k, v, d_out, out, want[1].float(), right=0), want)


@on_hopper
@pytest.mark.gpu
def test_keys_beyond_k_lens_do_not_exist():
    q, d_out = noise(3, 100, 4, 128), noise(3, 100, 4, 128)
    k, v = noise(3, 400, 2, 128), noise(3, 400, 2, 128)
    k_lens = [400, 170, 5]
    want = dense(q, k, v, d_out, k_lens, right=0)
    for b, n in enumerate(k_lens):
        k[b, n:] = math.nan
        v[b, n:] = math.nan
    got = launch(q, k, v, d_out, want[0].to(q.dtype), want[1].float(), k_lens=k_lens, right=0)
    check(got, want)
    assert (got[1][2, 5:] == 0).all()


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [64, 128])
def test_softcap(D, dtype):
    q, k, v, d_out = (noise(1, 300, 3, D).to(dtype) for _ in range(4))
    options = dict(right=0, softcap=2.0, scale=0.3)
    want = dense(q, k, v, d_out, **options)
    check(launch(q, k, v, d_out, want[0].to(dtype), want[1].float(), **options), want)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("start", [0, 100, 128, 399, 400])
def test_gradients_from_a_key_on_are_the_slice_of_all(start, deterministic):
    q, d_out, k, v = noise(2, 300, 4, 128), noise(2, 300, 4, 128), noise(2, 400, 2, 128), noise(2, 400, 2, 128)
    want = dense(q, k, v, d_out, right=0)
    out, lse = want[0].to(q.dtype), want[1].float()
    got = launch(q, k, v, d_out, out, lse, right=0, start=start, deterministic=deterministic)
    assert got[1].shape[1] == got[2].shape[1] == 400 - start
    check(got, want, (slice(None), slice(start, None)))
    if start % 128 == 0:  # cut into the same tiles
        full = launch(q, k, v, d_out, out, lse, right=0)
        assert torch.equal(got[1], full[1][:, start:]) and torch.equal(got[2], full[2][:, start:])


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 90, 300])
def test_packed_gradients_from_a_key_on(start):
    cu = [0, 60, 250, 500]
    q, k, v, d_out = noise(510, 4, 64), noise(510, 4, 64), noise(510, 4, 64), noise(510, 4, 64)
    want = packed(q, k, v, d_out, cu, cu, right=0)
    got = launch(q, k, v, d_out, want[0].to(q.dtype), want[1].float(), cu, right=0, start=start)
    check(got, want, (slice(start, None),))


@on_hopper
@pytest.mark.gpu
def test_only_what_is_needed():
    q, k, v, d_out = (noise(1, 300, 2, 128) for _ in range(4))
    want = dense(q, k, v, d_out, right=0)
    out, lse = want[0].to(q.dtype), want[1].float()
    for need in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 0), (1, 0, 1)):
        got = launch(q, k, v, d_out, out, lse, right=0, need=tuple(map(bool, need)))
        for g, w, n in zip(got, want[2:], need):
            assert nmse(g, w) <= BUDGET if n else g.numel() == 0


@on_hopper
@pytest.mark.gpu
def test_tiny_gradients_in_float16():
    """dO of 1e-6 in one head and of 1 in the other of the same group."""
    q, k, v = noise(1, 256, 2, 128), noise(1, 256, 1, 128), noise(1, 256, 1, 128)
    q, k, v = (x.half() * s for x, s in ((q, 0.5), (k, 4.0), (v, 4.0)))
    for factors in ((1e-6, 1e-6), (1e-6, 1.0), (1.0, 1e-6)):
        d_out = (noise(1, 256, 2, 128) * torch.tensor(factors, device=DEV)[:, None]).half()
        want = dense(q, k, v, d_out, right=0)
        got = launch(q, k, v, d_out, want[0].half(), want[1].float(), right=0)
        assert got[4].shape == (1, 2)
        for h in range(2):
            largest = d_out[:, :, h].abs().max().double().item() * 2.0 ** got[4][0, h].item()
            assert 4 <= largest < 8
        for g, w in zip(got, want[2:]):
            g, w = g.double(), w.half().double()
            assert (g * w).sum() / (g.norm() * w.norm()) > 0.99995
            assert 0.9998 <= g.norm() / w.norm() <= 1.0002


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("packed_rows", [False, True])
@pytest.mark.parametrize("right", [0, None])
@pytest.mark.parametrize("D", [64, 128])
def test_equal_between_runs(D, right, packed_rows):
    q, d_out, k, v = noise(2, 1500, 6, D), noise(2, 1500, 6, D), noise(2, 1500, 2, D), noise(2, 1500, 2, D)
    cu = None
    if packed_rows:
        q, d_out, k, v = (x.flatten(0, 1) for x in (q, d_out, k, v))
        cu = [0, 1000, 1001, 3000]
        want = packed(q, k, v, d_out, cu, cu, right=right)
    else:
        want = dense(q, k, v, d_out, right=right)
    out, lse = want[0].to(q.dtype), want[1].float()
    for deterministic in (False, True):
        first = launch(q, k, v, d_out, out, lse, cu, right=right, deterministic=deterministic)
        check(first, want)
        for _ in range(5):
            again = launch(q, k, v, d_out, out, lse, cu, right=right, deterministic=deterministic)
            assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
            assert torch.equal(first[3], again[3])
            if deterministic:
                assert torch.equal(first[0], again[0])


@on_hopper
@pytest.mark.gpu
def test_nothing_to_do():
    q, k = noise(0, 10, 2, 64), noise(0, 10, 2, 64)
    lse = torch.empty(0, 2, 10, device=DEV)
    assert launch(q, k, k, q, q, lse)[0].shape == q.shape
    q, k = noise(2, 10, 2, 64), noise(2, 0, 2, 64)
    d_q, d_k, *_ = launch(q, k, k, q, q, torch.full((2, 2, 10), -math.inf, device=DEV))
    assert (d_q == 0).all() and d_k.shape == k.shape
    q = noise(10, 2, 64)
    d_q, d_k, *_ = launch(q, q, q, q, q, torch.full((2, 10), -math.inf, device=DEV), [0])
    assert (d_q == 0).all() and (d_k == 0).all()


def test_heads_side_by_side_are_those_of_one_sequence():
    """Four packed documents of 4,096 keys are worked on as a batch of four is; as one of 16,384 it took 10 % longer."""
    from riftco.kernels.attention.cuda.hopper.backward import together

    assert [together(keys) for keys in (16384, 8192, 4096, 2048, 500, 0)] == [1, 2, 4, 8, 32, 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_numbers_in_tiles_of_documents(dtype):
    """delta, lse and float16's powers, on any device: documents of 0, 65, 1 and 129 rows, rows of none hold NaN."""
    pytest.importorskip("triton")
    from riftco.kernels.attention.cuda.hopper import preprocess

    device = "cuda" if torch.cuda.is_available() else "cpu"
    cu, T, H, M = [5, 5, 70, 71, 200], 210, 2, 64
    out, d_out = (torch.randn(T, H, 64, device=device).to(dtype) for _ in range(2))
    lse, d_lse = (torch.randn(H, T, device=device) for _ in range(2))
    out[:5] = out[200:] = math.nan
    rows = preprocess.prepare(d_out, d_lse, out, lse, torch.tensor(cu, device=device), M, False)
    delta = (d_out.float() * out.float()).sum(-1).t() - d_lse
    delta[:, :5] = delta[:, 200:] = 0
    torch.testing.assert_close(rows.delta, delta, atol=1e-4, rtol=1e-5)
    stats = rows.stats.view(-1, 2, M)
    assert torch.isinf(stats[-1, 0]).all() and (stats[-1, 1] == 0).all() and rows.counter == 0
    for n, (a, b) in enumerate(itertools.pairwise(cu)):
        for h in range(H):
            tile = stats[h * rows.tiles + a // M + n :][: (b - a + M - 1) // M]
            base2, its_delta = tile[:, 0].flatten(), tile[:, 1].flatten()
            torch.testing.assert_close(base2[: b - a], lse[h, a:b] / math.log(2))
            torch.testing.assert_close(its_delta[: b - a], delta[h, a:b], atol=1e-4, rtol=1e-5)
            assert torch.isinf(base2[b - a :]).all()
            if dtype == torch.float16 and b > a:
                largest = d_out[a:b, h].abs().max().item() * 2.0 ** rows.exponent[n, h].item()
                assert 4 <= largest < 8


@pytest.mark.parametrize(
    "options",
    [
        "",
        "right=None",
        "D=64",
        "left=100",
        "softcap=30.0",
        "packed=True, dtype=torch.float16, start=128",
        "deterministic=True, packed=True, D=64",
        "need=(True, False, False)",
        "need=(False, True, True)",
    ],
)
def test_kernels_compile_without_spills(options):
    pytest.importorskip("triton")
    lines = support.compiled("compile_hopper_backward.py", options)
    assert {"backward_kernel", "dq_kernel"} & {name for name, *_ in lines}
    for line in lines:
        _, shared, spilled, in_loops, serialised = line
        assert int(shared) <= 227 * 1024, line
        assert int(in_loops) <= 16 and int(serialised) == 0, line  # around the steps of a head, not inside
        assert int(spilled) <= 128, line  # a few words around the loops
