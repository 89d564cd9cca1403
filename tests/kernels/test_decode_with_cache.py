"""A decoding step of a layer: against rope, attention_with_cache and the cache's write, one after the other."""

import dataclasses
import inspect

import pytest
import support
import torch
from support import nmse
from test_cached_attention import filled, ints, parts

from riftco.functional import Cache, attention_with_cache, decode_with_cache, rope
from riftco.kernels.cached_attention import decode, route

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
CACHED = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
BUDGET = {torch.float32: 1e-10, torch.float16: 1e-5, torch.bfloat16: 2e-5}
TRUNCATED = 2e-4  # of bfloat16, which Triton's interpreter truncates where hardware rounds


def inputs(rows, H, K, D, R, dtype, device):
    """q, k, v, and each row's cos and sin."""
    q, k, v = (torch.randn(rows, heads, D, dtype=torch.float64).to(device, dtype) for heads in (H, K, K))
    angle = 3 * torch.randn(rows, R // 2)
    return q, k, v, (1.1 * angle.cos()).to(device), (1.1 * angle.sin()).to(device)


def copied(cache, dtype=None):
    """The same rows elsewhere, float ones in another dtype."""

    def copy(t, codes):
        return None if t is None else t.clone() if codes or dtype is None else t.to(dtype)

    def layer(x):
        codes = x.k_scale is not None
        k, v, k_scale, v_scale = (copy(t, codes) for t in (x.k, x.v, x.k_scale, x.v_scale))
        return dataclasses.replace(x, k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    return Cache(tuple(layer(x) for x in cache.layers), cache.block_table)


def apart(q, k, v, cache, slots, positions, rows, cos=None, sin=None, interleaved=False, **options):
    """The three ops."""
    if cos is not None:
        q, k = rope(q, k, cos, sin, interleaved=interleaved)
    out = attention_with_cache(q, k, v, cache, 0, slots, positions, **options)
    cache.write(0, rows, k, v)
    return out


CASES = {  # shape, slots, positions, options
    "one row": (dict(W=24), (2, 0, 3), (23, 0, 17), {}),
    "not turned": (dict(W=24, turned=False), (2, 0), (23, 5), {}),
    "eight rows, several pieces": (dict(W=900, each=8), (1, -1, 2), (892, 4, 700), {}),
    "pages, a slot that is not there": (dict(W=40, page=8, D=64, H=6, cache="q8_0"), (1, -1, 0), (33, 7, 39), {}),
    "window as long as the ring": (dict(W=1700, page=850, K=1, ring=True), (0,), (1651,), dict(window=(850, None))),
    "window, softcap, sinks": (
        dict(W=70, each=2, sinks=True), (3, 1), (68, 9), dict(window=(20, None), softcap=3.0, scale=0.4),
    ),
    "window of one": (dict(W=24, each=2), (1, 0), (20, 3), dict(window=(1, None))),
    "interleaved part of a head": (dict(W=24, R=10), (1, 0), (20, 3), dict(interleaved=True)),
    "half of a head": (dict(W=24, R=16, cache="q8_0"), (1, 0), (20, 3), {}),
    "odd head dim": (dict(W=30, D=40, H=3, K=1), (1, 0), (20, 3), {}),
    "codes in pieces": (dict(W=1300, cache="q8_0", K=1), (1, 0), (1299, 3), {}),
    "many heads of a group": (dict(W=24, H=24, K=1, each=4), (1, 0), (20, 3), {}),
    "wide heads": (dict(W=9, D=544, H=2, K=1), (1, 0), (8, 3), {}),
}  # fmt: skip


@dataclasses.dataclass
class Made:
    shape: dict
    cache: Cache
    tensors: tuple
    places: tuple  # slots, positions, rows
    options: dict

    def wide(self):
        """The options in float64."""
        return self.options | {n: t.double() for n, t in self.options.items() if n == "sinks"}


def make(name, dtype, device):
    shape, slots, positions, options = CASES[name]
    s = dict(each=1, H=4, K=2, D=32, page=None, cache=CACHED[dtype]) | shape
    cache = filled(4, s["W"], s["K"], s["D"], s["cache"], s["page"], device)
    if s.get("ring"):
        cache.block_table[:, 1:] = cache.block_table[:, :1]
    rows = len(slots) * s["each"]
    q, k, v, cos, sin = inputs(rows, s["H"], s["K"], s["D"], s.get("R", s["D"]), dtype, device)
    if s.get("turned", True):
        options = options | {"cos": cos, "sin": sin}
    if s.get("sinks"):
        options = options | {"sinks": torch.randn(s["H"]).to(device)}
    places = ints(slots, device), ints(positions, device)
    return Made(s, cache, (q, k, v), (*places, cache.rows(*places, rows)), options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CACHED)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_three_ops(device, dtype, name):
    made = make(name, dtype, device.torch_device)
    exact, before = copied(made.cache, torch.float64), copied(made.cache)
    want = apart(*(t.double() for t in made.tensors), exact, *made.places, **made.wide())
    with device.use(), support.poisoned():
        out = decode_with_cache(*made.tensors, made.cache, 0, *made.places, **made.options)
    truncates = device.name == "cpu-triton" and dtype == torch.bfloat16
    assert out.dtype == dtype and nmse(out, want) < (TRUNCATED if truncates else BUDGET[dtype])
    step = 2e-2 if made.shape["cache"] == "q8_0" else {torch.float32: 1e-6, torch.float16: 1e-3}.get(dtype, 1e-2)
    for got, right, old in zip(*(c.dequantized(0) for c in (made.cache, exact, before))):
        torch.testing.assert_close(got, right, rtol=step, atol=step)
        changed = (got != old).flatten(2).any(2)
        assert torch.equal(changed, (right.to(old) != old).flatten(2).any(2)) or made.shape["cache"] == "q8_0"
        assert int(changed.sum()) >= 1
    mine, other = parts(made.cache), parts(exact)
    for got, right in zip(mine[1::2], other[1::2]):  # v, which nothing rounds but the cache, and its scales
        assert got is None or torch.equal(got.double(), right.to(got.dtype).double())
    assert not made.cache.arrived.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float32", "float16", "q8_0"])
def test_what_it_stores_is_what_write_stores(device, cached):
    """Without a rotation bit for bit, in codes and scales too; rows of -1 nowhere."""
    on = device.torch_device
    cache = filled(3, 12, 2, 64, cached, 5, on)
    q, k, v, _, _ = inputs(6, 4, 2, 64, 64, torch.float32, on)
    k[1] *= 1e-30
    v[2, 0, :32] = 0
    slots, positions = ints((2, -1, 0), on), ints((9, 3, 4), on)
    rows = cache.rows(slots, positions, 6)
    rows[5] = -1
    want = copied(cache)
    with device.use():
        decode_with_cache(q, k, v, cache, 0, slots, positions, rows)
        want.write(0, rows, k, v)
    for got, right in zip(parts(cache), parts(want)):
        assert got is None or torch.equal(got, right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float16", "q8_0"])
@pytest.mark.parametrize("each", [1, 2])
def test_a_row_does_not_depend_on_the_other_slots(device, cached, each):
    on = device.torch_device
    cache = filled(4, 1300, 2, 32, cached, device=on)
    q, k, v, cos, sin = inputs(4 * each, 4, 2, 32, 32, torch.float16, on)
    slots, positions = ints((2, 0, 3, 1), on), ints((1290, 3, 780, 256), on)
    rows = cache.rows(slots, positions, 4 * each)
    start = copied(cache)
    with device.use():
        results = []
        for _ in range(2):
            mine = copied(start)
            results.append(decode_with_cache(q, k, v, mine, 0, slots, positions, rows, cos=cos, sin=sin))
        assert torch.equal(*results)
        for r in range(4):
            at = slice(r * each, (r + 1) * each)
            one = decode_with_cache(
                q[at], k[at], v[at], copied(start), 0, slots[r : r + 1], positions[r : r + 1], rows[at], cos=cos[at],
                sin=sin[at],
            )  # fmt: skip
            assert torch.equal(results[0][at], one)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float32", "q8_0"])
@pytest.mark.parametrize("page_size", [None, 5])
def test_rows_that_nobody_sees_may_hold_anything(device, cached, page_size):
    on = device.torch_device
    cache = filled(3, 30, 2, 32, cached, page_size, on)
    q, k, v, cos, sin = inputs(3, 4, 2, 32, 32, torch.float32, on)
    for t in (q, k, v):
        t[1] = torch.nan  # of the slot that is not there
    slots, positions = ints([1, -1, 2], on), ints([11, 0, 25], on)
    rows = cache.rows(slots, positions, 3)
    spoilt = copied(cache)
    at = spoilt.rows(ints([0, 1, 1, 2, 2], on), ints([0, 0, 11, 0, 25], on), 71, ints([0, 30, 32, 51, 66, 71], on))
    for t in parts(spoilt):
        if t is not None and t.is_floating_point():
            t.flatten(0, 1)[at[at >= 0]] = torch.nan
    with device.use():
        got, want = (
            decode_with_cache(q, k, v, c, 0, slots, positions, rows, cos=cos, sin=sin, window=(9, None))
            for c in (spoilt, cache)
        )
    assert torch.equal(got, want) and not got[1].any() and bool(got[0].any())


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """q, k and v as a joined product gives them, and columns with gaps; another layer; no counters of the cache."""
    on = device.torch_device
    cache = filled(3, 1000, 2, 32, "float32", device=on)
    cache = Cache((None, cache.layers[0]))
    joined = torch.randn(2, 8 * 32, device=on).split((128, 64, 64), -1)
    q, k, v = (t.unflatten(-1, (-1, 32)) for t in joined)
    gaps = [torch.randn(*t.shape, 2, device=on)[..., 0] for t in (q, k, v)]
    slots, positions = ints((2, 1), on).long(), ints((999, 800), on).long()
    rows = slots * 1000 + positions
    turn = torch.randn(2, 2, 16, device=on)
    for tensors in ((q, k, v), gaps):
        for options in ({}, {"cos": turn[0], "sin": turn[1]}):
            with device.use():
                got, want = (
                    decode_with_cache(*given, cache, 1, slots, positions, rows.int(), **options)
                    for given in (tensors, [t.contiguous() for t in tensors])
                )
            assert torch.equal(got, want)


def test_plan():
    """Of the window alone, and of nothing that a step's other slots have."""
    plan = dict(runs=32, each=1, K=8, G=4, left=None, quantized=False)
    short = route.decode_plan(torch.bfloat16, 128, prefix=585, **plan)
    assert short.pieces == 1 and short.programs == 256
    long = route.decode_plan(torch.bfloat16, 128, prefix=8192, **plan)
    assert (long.pieces, long.chunk, long.programs) == (16, 512, 16 * 256)
    huge = route.decode_plan(torch.bfloat16, 128, prefix=1 << 20, **plan)
    assert huge.pieces <= route.MOST_PIECES and huge.chunk * huge.pieces >= 1 << 20
    assert route.decode_plan(torch.bfloat16, 128, prefix=1 << 20, **plan | {"left": 1023}).pieces == 2
    for other in ({"each": 9}, {"each": 8, "G": 9}):
        assert route.decode_plan(torch.bfloat16, 128, prefix=585, **plan | other) is None
    assert route.decode_plan(torch.bfloat16, 544, prefix=585, **plan) is None


PLANTED = [  # what the kernel says, what it must not say, the case that shows it
    ("tl.where(first[None, :], -y, y) * s", "tl.where(first[None, :], y, -y) * s", "one row"),
    ("== there - 1", "== there", "eight rows, several pieces"),
    ("tl.store(arrived, 0)", "tl.store(arrived, 1)", "eight rows, several pieces"),
    ("see = (t >= new) & inside & live", "see = inside & live", "eight rows, several pieces"),
    ("see & (t - new <= left)", "see & (t - new < left)", "window of one"),
    ("x.to(tl.float32) * c + ", "x.to(tl.float32) + ", "half of a head"),
]


@pytest.mark.parametrize("old,new,name", PLANTED)
def test_planted_bugs(old, new, name):
    device = next(d for d in support.DEVICES if d.name == ("cuda" if torch.cuda.is_available() else "cpu-triton"))
    if not device.available:
        pytest.skip(f"{device.name}: {device.why_not}")
    with support.mutant("riftco.kernels.cached_attention.decode_cuda", old, new), pytest.raises(AssertionError):
        test_it_is_the_three_ops(device, torch.float32, name)


def test_opcheck():
    cache = filled(2, 8, 2, 32, "q8_0", 4)
    q, k, v, cos, sin = inputs(4, 4, 2, 32, 16, torch.float32, "cpu")
    places = cache.block_table, ints((1, 0)), ints((5, 0)), torch.tensor([5, 6, -1, 0]), torch.randn(4)
    torch.library.opcheck(decode.step, (q, k, v, cos, sin, *parts(cache), cache.arrived, *places, False, None, 3, 2.0))


def test_errors():
    cache = filled(2, 8, 2, 32)
    q, k, v, cos, sin = inputs(4, 4, 2, 32, 32, torch.float32, "cpu")
    good = dict(
        q=q, k_new=k, v_new=v, cache=cache, layer=0, slots=ints((1, 0)), positions=ints((5, 0)),
        rows=torch.arange(4), cos=cos, sin=sin,
    )  # fmt: skip

    def counting(*shape, **kind):
        return dataclasses.replace(cache, arrived=torch.zeros(shape, **{"dtype": torch.int32, **kind}))

    for change, text in [
        ({"q": q[:2]}, "as many rows of q as of k_new; got 2 and 4"),
        ({"rows": torch.arange(3)}, r"rows must be int32 or int64 \[4\]"),
        ({"sin": None}, "cos and sin come together"),
        ({"cos": cos[:3]}, r"cos must be float32 \[4, P\], a row of rope_tables"),
        ({"sin": sin.double()}, "sin must be float32"),
        ({"cos": torch.zeros(4, 17), "sin": torch.zeros(4, 17)}, "2 P <= 32"),
        ({"slots": ints((1, 0, 1)), "positions": ints((1, 1, 1))}, "decode_with_cache: without cu_seqlens_q"),
        ({"q": q.detach().requires_grad_()}, "records no gradient"),
        ({"impl": "fast"}, "'fast'"),
        ({"cache": q}, r"cache must be a riftco.functional.Cache; got torch.float32 \(4, 4, 32\)"),
        ({"rows": torch.arange(4, device="meta")}, "rows on meta"),
        ({"cache": counting(1, 2)}, r"`arrived` must be int32 \[2, 2\]"),  # another would be written beyond its end
        ({"cache": counting(2, 2, dtype=torch.int64)}, "arrived"),
        ({"cache": counting(2, 2, device="meta")}, "arrived on meta"),
    ]:
        with pytest.raises(ValueError, match=text):
            decode_with_cache(**good | change)
    with torch.no_grad():
        one, two = (decode_with_cache(**good | {"impl": impl, "cache": copied(cache)}) for impl in (None, "spec"))
    torch.testing.assert_close(one, two)
    assert "impl" in inspect.signature(decode_with_cache).parameters
