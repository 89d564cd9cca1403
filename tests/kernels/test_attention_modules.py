"""nn.Attention and nn.MultiheadAttention beside PyTorch's own results."""

import pytest
import torch
import torch.nn.functional as F

from riftco import nn


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
