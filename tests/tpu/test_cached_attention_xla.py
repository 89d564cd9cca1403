"""Attention over a cache as XLA runs it: several tiles, no scores of all keys, and writes into the cache."""

import contextlib
import re

import pytest
import support
import torch
from host_loop import serving_the_cpu
from xla_graph import recorded

from riftco.functional import attention_with_cache, decode_with_cache
from riftco.kernels._check import inputs_of, to
from riftco.kernels.cached_attention import cases, spec
from riftco.kernels.cached_attention.cache import Cache
from riftco.kernels.cached_attention.write import write
from riftco.tpu import cached_attention as launcher


def forward(*args):
    """On the CPU the host's longest run is a guess, which XLA would pad to."""
    return launcher.forward(*args[:16], len(args[0]))


def backward(*args):
    return launcher.backward(*args[:20], len(args[2]), *args[21:])


def on_the_cpu(keys: int = 16):
    return serving_the_cpu(__name__, launcher, "cached_attention", cases, KEYS=keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_the_launcher_is_the_spec(case, dtype):
    with on_the_cpu(160 if case.shape["W"] > 500 else 16) as check:
        check(case=case, dtype=dtype)


def test_unseen_keys_may_hold_anything():
    """NaN beyond a slot's prefix, below every window, and in slots of no run."""
    case = next(c for c in cases.CASES if c.name == "window, softcap, sinks")
    inputs = to(inputs_of(cases, case, torch.float32), torch.float32, "cpu")
    with on_the_cpu():
        want = cases.call(inputs, case)
        for name in ("k_cache", "v_cache"):
            inputs[name][0, :71] = inputs[name][1, 3:] = torch.nan
        got = cases.call(inputs, case)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_run_longer_than_told_is_nan():
    q = torch.randn(6, 2, 8)
    places = (torch.zeros(1, 9, 2, 8),) * 2 + (None,) * 3 + (torch.tensor([0]), torch.tensor([0]), torch.tensor([0, 6]))
    rest = (None, None, None, None, 0.0)
    out, _ = launcher.forward(q, q, q, *places, *rest, 4)
    want, _ = spec.forward(q, q, q, *places, *rest, 6)
    torch.testing.assert_close(out[:4], want[:4])
    assert out[4:].isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "q8_0"])
@pytest.mark.parametrize("rows", [[3, -1, 0, 9, 40, 2], [-1, 7, -1, -1, -1, -1], [-1, -2, 18, -1, -1, 99]])
def test_writes_are_the_specs(dtype, rows):
    made = [Cache.allocate(1, 2, 9, 2, 32, dtype=dtype).layers[0] for _ in range(2)]
    for layer in made:
        for t in (layer.k, layer.v, layer.k_scale, layer.v_scale):
            if t is not None:
                t.copy_(torch.arange(t.numel()).view(t.shape) % 50)
    k, v = torch.randn(6, 2, 32), torch.randn(6, 2, 32)
    for layer, function in zip(made, (write, launcher.write)):
        function(layer.k, layer.v, layer.k_scale, layer.v_scale, torch.tensor(rows), k, v)
    for got, want in zip(vars(made[1]).values(), vars(made[0]).values()):
        assert got is want is None or torch.equal(got, want)


@support.xla
def test_decoding_is_one_graph_for_every_token(device):
    """Write, attend, next position: no recompilation, no scores of all keys, no dequantised cache."""
    import torch_xla

    slots, W, K, D = 3, 2 * launcher.KEYS, 2, 32
    caches = [Cache.allocate(1, slots, W, K, D, dtype="q8_0", page_size=64, device=d) for d in ("cpu", "xla")]
    for name in ("k", "v", "k_scale", "v_scale"):
        values = torch.randint(0, 3, getattr(caches[0].layers[0], name).shape)
        for cache in caches:
            getattr(cache.layers[0], name).copy_(values)
    order, seen = torch.arange(slots, dtype=torch.int32), []
    for step in range(3):
        q, k, v = (torch.randn(slots, heads, D) for heads in (4, K, K))
        positions = torch.tensor([700 + step, step, W - 3 + step], dtype=torch.int32)
        outs = []
        for cache, d in zip(caches, ("cpu", "xla")):
            there = [t.to(d) for t in (q, k, v, order, positions)]
            with recorded() if d == "xla" else contextlib.nullcontext() as record:
                cache.write(0, cache.rows(*there[3:], slots), *there[1:3])
                out = attention_with_cache(*there[:3], cache, 0, *there[3:])
                if d == "xla":
                    hlo = torch_xla._XLAC._get_xla_tensors_hlo([out])
            outs.append(out.cpu())
        torch.testing.assert_close(*outs[::-1])
        assert not record.fallbacks and record.executions == 1
        seen.append(record.compiles)
        assert re.search(rf"f32\[{slots},{K},{launcher.KEYS},{D}\]", hlo), "the tiles are where they are looked for"
        assert not re.search(rf"f32\[[\d,]*\b{W}\b", hlo)
    assert seen[1:] == [0, 0]
    for a, b in zip(vars(caches[0].layers[0]).values(), vars(caches[1].layers[0]).values()):
        assert torch.equal(a, b.cpu())


@support.xla
@pytest.mark.parametrize("cached", ["float32", "q8_0"])
def test_a_decoding_step_is_the_cpus(device, cached):
    """Turned, attended and stored, the cache's own tensors written into."""
    slots, W, K, D = 3, 24, 2, 32
    caches = [Cache.allocate(1, slots, W, K, D, dtype=cached, page_size=8, device=d) for d in ("cpu", "xla")]
    for name in ("k", "v", "k_scale", "v_scale"):
        if (first := getattr(caches[0].layers[0], name)) is not None:
            values = torch.randint(0, 3, first.shape)
            for cache in caches:
                getattr(cache.layers[0], name).copy_(values)
    q, k, v = (torch.randn(slots, heads, D) for heads in (4, K, K))
    cos, sin = torch.randn(2, slots, D // 2)
    places = torch.tensor([2, -1, 0]), torch.tensor([11, 3, 23])
    outs = []
    for cache, d in zip(caches, ("cpu", "xla")):
        there = [t.to(d) for t in (q, k, v, *places, cos, sin)]
        rows = cache.rows(*there[3:5], slots)
        outs.append(decode_with_cache(*there[:3], cache, 0, *there[3:5], rows, cos=there[5], sin=there[6]).cpu())
    torch.testing.assert_close(*outs[::-1])
    for a, b in zip(vars(caches[0].layers[0]).values(), vars(caches[1].layers[0]).values()):
        assert a is b is None or torch.equal(a, b.cpu()) or (cached == "float32" and torch.allclose(a, b.cpu()))


@pytest.mark.parametrize(
    "old,new,name",
    [
        ('place <= fixed["place"]', 'place < fixed["place"]', "decode, one row a slot"),
        ("(page * self.page + key % self.page)", "(page * self.page + (key + 1) % self.page)", "chunk over pages"),
        ('at(state["d_k"], j) + d_s.mT', 'at(state["d_k"], j) - d_s.mT', "earlier rows of the run have gradients"),
        ('state["total"] * shrink', 'state["total"]', "decode, eight rows, several pieces"),
    ],
)
def test_planted_bugs(old, new, name):
    case = next(c for c in cases.CASES if c.name == name)
    with support.mutant("riftco.tpu.cached_attention", old, new), on_the_cpu() as check, pytest.raises(AssertionError):
        check(case=case, dtype=torch.float32)
