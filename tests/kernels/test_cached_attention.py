"""Attention over a cache beyond the conformance cases: gradcheck, an oracle of its own, layouts, edges, memory."""

import pytest
import support
import torch
from support import nmse

from riftco.functional import Cache, CacheLayer, attention_with_cache
from riftco.kernels.cached_attention import arguments, cases, route, spec
from riftco.kernels.cached_attention.write import quantize_q8_0

DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))
NAMES = ("out", "lse", "d_q", "d_k", "d_v")
HERE = "riftco.kernels.cached_attention"


def filled(slots, window, K, D, dtype="float32", page_size=None, device="cpu"):
    """A cache of random rows."""
    cache = Cache.allocate(1, slots, window, K, D, dtype=dtype, page_size=page_size, device=device)
    layer, pages = cache.layers[0], cache.layers[0].k.shape[:2]
    for rows, scale in ((layer.k, layer.k_scale), (layer.v, layer.v_scale)):
        x = torch.randn(*pages, K, D)
        if scale is None:
            rows.copy_(x)
        else:
            codes, scales = quantize_q8_0(x)
            rows.copy_(codes)
            scale.copy_(scales)
    return cache


def parts(cache):
    layer = cache.layers[0]
    return layer.k, layer.v, layer.k_scale, layer.v_scale


def new_rows(T, S, H, K, D, dtype=torch.float32, device="cpu"):
    shapes = (T, H, D), (S, K, D), (S, K, D)
    return [torch.randn(s, dtype=torch.float64).to(device, dtype).requires_grad_() for s in shapes]


def ints(values, device="cpu"):
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)


