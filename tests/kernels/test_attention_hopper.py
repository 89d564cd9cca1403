"""Forward attention on Hopper: descriptors and tile tables anywhere, compiling without a GPU, results on one."""

import random

import pytest
import support
import torch

pytest.importorskip("triton.experimental.gluon")

from riftco.kernels.attention import cuda
from riftco.kernels.attention.cuda.hopper import descriptors, schedule, variant
from riftco.kernels.attention.cuda.hopper import forward as room
from riftco.kernels.attention.route import route

BF, HALF = torch.bfloat16, torch.float16


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ------------------------------------------------------------------------------------------------ descriptors
def _address(d, coordinates) -> int:
    """Byte address, relative to the tensor's first element, that the hardware computes: 64 bits."""
    return sum(c * s * 2 for c, s in zip(coordinates, d.strides)) % 2**64


@pytest.mark.parametrize("shape", [(2, 7, 3, 64), (2, 1, 3, 72), (1, 5, 1, 256)])
def test_dense_descriptor_sees_the_tensor_as_it_lies(shape):
    t = torch.empty(2 * 8 * 4 * 512, dtype=BF).as_strided(shape, (16384, 2048, 512, 1))
    d = descriptors.describe(t, 64)
    assert d.shape == [shape[0], shape[2], shape[1], shape[3]]
    assert d.block_shape == [1, 1, 64, descriptors.width(shape[3])]
    b, s, h = (n - 1 for n in shape[:3])
    assert _address(d, (b, h, s, 5)) == (t[b, s, h, 5].storage_offset() * 2)


@pytest.mark.parametrize("start,length,row,head", [(0, 1, 0, 0), (3, 4, 2, 1), (5, 2, 0, 2), (100, 60, 59, 3)])
def test_ragged_descriptor_lands_on_the_documents_rows_and_ends_with_it(start, length, row, head):
    t = torch.empty(200, 4, 128, dtype=HALF)
    d = descriptors.describe(t, 64)
    at = (descriptors.END, start + length, head, descriptors.END - length + row, 8)
    assert all(0 <= c < n for c, n in zip(at, d.shape))
    assert _address(d, at) == t[start + row, head, 8].storage_offset() * 2
    assert descriptors.END - length + length == d.shape[3]  # the row after the last lies outside
    assert all(s * 2 < 2**40 and s % 8 == 0 for s in d.strides[:-1])


def test_why_not_names_what_has_no_descriptor():
    ok = torch.empty(2, 5, 3, 64, dtype=BF)
    assert descriptors.why_not(ok) == ""
    assert descriptors.why_not(ok[:, :1, :1]) == ""
    assert descriptors.why_not(ok[:1].expand(4, -1, -1, -1)) == ""
    assert descriptors.why_not(ok.transpose(1, 2)) == ""
    assert "float32" in descriptors.why_not(ok.float())
    assert "multiple of 8" in descriptors.why_not(ok[..., :60])
    assert "multiple of 8" in descriptors.why_not(torch.empty(1, 1, 1, 264, dtype=BF))
    assert "contiguous" in descriptors.why_not(torch.empty(2, 5, 64, 8, dtype=BF).transpose(2, 3)[..., :8])
    assert "stride" in descriptors.why_not(torch.empty(2, 5, 3, 68, dtype=BF)[..., :64])
    assert "aligned" in descriptors.why_not(
        torch.empty(4000, dtype=BF)[4:].as_strided((1, 4, 2, 64), (512, 128, 64, 1))
    )


def test_unusual_calls_take_the_portable_kernels():
    dense = torch.empty(3, 100, 4, 64, dtype=BF)
    odd = torch.empty(3 * 25664, dtype=BF).as_strided((3, 100, 4, 64), (25664, 256, 64, 1))
    lens = torch.tensor([1, 2, 3])
    assert not cuda._unusual(odd, odd, None, None) and not cuda._unusual(dense, dense[:, :7], lens, 0.5)
    assert cuda._unusual(dense, dense, None, -1.0) == {"scale <= 0"}
    assert cuda._unusual(dense, odd, lens, 1.0) == {"k_lens of batches with odd strides"}
    facts = dict(capability=(9, 0), shared=227 << 10)
    assert route(BF, 64, 64, **facts).name == route(BF, 256, 256, **facts).name == "hopper"
    assert "scale <= 0" in route(BF, 64, 64, options=frozenset({"scale <= 0"}), **facts).why


