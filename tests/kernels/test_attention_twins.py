"""Other libraries' signatures on attention, and its modules, beside the libraries' own results."""

import pytest
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import scaled_dot_product_attention


def qkv(B=2, T=9, S=9, H=4, K=2, D=8):
    return tuple(torch.randn(s) for s in ((B, T, H, D), (B, S, K, D), (B, S, K, D)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("T,S", [(7, 7), (4, 9), (9, 4)])
def test_scaled_dot_product_attention_is_pytorchs(causal, T, S):
    q, k, v = (t.transpose(1, 2) for t in qkv(2, T, S, 4, 2, 8))
    leaves = [[t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2)]
    outs = [
        f(*x, is_causal=causal, scale=0.3, enable_gqa=True)
        for f, x in zip((scaled_dot_product_attention, F.scaled_dot_product_attention), leaves)
    ]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.backward(torch.ones_like(out))
    for a, b in zip(*leaves):
        torch.testing.assert_close(a.grad, b.grad)
    for t in (q[:, 0, 0], q[0, :1], q[None, :, :2]):  # [T, D], [H, T, D], [1, B, H, T, D]
        torch.testing.assert_close(scaled_dot_product_attention(t, t, t), F.scaled_dot_product_attention(t, t, t))


def test_scaled_dot_product_attention_refuses():
    q = torch.randn(1, 4, 5, 8)
    for error, text, bad in [
        (NotImplementedError, "attn_mask", {"attn_mask": torch.ones(5, 5)}),
        (NotImplementedError, "dropout_p", {"dropout_p": 0.1}),
        (ValueError, "leading", {"key": q.expand(2, -1, -1, -1)}),
        (ValueError, "enable_gqa", {"key": q[:, :2], "value": q[:, :2]}),
    ]:
        with pytest.raises(error, match=text):
            scaled_dot_product_attention(**{"query": q, "key": q, "value": q, **bad})


def test_module():
    torch.manual_seed(1)
    layer = nn.Attention(24, 6, 2, bias=True)
    x = torch.randn(2, 7, 24)
    q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x), layer.o_proj(want))
    flat = layer(x.flatten(0, 1), torch.tensor([0, 7, 14]))
    torch.testing.assert_close(flat.view_as(x), layer(x))
    assert nn.Attention(24, 6, causal=False)(x).isfinite().all()
    for bad in ((25, 6), (24, 6, 4)):
        with pytest.raises(ValueError, match="multiple"):
            nn.Attention(*bad)