def run(q, k, v, cache, slots, positions, d_out, d_lse=None, cu_q=None, cu_k=None, **options):
    """(out, lse, d_q, d_k, d_v)."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    slots, positions, cu_q, cu_k = (ints(x, q.device) for x in (slots, positions, cu_q, cu_k))
    out, lse = attention_with_cache(
        q, k, v, cache, 0, slots, positions, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options
    )
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse.to(lse.dtype)))


def alone(q, k, v, cache, slot, position, d_out, left=None, softcap=0.0):
    """One run in float64 without the op: dequantised prefix and new rows joined, an explicit mask, autograd."""
    q, k, v = (t.detach().double().cpu().requires_grad_() for t in (q, k, v))
    old = [t[slot, :position].double().cpu() for t in cache.dequantized(0, torch.float64)]
    keys, values = (torch.cat([a, b]).repeat_interleave(q.shape[1] // k.shape[1], 1) for a, b in zip(old, (k, v)))
    at = len(keys) - len(q) + torch.arange(len(q))[:, None]
    j = torch.arange(len(keys))
    hidden = (j > at) | (j < at - left if left is not None else False)
    s = torch.einsum("thd,shd->hts", q, keys) * q.shape[-1] ** -0.5
    s = softcap * (s / softcap).tanh() if softcap else s
    s = s.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hts,shd->thd", s.softmax(-1), values)
    grads = torch.autograd.grad(out, (q, k, v), d_out.double().cpu())
    return out.detach(), s.logsumexp(-1).detach(), *grads


@pytest.mark.parametrize(
    "options",
    [{}, {"left": 3}, {"softcap": 1.5, "sinks": True}, {"cu_q": (0, 2, 2, 5), "cu_k": (0, 4, 4, 6), "sinks": True}],
    ids=["plain", "window", "softcap and sinks", "fewer queries than keys"],
)
def test_gradcheck(options):
    options = dict(options)
    S = 6
    T = options.get("cu_q", (S,))[-1]
    cache = filled(3, 7, 2, 4)
    q, k, v = new_rows(T, S, 4, 2, 4, torch.float64)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if options.pop("sinks", False) else None
    cu = {f"cu_seqlens_{n[-1]}": ints(options.pop(n)) for n in ("cu_q", "cu_k") if n in options}
    window = (options.pop("left", None), None)
    leaves = [q, k, v] + ([] if sinks is None else [sinks])

    def fn(q, k, v, sinks=None, impl=None):
        return attention_with_cache(
            q, k, v, cache, 0, ints((2, -1, 0)), ints((5, 3, 0)), window=window, sinks=sinks, return_lse=True,
            impl=impl, **cu, **options,
        )  # fmt: skip

    def finite(*leaves, impl=None):  # rows of the run that is not there have lse -inf
        out, lse = fn(*leaves, impl=impl)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(finite, leaves)
    for a, b in zip(finite(*leaves), finite(*leaves, impl="spec")):
        torch.testing.assert_close(a, b)
    assert torch.autograd.gradgradcheck(lambda *t: finite(*t, impl="spec"), leaves)


SHAPES = [  # D, H, K, window, rows
    pytest.param(128, 8, 2, 512, 64, id="512 x 64"),
    pytest.param(64, 4, 2, 300, 37, id="300 x 37"),
    pytest.param(256, 16, 4, 2048, 256, id="2048 x 256", marks=pytest.mark.slow),
    pytest.param(64, 4, 2, 300, 97, id="prefix of 203"),
    pytest.param(512, 2, 1, 110, 10, id="head dim 512, prefix of 100"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float32", "float16", "q8_0"])
@pytest.mark.parametrize("D,H,K,window,rows", SHAPES)
def test_nmse(device, cached, D, H, K, window, rows):
    """Against float64 at dO ~ 1e-3, for inputs of float16 (float32 where the cache is)."""
    dtype, on = torch.float32 if cached == "float32" else torch.float16, device.torch_device
    if device.name == "cpu-triton" and window == 2048:
        H, K = H // K, 1  # one group: the interpreter takes minutes for four
    cache = filled(1, window, K, D, cached, device=on)
    q, k, v = new_rows(rows, rows, H, K, D, dtype, on)
    d_out = (torch.randn(rows, H, D) * 1e-3).to(q)
    with device.use():
        got = run(q, k, v, cache, [0], [window - rows], d_out)
    want = alone(q, k, v, cache, 0, window - rows, d_out)
    for name, a, b in zip(NAMES, got, want):
        assert nmse(a, b) < (1e-10 if dtype == torch.float32 else 1e-5), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float32", "q8_0"])
@pytest.mark.parametrize("left,softcap", [(None, 0.0), (4, 2.0)])
def test_runs_are_each_run_alone(device, cached, left, softcap):
    """Permuted slots, an empty prefix, an empty run, one-row runs, a run that is not there, spare rows."""
    cache, on = filled(5, 40, 2, 32, cached, device=device.torch_device), device.torch_device
    slots, positions = (3, 0, 1, -1, 4, 2), (17, 0, 23, 9, 32, 40)
    cu = (0, 6, 27, 27, 30, 31, 32)
    q, k, v = new_rows(35, 35, 4, 2, 32, device=on)
    d_out = torch.randn_like(q)
    with device.use(), support.poisoned():
        got = run(q, k, v, cache, slots, positions, d_out, cu_q=cu, window=(left, None), softcap=softcap)
    for r, (slot, position) in enumerate(zip(slots, positions)):
        rows = slice(cu[r], cu[r + 1])
        pieces = [t[:, rows] if n == "lse" else t[rows] for n, t in zip(NAMES, got)]
        if slot < 0:
            want = [torch.full_like(t, -torch.inf if n == "lse" else 0.0) for n, t in zip(NAMES, pieces)]
        else:
            want = alone(q[rows], k[rows], v[rows], cache, slot, position, d_out[rows], left, softcap)
        for a, b in zip(pieces, want):
            torch.testing.assert_close(a.cpu().double(), b.cpu().double(), rtol=2e-5, atol=2e-5)
    for name, t in zip(NAMES, got):
        assert bool(((t[:, 32:] == -torch.inf) if name == "lse" else (t[32:] == 0)).all()), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float16", "q8_0"])
@pytest.mark.parametrize("rows", [1, 20])
def test_pages_are_slots_bit_for_bit(device, cached, rows):
    on = device.torch_device
    cache = filled(3, 24, 2, 32, cached, device=on)
    paged = Cache.allocate(1, 3, 24, 2, 32, dtype=cached, page_size=8, n_pages=11, device=on)
    table = torch.tensor([[4, 9, 0], [1, 10, 7], [2, 3, 8]], dtype=torch.int32, device=on)
    paged.block_table.copy_(table)
    for a, b in zip(*(parts(c) for c in (cache, paged))):
        if a is not None:
            b.zero_()
            b[table.long()] = a.unflatten(1, (3, 8))
    q, k, v = new_rows(2 * rows, 2 * rows, 4, 2, 32, torch.float16, on)
    d_out = torch.randn_like(q)
    with device.use():
        results = [run(q, k, v, c, [2, 0], [19, 4], d_out) for c in (cache, paged, cache)]
    for a, b, again in zip(*results):
        assert torch.equal(a, b) and torch.equal(a, again)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float32", "q8_0"])
@pytest.mark.parametrize("page_size", [None, 5])
def test_rows_that_nobody_sees_may_hold_anything(device, cached, page_size):
    on = device.torch_device
    cache = filled(3, 30, 2, 32, cached, page_size, on)
    q, k, v = new_rows(4, 4, 4, 2, 32, device=on)
    d_out = torch.randn_like(q)
    with device.use():
        want = run(q, k, v, cache, [1, 2], [11, 25], d_out, window=(9, None))
        rows = cache.rows(
            ints([0, 1, 1, 2, 2], on), ints([0, 0, 11, 0, 25], on), 150, ints([0, 30, 32, 51, 67, 72], on)
        )
        at = rows[rows >= 0]
        for t in parts(cache):
            if t is not None and t.is_floating_point():
                t.flatten(0, 1)[at] = torch.nan
        got = run(q, k, v, cache, [1, 2], [11, 25], d_out, window=(9, None))
    for a, b in zip(got, want):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [1, 3])
def test_a_decode_row_does_not_depend_on_the_other_slots(device, T):
    on = device.torch_device
    cache = filled(4, 600, 2, 32, "float16", device=on)
    q, k, v = (t.detach() for t in new_rows(4 * T, 4 * T, 4, 2, 32, torch.float16, on))
    slots, positions = [2, 0, 3, 1], [597, 3, 300, 256]
    with device.use():
        together = attention_with_cache(q, k, v, cache, 0, ints(slots, on), ints(positions, on))
        for r in range(4):
            rows = slice(r * T, (r + 1) * T)
            one = attention_with_cache(
                q[rows], k[rows], v[rows], cache, 0, ints(slots[r : r + 1], on), ints(positions[r : r + 1], on)
            )
            assert torch.equal(together[rows], one)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float16", "q8_0"])
def test_chunks_of_a_run_give_the_gradients_of_the_whole(device, cached):
    """A later chunk's keys reach back into the run: its earlier rows are passed as new keys and get gradients."""
    on = device.torch_device
    cache = filled(1, 60, 1, 32, cached, device=on)
    q, k, v = new_rows(20, 20, 2, 1, 32, device=on)
    d_out = torch.randn_like(q)
    with device.use():
        whole = run(q, k, v, cache, [0], [40], d_out)
        first = run(q[:12], k[:12], v[:12], cache, [0], [40], d_out[:12])
        second = run(q[12:], k, v, cache, [0], [40], d_out[12:], cu_q=(0, 8), cu_k=(0, 20))
    torch.testing.assert_close(torch.cat([first[0], second[0]]), whole[0])
    torch.testing.assert_close(torch.cat([first[2], second[2]]), whole[2])
    for at in (3, 4):
        total = second[at].clone()
        total[:12] += first[at]
        torch.testing.assert_close(total, whole[at], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [None, 4])