def test_heads_worked_on_together_fit_the_cache():
    assert variant.group(heads=32, kv_group=1, keys=8192, D=128, uneven=False) == 4
    assert variant.group(heads=32, kv_group=1, keys=8192, D=128, uneven=True) == 8
    assert variant.group(heads=128, kv_group=4, keys=4096, D=128, uneven=True) == 64
    assert variant.group(heads=6, kv_group=3, keys=1, D=64, uneven=True) == 6
    assert variant.group(heads=64, kv_group=16, keys=1 << 20, D=128, uneven=False) == 16


def test_joined_batches_are_the_same_rows():
    t = torch.arange(3 * 5 * 2 * 8, dtype=torch.float32).view(3, 5, 2, 8)
    numbers = torch.arange(300, dtype=torch.float32)
    apart = numbers.as_strided((3, 1, 2, 8), (40, 3, 8, 1))  # one row each, whose stride is no one's
    halves = numbers.as_strided((3, 5, 2, 8), (40, 16, 8, 1))  # 2.5 rows from one to the next
    several = (t, t[:, :3], t.transpose(1, 2).contiguous().transpose(1, 2), t[1:2], t[:, :1].expand(3, 5, 2, 8), apart)
    for x in (*several, halves, t[:1].expand(3, 5, 2, 8), t[:1, :1]):
        rows, step = descriptors.as_packed(x)
        assert rows.stride(0) % 8 == 0
        for b in range(x.shape[0]):
            assert torch.equal(rows[b * step : b * step + x.shape[1]], x[b])


# ------------------------------------------------------------------------------------------------ tile table
def _expected(cu, other, total, total_other, tile, descending):
    cu, other = ([min(max(c, 0), n) for c in x.tolist()] for x, n in ((cu, total), (other, total_other)))
    n = len(cu) - 1
    docs = [(d, cu[d], max(cu[d + 1] - cu[d], 0), other[d], max(other[d + 1] - other[d], 0)) for d in range(n)]
    docs += [(n, 0, cu[0], 0, 0), (n + 1, cu[-1], total - cu[-1], 0, 0)]
    rows = []
    for d, start, length, start_o, length_o in sorted(docs, key=lambda x: (-x[4], x[0])):
        tiles = range(-(-length // tile))
        for t in reversed(tiles) if descending else tiles:
            rows.append([d, t, start, length] + ([start_o] if d < n else []) + [length_o])
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_table_lists_every_tile_once_longest_documents_first(seed):
    random.seed(seed)
    n = random.choice([1, 2, 5, 20, 40])
    q = [random.choice([0, 0, 5])] + [random.choice([0, 1, 3, 17, 300]) for _ in range(n)]
    k = [0] + [random.choice([0, 1, 5, 30]) for _ in range(n)]
    cu_q = torch.tensor(q, device=_device()).cumsum(0).int()
    cu_k = torch.tensor(k, device=_device()).cumsum(0)
    total, total_k = int(cu_q[-1]) + random.choice([0, 9]), int(cu_k[-1]) + 3
    for descending in (False, True):
        got = schedule.table(cu_q, cu_k, total, total_k, 8, descending).tolist()
        want = _expected(cu_q, cu_k, total, total_k, 8, descending)
        assert len(want) <= len(got) == schedule.slots(total, n, 8)
        for row, w in zip(got, want):
            assert (row[:4] + row[4 + (len(w) == 5) : 6]) == w
        assert all(row[0] == -1 for row in got[len(want) :])


def test_table_touches_no_foreign_rows_where_bounds_are_wrong():
    cu = torch.tensor([0, 50, 20, 1000, -5], dtype=torch.int32, device=_device())
    for doc, tile, start, length, _, _, *_ in schedule.table(cu, cu, 100, 100, 16, True).tolist():
        assert doc == -1 or (start >= 0 and length >= 0 and start + length <= 100 and tile * 16 < length)


# ------------------------------------------------------------------------------------------------ compiling
@pytest.mark.parametrize(
    "dtype,D,packed,left,right,extras",
    [
        ("bfloat16", 64, 0, "-", "0", ""),
        ("bfloat16", 128, 0, "-", "0", ""),
        ("float16", 128, 1, "-", "0", "sinks"),
        ("bfloat16", 128, 0, "64", "0", "k_lens softcap"),
        ("bfloat16", 128, 0, "-", "-", ""),
        ("bfloat16", 256, 0, "-", "0", ""),
        ("float16", 256, 1, "64", "0", "sinks softcap"),
    ],
)
def test_compiles_for_hopper_without_spills_in_the_main_loops(dtype, D, packed, left, right, extras):
    lines = support.compiled("compile_hopper.py", dtype, D, packed, left, right, extras)
    assert [name for name, *_ in lines] == ["_table"] * packed + ["attention_forward"]
    for name, shared, spilled, local, warnings in lines:
        assert int(shared) <= 227 << 10, f"{name} wants {shared} bytes of shared memory"
        assert int(local) == 0 and int(warnings) == 0, f"{name}: {local} local accesses in loops, {warnings} warnings"
        assert int(spilled) <= 64, f"{name} spills {spilled} bytes"


# ------------------------------------------------------------------------------------------------ results
hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
    ),
]


