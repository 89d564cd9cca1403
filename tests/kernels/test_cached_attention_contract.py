"""The cache and the contract of attention over it: writes, formats, memory, torch's modes, opcheck, errors."""

import dataclasses

import pytest
import support
import torch
from test_cached_attention import DEVICES, filled, ints, new_rows, parts, run
from torch.utils._python_dispatch import TorchDispatchMode

from riftco import nn
from riftco.functional import Cache, attention_with_cache
from riftco.kernels.cached_attention import cache as cache_module
from riftco.kernels.cached_attention import op


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_q8_0_is_gguf_bit_for_bit(device, dtype):
    gguf = pytest.importorskip("gguf")
    on = device.torch_device
    x = torch.randn(9, 3, 64).mul(torch.logspace(-9, 4, 9)[:, None, None]).to(dtype)
    x[2, 0, :32], x[3, 1, 5], x[4, 2, 32:] = 0.0, 127.0, 63.5
    x[5, 0, :32] = torch.arange(32) * 0.5 - 8  # halves: rounded away from zero
    x[5, 0, 0] = 127.0
    cache = Cache.allocate(1, 1, 9, 3, 64, dtype="q8_0", device=on)
    with device.use():
        cache.write(0, torch.arange(9, device=on), x.to(on), x.flip(-1).to(on))
    layer = cache.layers[0]
    for codes, scale, t in ((layer.k, layer.k_scale, x), (layer.v, layer.v_scale, x.flip(-1))):
        packed = gguf.quantize(t.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        blocks = torch.from_numpy(packed).view(9, 3, 2, 34)
        assert torch.equal(scale.cpu()[0], blocks[..., :2].contiguous().view(torch.float16).squeeze(-1))
        assert torch.equal(codes.cpu()[0], blocks[..., 2:].contiguous().view(torch.int8).flatten(-2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cached", ["float32", "bfloat16", "q8_0"])
def test_writes_of_rows_that_are_not_there_are_left_out(device, cached):
    on = device.torch_device
    cache = filled(2, 6, 5, 32, cached, 4, on)
    before = [None if t is None else t.clone() for t in parts(cache)]
    x = torch.randn(8, 5, 2, 32, device=on)[:, :, 1]  # rows with gaps
    rows = cache.rows(ints([1, -1, 0], on), ints([7, 0, 0], on), 8, ints([0, 2, 5, 6], on))
    assert rows.tolist() == [15, -1, -1, -1, -1, 0, -1, -1]
    with device.use():
        cache.write(0, rows, x, x)
    for a, b in zip(before, parts(cache)):
        if a is not None:
            same = (a == b).flatten(0, 1).flatten(1).all(1)
            assert same.sum() == 14 and not same[0] and not same[15]
    keys, _ = cache.dequantized(0)
    torch.testing.assert_close(keys[1, 7], x[0], atol=0.05, rtol=0)
    torch.testing.assert_close(keys[0, 0], x[5], atol=0.05, rtol=0)


def test_rows_of_packed_pages():
    cache = Cache.allocate(1, 2, 6, 1, 8, page_size=2, n_pages=9)
    cache.block_table.copy_(torch.tensor([[5, 0, 2], [8, 1, 7]]))
    assert cache.rows(ints([1, 0]), ints([3, 0]), 4).tolist() == [3, 14, 10, 11]
    assert cache.window == 6 and cache.slots == 2 and cache.dtype == "float16"
    with pytest.raises(ValueError, match="head dim 40"):
        Cache.allocate(1, 1, 1, 1, 40, dtype="q8_0")
    with pytest.raises(ValueError, match="'q4_0'"):
        Cache.allocate(1, 1, 1, 1, 32, dtype="q4_0")
    with pytest.raises(ValueError, match="at least 1"):
        Cache.allocate(1, 0, 1, 1, 32)


class Watch(TorchDispatchMode):
    """Bytes of the largest floating tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and t.is_floating_point():
                self.largest = max(self.largest, t.numel() * t.element_size())
        return result


def test_cpu_holds_no_copy_of_the_cache():
    from riftco.kernels.cached_attention import cpu

    cache = filled(2, 6000, 2, 32, "q8_0")
    q, k, v = (t.detach() for t in new_rows(16, 16, 4, 2, 32))
    layer = cache.layers[0]
    places = (*parts(cache), None, ints([1]), ints([5000]), None, None, None, None, None, 0.0, 16)
    with Watch() as watch:
        out, lse = cpu.forward(q, k, v, *places)
        grads = cpu.backward(q, None, q, k, v, out, lse, *places, True, True, True, False)
    assert watch.largest < layer.k.numel() // 2
    assert [t.shape for t in grads[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("device", support.device_params(("cuda",)))
@pytest.mark.parametrize("cached", ["float16", "q8_0"])
def test_gpu_memory_does_not_grow_with_the_window(device, cached):
    """Forward and backward of a chunk: what is allocated depends on the rows of the chunk, not on the prefix."""
    peaks = []
    for window in (8192, 65536):
        cache = filled(1, window, 8, 128, cached, device="cuda")
        q, k, v = new_rows(512, 512, 32, 8, 128, torch.bfloat16, "cuda")
        d_out = torch.randn_like(q)
        run(q, k, v, cache, [0], [window - 512], d_out)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(q, k, v, cache, [0], [window - 512], d_out)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.05 * peaks[0]
    assert peaks[1] < 65536 * 8 * 128  # bytes; a 16-bit copy of the keys alone would be twice that


def example(dtype="q8_0", page_size=4):
    cache = filled(2, 8, 2, 32, dtype, page_size)
    places = (*parts(cache), cache.block_table, ints([1, 0]), ints([5, 0]))
    return cache, new_rows(6, 6, 4, 2, 32), (*places, None, None, torch.randn(4), None, 3, 2.0, 3)


def test_opcheck():
    _, (q, k, v), rest = example()
    q, k, v = (t.detach() for t in (q, k, v))
    torch.library.opcheck(op.fwd, (q, k, v, *rest))
    out, lse = op.fwd(q, k, v, *rest)
    for need in ((True, True, True, True), (True, False, True, False)):
        torch.library.opcheck(op.bwd, (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *rest, *need))
    torch.library.opcheck(cache_module.write, (*rest[:4], torch.tensor([3, -1, 0, 1, 2, 9]), k, v))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()
    on = device.torch_device
    cache = filled(2, 16, 2, 32, "q8_0", 4, on)

    def both(q, k, v, slots, positions, cu):
        out, lse = attention_with_cache(q, k, v, cache, 0, slots, positions, cu_seqlens_q=cu, return_lse=True)
        return out, lse, attention_with_cache(q, k, v, cache, 0, slots, positions)

    fn = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    slots, positions = ints([1, 0], on), ints([6, 11], on)
    with device.use():
        for T in (4, 6):
            cu = ints([0, 1, T], on)
            tensors = new_rows(T, T, 4, 2, 32, device=on)
            a, b = ([t.detach().clone().requires_grad_() for t in tensors] for _ in range(2))
            ya, yb = both(*a, slots, positions, cu), fn(*b, slots, positions, cu)
            for y in (ya, yb):
                (y[0].square().sum() + y[1].sum() + y[2].sum()).backward()
            assert all(torch.equal(s, t) for s, t in zip(ya, yb))
            assert all(torch.equal(s.grad, t.grad) for s, t in zip(a, b))


def test_modes():
    cache, (q, k, v), _ = example()
    args = (cache, 0, ints([1, 0]), ints([5, 0]))
    with torch.inference_mode():
        a = attention_with_cache(q, k, v, *args)
    with torch.no_grad():
        b, lse = attention_with_cache(q, k, v, *args, return_lse=True)
    assert torch.equal(a, b) and not b.requires_grad and not lse.requires_grad
    live = attention_with_cache(q, k, v, *args)
    first = torch.autograd.grad(live.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(live.sum(), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(lambda *t: attention_with_cache(*t, *args), q, k, v, use_reentrant=False)
    third = torch.autograd.grad(again.sum(), (q, k, v))
    assert all(torch.equal(x, y) and torch.equal(y, z) for x, y, z in zip(first, second, third))
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_with_cache(q, k, v, *args).dtype == torch.bfloat16
    (g,) = torch.autograd.grad(attention_with_cache(q, k, v, *args).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    got = torch.func.grad(lambda t: attention_with_cache(t, k, v, *args).square().sum())(q.detach())
    want = torch.func.grad(lambda t: attention_with_cache(t, k, v, *args, impl="spec").square().sum())(q.detach())
    torch.testing.assert_close(got, want)


def test_module():
    cache, (q, k, v), _ = example()
    layer = nn.CachedAttention(0, window=(4, 0), softcap=3.0, sinks=4)
    layer.sinks.data.normal_()
    out = layer(q, k, v, cache, ints([1, 0]), ints([5, 0]))
    want = attention_with_cache(
        q, k, v, cache, 0, ints([1, 0]), ints([5, 0]), window=(4, None), softcap=3.0, sinks=layer.sinks
    )
    assert torch.equal(out, want)
    out.sum().backward()
    assert layer.sinks.grad.abs().sum() > 0 and nn.CachedAttention(0).sinks is None


def test_errors():
    cache, (q, k, v), _ = example()
    slots, positions, cu = ints([1, 0]), ints([5, 0]), ints([0, 2, 6])

    def with_layer(**change):
        return Cache((dataclasses.replace(cache.layers[0], **change),), cache.block_table)

    good = dict(q=q, k_new=k, v_new=v, cache=cache, layer=0, slots=slots, positions=positions)
    for change, text in [
        ({"q": q[:, 0]}, r"q must be \[T, H, D\]"),
        ({"v_new": v[:3]}, r"\[S, K, D\]"),
        ({"q": q.half()}, "share a floating dtype"),
        ({"q": q[:, :3]}, "multiple of key heads; got 3 and 2"),
        ({"k_new": k[:, :1], "v_new": v[:, :1]}, r"cache must hold rows \[1, 32\]"),
        ({"slots": slots.float()}, "slots must be int32"),
        ({"positions": positions[:1]}, "positions must be int32"),
        ({"cu_seqlens_q": cu[:2]}, "cu_seqlens_q must be int32"),
        ({"cu_seqlens_k": cu}, "cu_seqlens_k needs cu_seqlens_q"),
        ({"q": q[:5]}, "without cu_seqlens_q"),
        ({"window": (-1, None)}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"sinks": torch.zeros(3)}, r"sinks must be float32 \[4\]"),
        ({"impl": "fast"}, "'fast'"),
        ({"slots": slots.to("meta")}, "slots on meta"),
        ({"cache": with_layer(k_scale=None)}, "int8 cache"),
        ({"cache": with_layer(v_scale=parts(cache)[3].repeat(1, 1, 1, 2))}, "a scale for each 32"),
        ({"cache": with_layer(k=torch.zeros(4, 4, 2, 33, dtype=torch.int8)[..., :32])}, "multiples of 4"),
    ]:
        with pytest.raises(ValueError, match=text):
            attention_with_cache(**{**good, **change})
    for rows, x, text in [
        (torch.arange(5), k, r"int64 \[6\]"),
        (torch.arange(6).float(), k, "float32"),
        (torch.arange(6), k[:, :1], r"\[total, 2, 32\]"),
    ]:
        with pytest.raises(ValueError, match=text):
            cache.write(0, rows, x.detach(), x.detach())