def test_writing_the_run_between_forward_and_backward(device, page_size):
    on = device.torch_device
    cache = filled(2, 12, 2, 32, "q8_0", page_size, on)
    q, k, v = new_rows(6, 6, 4, 2, 32, device=on)
    slots, positions = ints([1, 0], on), ints([9, 4], on)
    with device.use():
        want = torch.autograd.grad(attention_with_cache(q, k, v, cache, 0, slots, positions).sum(), (q, k, v))
        out = attention_with_cache(q, k, v, cache, 0, slots, positions)
        cache.write(0, cache.rows(slots, positions, 6), k, v)
        got = torch.autograd.grad(out.sum(), (q, k, v))
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    keys, values = cache.dequantized(0)
    for slot, at, rows in ((1, 9, slice(0, 3)), (0, 4, slice(3, 6))):
        torch.testing.assert_close(keys[slot, at : at + 3], k[rows].detach(), atol=0.03, rtol=0)
        torch.testing.assert_close(values[slot, at : at + 3], v[rows].detach(), atol=0.03, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_float16_gradients_of_a_tiny_upstream(device):
    on = device.torch_device
    cache = filled(2, 50, 1, 32, "float16", device=on)
    q, k, v = new_rows(44, 44, 2, 1, 32, torch.float16, on)
    with torch.no_grad():  # large keys: dS is out of float16's range while dQ is not
        for t, by in ((q, 1 / 64), (k, 64), (cache.layers[0].k, 64)):
            t.mul_(by)
    d_out = torch.randn(44, 2, 32) * torch.tensor([1e-6, 5e-2])[:, None]  # heads and runs of unequal size
    d_out[30:] *= 3
    d_out = d_out.to(q)
    with device.use():
        got = run(q, k, v, cache, [1, 0], [20, 9], d_out, cu_q=(0, 30, 44))
    for rows, slot, position in ((slice(0, 30), 1, 20), (slice(30, 44), 0, 9)):
        want = alone(q[rows], k[rows], v[rows], cache, slot, position, d_out[rows])
        pieces = [(n, a[rows].double().cpu(), b) for n, a, b in zip(NAMES[2:], got[2:], want[2:])]
        pieces += [(f"d_q of head {h}", pieces[0][1][:, h], pieces[0][2][:, h]) for h in range(2)]
        for name, a, b in pieces:
            a, b = a.flatten(), b.flatten()
            assert torch.nn.functional.cosine_similarity(a, b, 0) > 0.9999, name
            assert abs(a.norm() / b.norm() - 1) < 2e-3, name


@pytest.mark.parametrize("device", support.device_params(("cuda",)))
@pytest.mark.parametrize("cached", ["bfloat16", "q8_0"])
def test_gpu_decode_in_a_cuda_graph(device, cached):
    cache = filled(4, 300, 2, 64, cached, device="cuda")
    q, k, v = (t.detach() for t in new_rows(4, 4, 8, 2, 64, torch.bfloat16, "cuda"))
    slots, positions = ints([3, 1, -1, 0], "cuda"), ints([5, 299, 0, 77], "cuda")

    def step():
        cache.write(0, cache.rows(slots, positions, 4), k, v)
        return attention_with_cache(q, k, v, cache, 0, slots, positions)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(2):
        positions.sub_(1).clamp_(min=0)
        q.normal_()
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.parametrize("device", DEVICES)
def test_only_gradients_that_are_needed(device):
    on = device.torch_device
    cache = filled(1, 9, 2, 32, device=on)
    q, k, v = new_rows(3, 3, 4, 2, 32, device=on)
    sinks = torch.randn(4, device=on, requires_grad=True)
    with device.use():

        def grads(*need):
            leaves = [t.detach().requires_grad_(n) for t, n in zip((q, k, v, sinks), need)]
            out = attention_with_cache(*leaves[:3], cache, 0, ints([0], on), ints([5], on), sinks=leaves[3])
            out.sum().backward()
            return [t.grad for t in leaves]

        full = grads(True, True, True, True)
        for need in ((True, False, False, False), (False, True, False, False), (False, False, True, True)):
            for a, b, n in zip(grads(*need), full, need):
                assert torch.equal(a, b) if n else a is None


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_do(device):
    on = device.torch_device
    cache = filled(1, 4, 2, 32, device=on)
    with device.use(), support.poisoned():
        for T, S, slots in ((0, 0, []), (0, 0, [0]), (3, 0, [0])):
            q, k, v = new_rows(T, S, 4, 2, 32, device=on)
            out = attention_with_cache(q, k, v, cache, 0, ints(slots, on), ints([0] * len(slots), on))
            out.sum().backward()
            assert out.shape == q.shape and bool((out == 0).all()) and bool((q.grad == 0).all())
            assert k.grad.shape == k.shape


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    on = device.torch_device
    cache = filled(2, 20, 2, 32, "q8_0", device=on)
    apart = []
    for t in parts(cache):  # heads before rows, and a gap between slots
        held = torch.empty(t.shape[0], t.shape[2] + 1, *t.shape[1:2], t.shape[3], dtype=t.dtype, device=on)
        view = held[:, 1:].transpose(1, 2)
        view.copy_(t)
        apart.append(view)
    spread = Cache((CacheLayer(*apart),))
    q, k, v = new_rows(8, 8, 4, 2, 32, device=on)
    d_out = torch.randn(1, 4, 32, device=on).expand(8, 4, 32)
    wide = [torch.empty(8, 32, t.shape[1] * 2, device=on)[..., ::2].transpose(1, 2) for t in (q, k, v)]
    for a, b in zip(wide, (q, k, v)):
        a.copy_(b.detach())
    with device.use():
        want = run(q, k, v, cache, [1, 0], [13, 2], d_out)
        got = run(*wide, spread, [1, 0], [13, 2], d_out)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


def test_places_outside_the_cache_touch_no_foreign_memory():
    device = next(d for d in support.DEVICES if d.name == "cpu-triton")
    if not device.available:
        pytest.skip(f"cpu-triton: {device.why_not}")
    for page_size in (None, 4):
        cache = filled(2, 8, 1, 32, "float16", page_size)
        if page_size:
            cache.block_table.fill_(1 << 20)
        q, k, v = new_rows(6, 6, 2, 1, 32, torch.float16)
        for slots, positions, cu in (([9, 0], [3, 99], [0, 3, 6]), ([1, 0], [-7, 8], [-3, 40, 90])):
            with device.use():
                out = attention_with_cache(
                    q, k, v, cache, 0, ints(slots), ints(positions), cu_seqlens_q=ints(cu), max_seqlen_q=3
                )
                out.sum().backward()
            assert out.isfinite().all() and q.grad.isfinite().all()


def test_route():
    shape = dict(runs=1, packed=False, K=8, G=4, prefix=8192, left=None, quantized=False, processors=132, shared=0)
    one = route.plan("fwd", torch.float16, 128, rows=1, longest=1, **shape)
    many = route.plan("fwd", torch.float16, 128, rows=64, longest=1, **{**shape, "runs": 64})
    assert (one.pieces, one.chunk) == (many.pieces, many.chunk) and one.pieces > 8 and one.chunk % one.tile.N == 0
    assert route.plan("fwd", torch.float16, 128, rows=8, longest=8, **shape).tile.M == 32
    full = route.plan("fwd", torch.float16, 128, rows=4096, longest=4096, **shape)
    assert full.pieces == 1 and full.programs == 8 * 4096 * 4 // full.tile.M
    few = route.plan("dq", torch.float16, 128, rows=16, longest=16, **shape)
    assert few.pieces > 4
    near = route.plan("fwd", torch.float16, 128, rows=1, longest=1, **{**shape, "left": 100})
    assert near.pieces <= 3
    assert route.tile("fwd", torch.float32, 512).M == 1 and route.tile("dkdv", torch.float16, 600).N == 1
    large = route.tile("dq", torch.float16, 256, True, 227 << 10)
    assert large.M > route.tile("dq", torch.float16, 256, True, 99 << 10).M
    assert route.tile("dq", torch.float16, 256, False, 227 << 10) == route.TILES["dq"][2, 256]
    assert arguments.of_device(torch.device("cpu"))["processors"] == arguments.INTERPRETED_PROCESSORS
    assert spec.BLOCK == 32


@pytest.mark.parametrize(
    "call",
    [pytest.param("float16 q8_0 64", id="float16-q8_0-64")]
    + [
        pytest.param(f"{dtype} {cached} {D}", id=f"{dtype}-{cached}-{D}", marks=pytest.mark.slow)
        for dtype in ("float32", "bfloat16", "float16")
        for cached in ("float32", "float16", "q8_0")
        for D in (64, 128, 256, 512)
    ],
)
@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)])
def test_every_kernel_compiles_into_99_KiB(call, capability):
    lines = support.compiled("compile_kernels.py", capability, "cached", *call.split())
    assert {
        "_cached_fwd",
        "_cached_join",
        "_cached_rows",
        "_cached_dkdv",
        "_cached_dq",
        "_cached_write",
        "_cached_decode",
    } <= {name for name, *_ in lines}
    assert max(int(shared) for _, shared, _ in lines) <= 99 * 1024, lines


