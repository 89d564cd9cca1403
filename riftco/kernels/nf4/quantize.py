"""Quantising to NF4 with the numbers of bitsandbytes 0.50."""

import torch
from torch import Tensor

from .._arguments import flags, floating, given, whole
from .spec import TABLE
from .weight import BLOCK_SIZES, NestedAbsmax, NF4Weight

CHUNK = 1 << 22  # elements taken to float32 at once; a multiple of every block size
TINY = 1e-38  # keeps the reciprocal of an all-zero block's absmax finite
NESTED_BLOCK = 256
GRID = 65535  # bitsandbytes' CPU library rounds to 2^16 points of [-1, 1] before it looks up the nearest entry


def quantize_nf4(w: Tensor, *, block_size: int = 64, double_quant: bool = True) -> NF4Weight:
    """Quantise a weight to 4-bit NormalFloat, bit for bit as bitsandbytes.functional.quantize_4bit(quant_type="nf4").

    Each block of `block_size` consecutive elements of the flattened weight is divided by its largest magnitude
    (absmax) and each quotient replaced by the nearest of 16 values. With `double_quant` the absmax, less their mean,
    are themselves stored as 8-bit codes of the signed dynamic map, in blocks of 256 with a float32 scale.

    Args:
        w: float32, float16 or bfloat16, any shape, finite. Not differentiable.
        block_size: 32, 64, 128, ..., 4096. The last block may be short.
        double_quant: bitsandbytes' compress_statistics.

    Returns:
        An NF4Weight on w's device.

    Raises:
        ValueError: a dtype or block size that the format does not have.

    Devices: any (plain torch). One host synchronisation for the mean absmax.
    Numerics: codes and absmax equal bitsandbytes' on the CPU. Off the CPU two corners follow its CUDA kernels instead:
        a short last block is multiplied by the reciprocal of its absmax (CPU: divided), and the second level takes the
        exactly nearest entry (CPU: the nearest of the closest of 2^16 grid points, different for about one absmax in
        six hundred). All-zero blocks get the code of 0 everywhere.
    Source: Dettmers et al. 2023, "QLoRA", section 3; Dettmers et al. 2022, "8-bit Optimizers", section 2.
    """
    if not floating(w) or w.dtype == torch.float64:
        raise ValueError(f"quantize_nf4: w must be float32, float16 or bfloat16; got {given(w)}")
    flags("quantize_nf4", double_quant=double_quant)
    whole("quantize_nf4", "block_size", block_size, f"one of {BLOCK_SIZES}")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"quantize_nf4: block_size must be one of {BLOCK_SIZES}; got {block_size}")
    flat = w.detach().reshape(-1)
    numel = flat.numel()
    bounds = ((TABLE[:-1] + TABLE[1:]) / 2).to(w.device)
    codes = torch.empty((numel + 1) // 2, dtype=torch.uint8, device=w.device)
    absmax = torch.empty(-(-numel // block_size), dtype=torch.float32, device=w.device)
    for lo in range(0, numel, CHUNK):
        ratio, peak = _normalise(flat[lo : lo + CHUNK].float(), block_size)
        if ratio.numel() % 2:
            ratio = torch.nn.functional.pad(ratio, (0, 1))
        code = torch.bucketize(ratio, bounds, out_int32=True).to(torch.uint8)
        codes[lo // 2 : (lo + CHUNK) // 2] = (code[::2] << 4) | code[1::2]
        absmax[lo // block_size : (lo + CHUNK) // block_size] = peak
    nested = None
    if double_quant:
        absmax, nested = _quantize_absmax(absmax)
    return NF4Weight(codes.unsqueeze(1), absmax, tuple(w.shape), block_size, w.dtype, nested)


def _normalise(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """float32 [n] -> (x / absmax of its block, in [-1, 1]; absmax of each block)."""
    full = x.numel() - x.numel() % block_size
    blocks = x[:full].view(-1, block_size)
    peak = blocks.abs().amax(1) if full else x.new_empty(0)
    ratio = (blocks * (1.0 / peak.clamp(min=TINY)).unsqueeze(1)).clamp_(-1, 1).view(-1)
    if full == x.numel():
        return ratio, peak
    last = x[full:]
    if x.device.type == "cpu":
        end = last.abs().max().clamp(min=TINY)
        rest = last / end
    else:
        end = last.abs().max()
        rest = last * (1.0 / end.clamp(min=TINY))
    return torch.cat((ratio, rest.clamp_(-1, 1))), torch.cat((peak, end.view(1)))


def _quantize_absmax(absmax: Tensor) -> tuple[Tensor, NestedAbsmax]:
    """float32 [blocks] -> uint8 codes and their second level."""
    offset = absmax.mean() if absmax.numel() else absmax.new_zeros(())
    quant_map = dynamic_map().to(absmax.device)
    bounds = (quant_map[:-1] + quant_map[1:]) / 2
    n = absmax.numel()
    blocks = torch.nn.functional.pad(absmax - offset, (0, -n % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    peak = blocks.abs().amax(1) if n else absmax.new_empty(0)
    ratio = (blocks * (1.0 / peak).unsqueeze(1)).clamp_(-1, 1)
    if absmax.device.type == "cpu":
        ratio = ((ratio + 1) * 0.5 * GRID + 0.5).int().float() / GRID * 2 - 1
    code = torch.bucketize(ratio, bounds, out_int32=True)
    code = torch.where(peak.unsqueeze(1) > 0, code, 0).to(torch.uint8)
    return code.view(-1)[:n].contiguous(), NestedAbsmax(peak, quant_map, float(offset), NESTED_BLOCK)


def dynamic_map() -> Tensor:
    """The signed dynamic 8-bit map: 256 ascending values; decade 10^(i - 6) holds 2^i magnitudes, i = 0..6."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1, dtype=torch.float32)
        magnitudes = 10.0 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += magnitudes.tolist() + (-magnitudes).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)
