"""What the twins hand to the kernels, on each device beside float64: strides, masks, bounds and places of their own."""

import pytest
import support
import torch

from riftco import nn
from riftco.functional import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
    varlen_attn,
)

DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))
B, T, S, H, K, D = 2, 20, 36, 4, 2, 16


def sdpa(q, k, v, **options):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def hidden(q, k, v, m):
    return sdpa(q, k, v, attn_mask=(m > -0.5).expand(B, H, T, S))


def packed(q, k, v, m):
    return flash_attn_qkvpacked_func(torch.stack([q, k[:, :T].repeat_interleave(2, 2), q * 0.5], 2), causal=True)


def bounds(*ends, of):
    return torch.tensor((0, *ends), dtype=torch.int32, device=of.device)


def documents(q, k, v, m):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    cu_q, cu_k = bounds(7, 7, 8, 33, of=q), bounds(20, 31, 31, 70, of=q)
    return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 25, 39, causal=True, window_size=(11, 0), softcap=3.0)


def pages(q, k, v, m):
    """12 rows a page; the pages of each sequence out of order."""
    k, v = (t.unflatten(1, (3, 12)).flatten(0, 1) for t in (k, v))
    table, used = bounds(4, 2, 5, 1, 3, of=q).view(2, 3), bounds(13, of=q) + 17
    cu = bounds(T, 2 * T, of=q)
    return varlen_attn(
        q.flatten(0, 1), k, v, cu, None, T, 36, window_size=(-1, 0), enable_gqa=True, seqused_k=used, block_table=table
    )


def cache(q, k, v, m):
    """q's rows over 20 and 9 rows held, and 4 new ones."""
    k_cache, v_cache = (t.detach().flip(0).clone() for t in (k, v))
    held = bounds(11, of=q).flip(0) + 9
    return flash_attn_with_kvcache(
        q[:, :4], k_cache, v_cache, k[:, -4:], v[:, -4:], cache_seqlens=held, causal=True, window_size=(15, 0)
    )


def module(q, k, v, m):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(H * D, H, kdim=K * D, vdim=K * D, batch_first=True, add_zero_attn=True)
    padding = torch.arange(S, device=q.device) > torch.tensor([[30], [9]], device=q.device)
    layer, (q, k, v) = layer.to(q.device, q.dtype), (t.flatten(2) for t in (q, k, v))
    return layer(q, k, v, key_padding_mask=padding, need_weights=False)[0]


CALLS = {
    "mask with a gradient": lambda q, k, v, m: sdpa(q, k, v, attn_mask=m.expand(B, H, T, S)),
    "mask of expanded heads": hidden,
    "more keys": lambda q, k, v, m: sdpa(q, k, v, is_causal=True),
    "more rows": lambda q, k, v, m: sdpa(q, k[:, :9], v[:, :9], is_causal=True),
    "window and softcap": lambda q, k, v, m: flash_attn_func(q, k, v, window_size=(9, 4), softcap=2.0),
    "alibi": lambda q, k, v, m: flash_attn_func(q, k, v, causal=True, alibi_slopes=m[0, 0, 0, :H].abs()),
    "alibi both ways": lambda q, k, v, m: flash_attn_func(q, k, v, alibi_slopes=m[:, 0, 0, :H].abs()),
    "packed qkv": packed,
    "documents": documents,
    "pages": pages,
    "cache": cache,
    "module": module,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS)
def test_twins_on_each_device(device, call):
    torch.manual_seed(0)
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, D), (B, 1, T, S)
    tensors = [torch.randn(s, dtype=torch.float64) for s in shapes]
    results = []
    for where, dtype in (("cpu", torch.float64), (device.torch_device, torch.float32)):
        leaves = [t.to(where, dtype).requires_grad_() for t in tensors]
        with device.use():
            out = CALLS[call](*leaves)
            upstream = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=dtype).view(out.shape[::-1])
            grads = torch.autograd.grad(out, leaves, upstream.permute(*range(out.dim())[::-1]), allow_unused=True)
        results.append([out, *grads])
    for n, (want, got) in enumerate(zip(*results)):
        assert (want is None) == (got is None)
        if want is not None:
            error = (got.cpu().double() - want).square().sum() / want.square().sum()
            assert error < 1e-9, f"{n}: {error}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T,new", [(1, 0), (1, 1), (3, 0), (3, 1), (2, 5)])
@pytest.mark.parametrize("paged", [False, True])
def test_cached_rows_on_each_device(device, T, new, paged):
    """As many new keys as queries, fewer, more and none; more queries than there are keys; an empty slot."""
    torch.manual_seed(0)
    held = torch.tensor([20, 1, 0], dtype=torch.int32)
    tensors = [torch.randn(3, n, heads, 16, dtype=torch.float64) for n, heads in ((T, 4), (new, 2), (new, 2))]
    caches = [torch.randn(*((24, 4) if paged else (3, 32)), 2, 16, dtype=torch.float64) for _ in range(2)]
    table = torch.randperm(24).view(3, 8).int() if paged else None
    results = []
    for where, dtype in (("cpu", torch.float64), (device.torch_device, torch.float32)):
        q, k, v = leaves = [t.to(where, dtype).requires_grad_() for t in tensors]
        stored = [t.to(where, dtype, copy=True) for t in caches]
        with device.use():
            out, lse = flash_attn_with_kvcache(
                q, *stored, *((k, v) if new else (None, None)), cache_seqlens=held.to(where),
                block_table=None if table is None else table.to(where), causal=True, return_softmax_lse=True,
            )  # fmt: skip
            finite = lse.masked_fill(lse.detach() == -torch.inf, 0.0)
            grads = torch.autograd.grad(out.square().sum() + finite.sum(), leaves if new else [q])
        results.append([out, finite, *grads, *stored])
    for n, (want, got) in enumerate(zip(*results)):
        error = (got.cpu().double() - want).square().sum() / want.square().sum()
        assert error < 1e-9, f"{n}: {error}"