def _one(q, k, v, sinks, scale, left, right, softcap):
    """A sequence [T, H, D], [S, K, D] in float64."""
    (T, H, D), (S, K) = q.shape, k.shape[:2]
    q, k, v = q.double(), *(x.double().repeat_interleave(H // K, 1) for x in (k, v))
    s = torch.einsum("thd,shd->hts", q, k) * (D**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    p = torch.arange(T, device=q.device)[:, None] + S - T
    j = torch.arange(S, device=q.device)[None]
    see = (j >= p - (S + T if left is None else left)) & (j <= p + (S + T if right is None else right))
    s = s.masked_fill(~see, -torch.inf)
    extra = s.new_full((H, T, 1), -torch.inf) if sinks is None else sinks.double()[:, None, None].expand(H, T, 1)
    lse = torch.cat([s, extra], -1).logsumexp(-1)
    weights = (s - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return torch.einsum("hts,shd->thd", weights, v), lse


def _reference(q, k, v, cu_q, cu_k, k_lens, *options):
    if cu_q is None:
        ends = [k.shape[1]] * q.shape[0] if k_lens is None else k_lens.tolist()
        parts = [_one(q[b], k[b, :n], v[b, :n], *options) for b, n in enumerate(ends)]
        return torch.stack([o for o, _ in parts]), torch.stack([m for _, m in parts])
    out = q.new_zeros(q.shape, dtype=torch.float64)
    lse = out.new_full((q.shape[1], q.shape[0]), -torch.inf)
    bounds = zip(
        cu_q.tolist(),
        cu_q[1:].tolist(),
        (cu_q if cu_k is None else cu_k).tolist(),
        cu_k[1:].tolist() if cu_k is not None else cu_q[1:].tolist(),
    )
    for a, b, c, d in bounds:
        out[a:b], lse[:, a:b] = _one(q[a:b], k[c:d], v[c:d], *options)
    return out, lse


def _nmse(got, want):
    return float(((got.double() - want) ** 2).sum() / (want**2).sum().clamp_min(1e-300))


def _forward(q, k, v, cu_q=None, cu_k=None, k_lens=None, sinks=None, scale=None, left=None, right=None, softcap=0.0):
    return room.forward(q, k, v, cu_q, cu_k, k_lens, None, sinks, None, scale, left, right, softcap, 0.0)


def _check(
    q, k, v, cu_q=None, cu_k=None, k_lens=None, sinks=None, scale=None, left=None, right=None, softcap=0.0, clean=None
):
    """Against float64 (of `clean`, the inputs without what must not matter), and equal bits in a second run."""
    options = (sinks, scale, left, right, softcap)
    assert not any(descriptors.why_not(t) for t in (q, k, v))
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda").fill_(255)  # what the outputs' memory held before: NaN
    out, lse = _forward(q, k, v, cu_q, cu_k, k_lens, *options)
    again = _forward(q, k, v, cu_q, cu_k, k_lens, *options)
    want, want_lse = _reference(*(clean or (q, k, v)), cu_q, cu_k, k_lens, *options)
    seen = want_lse.isfinite()
    assert out.dtype == q.dtype and lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    assert out.isfinite().all() and (lse[~seen] == -torch.inf).all()
    assert not out.movedim(-2, -3)[~seen if sinks is None else torch.zeros_like(seen)].any()
    assert _nmse(out, want) <= 1e-5 and _nmse(lse[seen], want_lse[seen]) <= 1e-9
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def _dense(B, T, S, H, K, D, dtype=BF):
    return tuple(torch.randn(B, n, h, D, device="cuda").to(dtype) for n, h in ((T, H), (S, K), (S, K)))


def _packed(T, S, H, K, D, dtype=BF):
    return tuple(x[0] for x in _dense(1, T, S, H, K, D, dtype))


def _cu(*lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


class TestOnHopper:
    pytestmark = hopper

    @pytest.mark.parametrize("D", [64, 128, 256])
    @pytest.mark.parametrize("right", [0, None])
    @pytest.mark.parametrize(
        "B,T,S,H,K",
        [
            (2, 256, 256, 4, 4), (1, 1000, 1000, 6, 2), (2, 77, 300, 5, 1), (1, 300, 77, 7, 7),
            (1, 1, 513, 7, 1), (2, 128, 1, 2, 2), (2, 200, 260, 4, 2), (1, 2100, 3000, 10, 2),
        ],
    )  # fmt: skip
    def test_tails_and_groups(self, D, right, B, T, S, H, K):
        _check(*_dense(B, T, S, H, K, D), right=right)

    @pytest.mark.parametrize("D", [8, 40, 72, 96, 136, 192, 200, 248])
    def test_head_dims_between(self, D):
        _check(*_dense(2, 200, 260, 4, 2, D), right=0)

    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_float16(self, D):
        _check(*_dense(2, 300, 300, 4, 2, D, HALF), right=0)

    @pytest.mark.parametrize("D", [64, 128, 256])
    @pytest.mark.parametrize("left,right", [(100, 0), (7, 5), (0, 0), (300, 40), (1000, 0), (100, None), (0, 3)])
    def test_windows(self, D, left, right):
        _check(*_dense(2, 700, 650, 4, 2, D), left=left, right=right)
        _check(*_packed(700, 700, 4, 2, D), _cu(3, 0, 500, 197), left=left, right=right)

    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_packed(self, D):
        cu = _cu(100, 1, 0, 257, 33, 640, 128)
        n = int(cu[-1])
        _check(*_packed(n, n, 6, 2, D), cu, right=0)
        _check(*_packed(n, n, 6, 2, D), cu.long())
        cu_k = _cu(50, 7, 9, 0, 300, 700, 1)
        _check(*_packed(n, int(cu_k[-1]), 6, 2, D), cu, cu_k.long(), right=0)

    def test_a_thousand_one_token_documents(self):
        _check(*_packed(1000, 1000, 3, 3, 128), _cu(*[1] * 1000), right=0)

    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_rows_of_no_document_may_hold_nan(self, D):
        cu = _cu(100, 0, 157) + 9
        clean = _packed(400, 400, 4, 2, D)
        dirty = [x.clone() for x in clean]
        for x in dirty:
            x[:9] = x[266:] = torch.nan
        _check(*dirty, cu, right=0, clean=clean)
        _check(*dirty, cu, right=0, sinks=torch.zeros(4, device="cuda"), clean=clean)

    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_nan_stays_in_its_document(self, D):
        cu = _cu(100, 1, 257, 33, 500)
        q, k, v = _packed(891, 891, 4, 2, D)
        want, want_lse = _reference(q, k, v, cu, None, None, None, None, None, 0, 0.0)
        for x in (q, k, v):
            x[101:358] = torch.nan
        out, lse = _forward(q, k, v, cu, right=0)
        keep = torch.ones(891, dtype=torch.bool, device="cuda")
        keep[101:358] = False
        assert _nmse(out[keep], want[keep]) <= 1e-5 and _nmse(lse[:, keep], want_lse[:, keep]) <= 1e-9
        assert out[~keep].isnan().all()

    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_k_lens_and_sinks(self, D):
        clean = _dense(3, 200, 300, 4, 2, D)
        k_lens = torch.tensor([300, 0, 131], device="cuda", dtype=torch.int32)
        q, k, v = (x.clone() for x in clean)
        for b, n in enumerate(k_lens.tolist()):
            k[b, n:] = v[b, n:] = torch.nan
        sinks = torch.tensor([0.5, -torch.inf, 3.0, -2.0], device="cuda")
        for options in ({}, {"right": 0}, {"sinks": sinks}, {"sinks": sinks, "left": 50, "right": 0}):
            _check(q, k, v, k_lens=k_lens, clean=clean, **options)

    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_softcap_and_scale(self, D):
        large = [3 * x for x in _dense(2, 300, 300, 4, 2, D)]
        _check(*large, right=0, softcap=20.0)
        _check(*large, left=64, right=0, softcap=5.0, scale=0.3)
        _check(*large, scale=0.02)

    def test_the_room_takes_this_kernel(self, monkeypatch):
        monkeypatch.setattr(cuda, "portable_forward", None)
        q, k, v = _dense(1, 130, 130, 4, 2, 64)
        out, lse = cuda.forward(q, k, v, None, None, None, None, None, None, None, None, 0, 0.0, 0.0)
        want, want_lse = _forward(q, k, v, right=0)
        assert torch.equal(out, want) and torch.equal(lse, want_lse)

    def test_strides(self):
        q, k, v = _dense(2, 333, 333, 6, 2, 128)
        by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        _check(*by_head, right=0)
        fused = torch.randn(2, 333, 10, 128, device="cuda").to(BF)
        _check(fused[:, :, :6], fused[:, :, 6:8], fused[:, :, 8:], right=0)
        _check(q, k[:1].expand(2, -1, -1, -1), v, right=0)
        _check(q, k, v[:, :, :1].expand(-1, -1, 2, -1), right=0)
        _check(q[:, 5:], k[:, 1:], v[:, 1:], right=0)
        cu = _cu(33, 300)
        _check(fused[0, :, :6], fused[0, :, 6:8], fused[0, :, 8:], cu, right=0)
        _check(*(x[1] for x in by_head), cu, right=0)

    def test_nothing_to_attend_to(self):
        q, k, v = _dense(2, 70, 0, 4, 2, 64)
        _check(q, k, v)
        _check(q, k, v, k_lens=torch.zeros(2, dtype=torch.int32, device="cuda"))
        sinks = torch.randn(4, device="cuda")
        _check(q, k, v, sinks=sinks)
        q, k, v = _packed(70, 0, 4, 2, 64)
        _check(q, k, v, _cu(40, 30), _cu(0, 0))

    def test_large_scores(self):
        q, k, v = _dense(1, 300, 300, 2, 2, 128)
        _check(20 * q, 20 * k, v, right=0)

    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_a_nan_key_is_seen_by_every_row_that_sees_it(self, D):
        q, k, v = _dense(1, 600, 600, 2, 2, D)
        k[0, [5, 100, 200, 300], 0] = torch.nan
        out, lse = _forward(q, k, v, right=0)
        assert out[0, 5:, 0].isnan().all() and lse[0, 0, 5:].isnan().all()
        assert out[0, :5].isfinite().all() and out[0, :, 1].isfinite().all()
