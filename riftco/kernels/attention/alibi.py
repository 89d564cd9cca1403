"""ALiBi as a bias of scores. Torch-only. B batch, T query length, S key length, H query heads."""

import torch
from torch import Tensor

from .._arguments import floating, given


def key_bias(slopes: Tensor, q_shape: torch.Size, S: int, k_lens: Tensor | None, causal: bool) -> Tensor:
    """-slope |place of the row - j|, places aligned at the end of the keys: float32 [.., H, T, S].

    Under causal no key lies beyond the row, so the bias of a row is slope * j and a constant, which no softmax sees:
    [.., H, 1, S], measured from the last key, and row_shift is what is then missing in lse. Scores grow to slope * S,
    which float32 holds to slope * S * 2^-24: NMSE 2e-11 at S = 512 and 1e-9 at 4096 for the steepest slopes in use.
    """
    B, T, H, _ = q_shape
    if not floating(slopes) or slopes.shape not in ((H,), (B, H)):
        raise ValueError(f"alibi_slopes must be floating [{H}] or [{B}, {H}]; got {given(slopes)}")
    slopes = _acc(slopes).view(-1, H, 1, 1)
    j = torch.arange(S, device=slopes.device)
    end = S if k_lens is None else k_lens.view(-1, 1, 1, 1)
    if causal:
        return slopes * (j - (end - 1))
    i = torch.arange(T, device=slopes.device).view(-1, 1)
    return -slopes * (i + end - T - j).abs()


def row_shift(slopes: Tensor, T: int) -> Tensor:
    """[.., H, T]: what key_bias leaves out of a row's scores under causal."""
    return _acc(slopes).unsqueeze(-1) * (T - 1 - torch.arange(T, device=slopes.device))


def _acc(slopes: Tensor) -> Tensor:
    return slopes.to(torch.promote_types(slopes.dtype, torch.float32))
