"""Decoding over a cache in Metal: pieces, independence of the other runs, pages, what keeps no shader."""

import metal_emulator
import pytest
import support
import torch

import riftco
from riftco.functional import attention_with_cache
from riftco.kernels.cached_attention.cache import Cache
from riftco.metal.cached_attention import pieces

DEVICE = next(d for d in support.DEVICES if d.name == "mps-emulated")
pytestmark = pytest.mark.skipif(not DEVICE.available, reason=f"mps-emulated: {DEVICE.why_not}")


def filled(
    dtype: str, page_size: int | None = None, slots: int = 3, window: int = 600, K: int = 2, D: int = 32
) -> Cache:
    cache = Cache.allocate(1, slots, window, K, D, dtype=dtype, page_size=page_size)
    generator = torch.Generator().manual_seed(7)
    where = torch.arange(slots, dtype=torch.int32)
    rows = cache.rows(where, torch.zeros_like(where), slots * window)
    k, v = (torch.randn(slots * window, K, D, generator=generator) for _ in range(2))
    cache.write(0, rows, k, v)
    return cache


def decoded(cache: Cache, slots: list[int], positions: list[int], rows: int = 1, H: int = 6, **options):
    """out, lse of `rows` new rows a run; a run's rows are a function of its slot."""
    K, D = cache.layers[0].k.shape[2:]
    parts = []
    for heads in (H, K, K):
        made = [torch.randn(rows, heads, D, generator=torch.Generator().manual_seed(s + heads)) for s in slots]
        parts.append(torch.cat(made).half())
    at = (torch.tensor(t, dtype=torch.int32) for t in (slots, positions))
    with DEVICE.use(), support.poisoned():
        return attention_with_cache(*parts, cache, 0, *at, return_lse=True, **options)


@pytest.mark.parametrize(
    "W,left,longest,want",
    [
        (512, None, 1, (1, 0)),
        (513, None, 1, (3, 257)),
        (8192, None, 8, (17, 512)),
        (8192, None, 9, (1, 0)),  # no decoding: rows enough to fill a GPU
        (1 << 20, None, 1, (65, 16384)),
        (8192, 1023, 1, (3, 512)),
    ],
)
def test_pieces(W, left, longest, want):
    assert pieces(W, left, longest) == want


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_a_row_does_not_depend_on_the_other_runs(dtype):
    """Bit for bit, in whichever order the threads run."""
    cache = filled(dtype)
    alone, lse = decoded(cache, [1], [577])
    for seed in range(4):
        with metal_emulator.schedule(seed):
            out, all_lse = decoded(cache, [2, -1, 1, 0], [3, 600, 577, 600])
        assert torch.equal(out[2:3], alone) and torch.equal(all_lse[:, 2:3], lse)
        assert not out[1].any() and (all_lse[:, 1] == -torch.inf).all()


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_pages_are_slots_bit_for_bit(dtype):
    for options in ({}, {"window": (100, None), "softcap": 2.0}):
        results = [decoded(filled(dtype, page), [2, 0], [600, 41], rows=2, **options) for page in (None, 25)]
        assert all(torch.equal(a, b) for a, b in zip(*results))


def test_cached_rows_that_nobody_sees_may_hold_anything():
    cache = filled("float16")
    want = decoded(cache, [1], [300])
    cache.layers[0].k[1, 300:] = torch.nan
    cache.layers[0].v[1, 300:] = torch.nan
    cache.layers[0].k[0] = torch.nan
    assert all(torch.equal(a, b) for a, b in zip(decoded(cache, [1], [300]), want))


def test_nothing_to_do():
    cache = filled("float16", window=4)
    q, kv = torch.randn(0, 6, 32), torch.randn(0, 2, 32)
    none = torch.zeros(0, dtype=torch.int32)
    with DEVICE.use(), metal_emulator.recording() as jobs:
        out, lse = attention_with_cache(q, kv, kv, cache, 0, none, none, return_lse=True)
    assert out.shape == (0, 6, 32) and lse.shape == (6, 0) and not jobs


def test_what_runs_where_is_told():
    rows = {r["op"]: r["implementation"] for r in riftco.explain("mps") if r["op"].startswith("cached_attention")}
    assert rows["cached_attention_fwd"] == "riftco.metal.cached_attention:forward"
    assert rows["cached_attention_bwd"] == "riftco.metal.cached_attention:backward"


def test_threadgroups_take_what_others_leave():
    cache = filled("q8_0")
    with metal_emulator.recording() as jobs:
        decoded(cache, [1, -1, 0], [577, 3, 0], rows=2)
    for job in jobs:
        assert job.with_groups(1).replay("none").buffers == job.replay("none").buffers
