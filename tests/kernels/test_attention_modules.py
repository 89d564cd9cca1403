"""nn.Attention beside its options written out."""

import pytest
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import attention, rms_norm, rope, rope_tables

C, H, K, D, T = 24, 6, 2, 4, 7


def layer(**options):
    torch.manual_seed(1)
    module = nn.Attention(C, H, K, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    return module


def projected(module, x):
    return [p(x).unflatten(-1, (-1, D)) for p in (module.q_proj, module.k_proj, module.v_proj)]


def test_module():
    module = layer(bias=True)
    x = torch.randn(2, T, C, dtype=torch.float64)
    q, k, v = (t.transpose(1, 2) for t in projected(module, x))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), module.o_proj(want))
    flat = module(x.flatten(0, 1), torch.tensor([0, T, 2 * T]), max_seqlen=T)
    torch.testing.assert_close(flat.view_as(x), module(x))
    assert not torch.allclose(layer(bias=True, causal=False)(x), module(x))


def test_every_option_is_attentions():
    rotary = nn.RotaryEmbedding(D, 32)
    module = layer(window=(3, None), softcap=2.0, sinks=True, qk_norm=True, norm_eps=1e-3, rotary=rotary, scale=0.7)
    x = torch.randn(2, T, C, dtype=torch.float64, requires_grad=True)
    q, k, v = projected(module, x)
    q, k = rms_norm(q, module.q_norm.weight, 1e-3), rms_norm(k, module.k_norm.weight, 1e-3)
    q, k = rope(q, k, rotary.cos, rotary.sin)
    out = attention(q, k, v, causal=True, window=(3, None), softcap=2.0, sinks=module.sinks, scale=0.7)
    want = module.o_proj(out.flatten(2))
    got = module(x)
    torch.testing.assert_close(got, want)
    leaves = [x, *module.parameters()]
    assert sorted(module.state_dict()) == sorted(
        ["sinks", "q_norm.weight", "k_norm.weight", *(f"{n}_proj.weight" for n in "qkvo")]
    )
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), leaves) for t in (got, want))):
        torch.testing.assert_close(a, b)
        assert a.abs().max() > 0


def test_materialized():
    module = layer(window=(3, None), sinks=True, attention="materialized")
    x = torch.randn(2, T, C, dtype=torch.float64)
    got = module(x)
    module.impl = "flash"
    torch.testing.assert_close(got, module(x))


@pytest.mark.parametrize("given", ["module", "rotation"])
def test_rotation_of_packed_documents(given):
    """Positions start again in each document; spare rows stay inside the tables."""
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    tables = rope_tables(D, 5)
    module = layer(rotary=nn.RotaryEmbedding(D, 5) if given == "module" else None)
    how = {"rotation": tables} if given == "rotation" else {}
    x = torch.randn(9, C, dtype=torch.float64)
    out = module(x, cu, **how)
    for a, b in ((0, 3), (3, 7)):
        torch.testing.assert_close(out[a:b], module(x[None, a:b], **how)[0])
    assert (out[7:] == 0).all()
    shifted = module(x[None, :3], positions=torch.arange(1, 4), **how)
    torch.testing.assert_close(shifted[0], out[:3], atol=1e-5, rtol=1e-5)  # angles between tokens are the same
    assert not torch.allclose(module(x[None, :3], positions=torch.tensor([0, 2, 4]), **how)[0], out[:3])


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": False, "window": (2, 1)}], ids=str)
def test_padding_at_the_right(options):
    """A padded batch is each sequence alone, windows and causal masks at the tokens themselves."""
    module = layer(**options)
    x, lens = torch.randn(3, T, C, dtype=torch.float64), torch.tensor([7, 4, 1])
    out = module(x, k_lens=lens)
    for b, n in enumerate(lens.tolist()):
        torch.testing.assert_close(out[b, :n], module(x[b : b + 1, :n])[0])


def test_dropout_acts_in_training_only():
    module = layer(dropout=0.5)
    x = torch.randn(2, T, C, dtype=torch.float64)
    torch.manual_seed(0)
    first = module(x)
    torch.manual_seed(0)
    assert torch.equal(first, module(x)) and not torch.equal(first, module(x))
    torch.testing.assert_close(module.eval()(x), layer()(x))


def test_compile_and_autocast():
    module = layer(sinks=True, qk_norm=True, rotary=nn.RotaryEmbedding(D, 32), window=(3, None))
    x = torch.randn(2, T, C, dtype=torch.float64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    cu = torch.tensor([0, 3, 7])
    torch.testing.assert_close(compiled(x[0], cu), module(x[0], cu))
    module, x = module.float(), x.float()
    want = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    assert (out.float() - want).square().sum() < 1e-3 * want.square().sum()


def test_refusals():
    for bad in ((25, 6), (24, 6, 4)):
        with pytest.raises(ValueError, match="multiple"):
            nn.Attention(*bad)
    with pytest.raises(ValueError, match="rotary turns heads of 8"):
        nn.Attention(24, 6, rotary=nn.RotaryEmbedding(8, 32))
    x = torch.randn(2, T, C, dtype=torch.float64)
    with pytest.raises(ValueError, match="k_lens must be"):
        layer()(x, k_lens=torch.tensor([3]))
    with pytest.raises(ValueError, match="k_lens must be"):
        layer()(x[0], torch.tensor([0, 7]), k_lens=torch.tensor([3]))