@pytest.mark.parametrize(
    "module,old,new,case",
    [
        ("forward", "acc = acc * shrink[:, None] + dot(p.to(v.dtype), v)", "acc = acc + dot(p.to(v.dtype), v)",
         "window, softcap, sinks"),
        ("forward", "end = tl.where(piece < pieces - 1, tl.minimum(high, low_piece + chunk), high)", "end = high",
         "decode, eight rows, several pieces"),
        ("forward", "weight = tl.exp2((part_lse - shift) * LOG2E)", "weight = tl.exp2(part_lse - shift)",
         "decode, eight rows, several pieces"),
        ("forward", "mask=inside & live & (piece == 0)", "mask=inside & live", "one chunk in pieces, q8_0"),
        ("forward", "see = (j[None, :] < last) & (j[None, :] <= at[:, None])\n            if WINDOW:",
         "see = j[None, :] <= at[:, None] + 1\n            if WINDOW:", "more query rows than new keys, q8_0"),
        ("backward", "d_s = p * (dot(v, tl.trans(g)) - delta[None, :])", "d_s = p * dot(v, tl.trans(g))",
         "runs of every length, spare rows of NaN"),
        ("backward", "d_v += dot(p.to(g.dtype), g)", "d_v -= dot(p.to(g.dtype), g)",
         "runs of every length, spare rows of NaN"),
        ("backward", "offset = Tk - Tq  #", "offset = Tk * 0  #", "earlier rows of the run have gradients"),
        ("backward", "slope = 1.0 - ratio * ratio", "slope = 1.0 - ratio", "window, softcap, sinks"),
        ("backward", "d_q.copy_(to.sum(0))", "d_q.copy_(to[0])", "one chunk in pieces, q8_0"),
        ("backward", "for group in range(G):", "for group in range(1):", "earlier rows of the run have gradients"),
    ],
)  # fmt: skip
def test_planted_bugs(module, old, new, case):
    support.assert_caught(cases, f"{HERE}.{module}", old, new, case)


def test_planted_float16_range_bugs():
    """Without the power of two, or with one head's power used for another, a tiny dO is lost."""
    for old, new in [
        ('scale = tl.where((largest > 0.0) & (largest < float("inf")), scale, 1.0)', "scale = scale * 0 + 1.0"),
        ("d_k *= next_unit / unit", "d_k *= 1.0"),
    ]:
        device = next(d for d in support.DEVICES if d.name == ("cuda" if torch.cuda.is_available() else "cpu-triton"))
        with support.mutant(f"{HERE}.backward", old, new), pytest.raises(AssertionError):
            test_float16_gradients_of_a_tiny_upstream(device)
