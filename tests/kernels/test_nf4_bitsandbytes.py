"""NF4 against bitsandbytes: codes, absmax, dequantised values, state_dicts."""

import pytest
import support
import torch

from riftco import nn
from riftco.functional import dequantize_nf4, quantize_nf4
from riftco.kernels.nf4 import spec
from riftco.kernels.nf4.quantize import CHUNK, dynamic_map

bnb = pytest.importorskip("bitsandbytes")
create_dynamic_map = bnb.functional.create_dynamic_map
dequantize_4bit, quantize_4bit = bnb.functional.dequantize_4bit, bnb.functional.quantize_4bit


def weights():
    g = torch.Generator().manual_seed(3)
    r = torch.randn(96, 160, generator=g)
    with_zeros = r.clone()
    with_zeros[10:20] = 0
    return {
        "random": r,
        "tiny and huge": r * torch.logspace(-37, 37, 96).unsqueeze(1),
        "below the smallest normal": r * 1e-41,
        "constant": torch.full((8, 64), 0.37),
        "negative constant": torch.full((8, 64), -3.0),
        "zero": torch.zeros(7, 64),
        "zero with a tail": torch.zeros(3, 33),
        "some zero blocks": with_zeros,
        "tail": torch.randn(5, 37, generator=g),
        "odd": torch.randn(1, 1, generator=g),
        "extreme": torch.tensor([[1e38, -1e38, 1.2e-38, 0.0] * 16]),
        "midpoints": torch.cat((torch.ones(1), (bnb_table()[1:] + bnb_table()[:-1]) / 2)).repeat(4).view(4, 16),
        "three dimensions": torch.randn(3, 6, 10, generator=g),
        "more than one second-level block": torch.randn(300, 128, generator=g),
        "transposed": torch.randn(64, 50, generator=g).t(),
    }


def bnb_table():
    return bnb.functional.get_4bit_type("nf4", device="cpu")


@pytest.mark.parametrize("name", list(weights()))
@pytest.mark.parametrize("block_size", [32, 64, 256, 4096])
@pytest.mark.parametrize("double_quant", [False, True])
def test_bits_are_bitsandbytes(name, block_size, double_quant):
    """bitsandbytes 0.50's AVX-512 dequantiser takes one absmax for 64 elements of a row, wrong where a block ends in
    between (K % block_size != 0, blocks of 64 or more); shown the weight as one row, it follows its own format."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        w = weights()[name].to(dtype)
        if not bool(w.isfinite().all()):
            w = w.clamp(-6e4, 6e4)
        codes, state = quantize_4bit(w, blocksize=block_size, quant_type="nf4", compress_statistics=double_quant)
        q = quantize_nf4(w, block_size=block_size, double_quant=double_quant)
        assert torch.equal(q.codes, codes) and torch.equal(q.absmax, state.absmax)
        if double_quant:
            assert torch.equal(q.nested.absmax, state.state2.absmax)
            assert torch.equal(q.nested.quant_map, state.state2.code)
            assert q.nested.offset == state.offset.item()
        for out in (torch.float32, torch.float16, torch.bfloat16):
            state.dtype, state.shape = out, w.shape if w.shape[-1] % block_size == 0 else (w.numel(),)
            want = dequantize_4bit(codes, state).reshape(w.shape)
            for device in support.DEVICES[:2]:
                # numpy, which runs the interpreter, warns where float16 overflows
                if device.available and (device.name == "cpu" or (block_size == 64 and bool(want.isfinite().all()))):
                    with device.use(), support.poisoned():
                        got = dequantize_nf4(q, out)
                    assert same(got, want, out, device), (dtype, out, device.name)


def same(got, want, dtype, device):
    """Equal; the interpreter truncates to bfloat16, so there one ulp below is the same."""
    if dtype == torch.bfloat16 and device.name == "cpu-triton":
        return torch.equal(got.abs(), want.abs()) or bool(((got - want).abs() <= want.abs() * 2**-7).all())
    return torch.equal(got, want)


def test_tables():
    assert torch.equal(spec.TABLE, bnb_table())
    assert torch.equal(dynamic_map(), create_dynamic_map())


def test_a_second_chunk():
    """Weights longer than one chunk, with a chunk border and a tail."""
    w = torch.randn(CHUNK + 4096 + 33)
    codes, state = quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    q = quantize_nf4(w)
    assert torch.equal(q.codes, codes) and torch.equal(q.absmax, state.absmax)


def bnb_layer(K, N, bias, double_quant, dtype=torch.float32):
    layer = bnb.nn.Linear4bit(
        K, N, bias=bias, quant_type="nf4", compress_statistics=double_quant, compute_dtype=torch.float32
    )
    return layer.to(dtype).to("cpu").train()


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("K,N", [(64, 12), (38, 5)])
@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_both_ways(K, N, bias, double_quant):
    theirs = bnb_layer(K, N, bias, double_quant)
    ours = nn.NF4Linear(K, N, bias, double_quant=not double_quant)
    assert str(ours.load_state_dict(theirs.state_dict(), strict=True)) == "<All keys matched successfully>"
    a, b = theirs.state_dict(), ours.state_dict()
    assert list(sorted(a)) == list(sorted(b))
    assert all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype and a[k].shape == b[k].shape for k in a)
    x = torch.randn(3, K)
    torch.testing.assert_close(ours(x), theirs(x))
    stats = {k.removeprefix("weight."): v for k, v in b.items() if k.startswith("weight.")}
    back = bnb.nn.Params4bit.from_prequantized(b["weight"], stats, device="cpu")
    assert torch.equal(dequantize_4bit(back.data, back.quant_state), dequantize_nf4(ours.weight, torch.float32))


def test_another_table_is_refused():
    fp4 = bnb.nn.Linear4bit(8, 6, bias=False, quant_type="fp4").to("cpu")
    state = {k.replace("fp4", "nf4"): v for k, v in fp4.state_dict().items()}
    with pytest.raises(RuntimeError, match="quant_type must be 'nf4'; got 'fp4'"):
        nn.NF4Linear(8, 6).load_state_dict(state)


def test_from_bnb():
    theirs = bnb_layer(38, 5, True, True)
    ours = nn.NF4Linear.from_bnb(theirs)
    a, b = theirs.state_dict(), ours.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert ours.bias is theirs.bias


@pytest.mark.gpu
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("shape", [(96, 160), (5, 37), (300, 128)])
def test_bits_are_bitsandbytes_on_a_gpu(shape, double_quant):
    w = torch.randn(shape, device="cuda")
    codes, state = quantize_4bit(w, quant_type="nf4", compress_statistics=double_quant)
    q = quantize_nf4(w, double_quant=double_quant)
    assert torch.equal(q.codes, codes) and torch.equal(q.absmax, state.absmax)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        state.dtype = dtype
        assert torch.equal(dequantize_nf4(q, dtype), dequantize_4bit(codes, state))
