"""What the launches of one call of the portable kernels share."""

import math

import torch
from torch import Tensor

from ..._launch import cdiv
from .. import philox
from ..route import route_of
from ..spec import softmax_scale

LOG2E = math.log2(math.e)
L2_SHARE = 16 << 20  # bytes of keys and values that programs running at the same time may read
SIZES = ("B", "T", "S", "H", "n_tiles", "group", "n_docs", "steps", "left", "right", "threshold")  # not specialised on


class Call:
    """Sizes, strides, options and route of one call, as the kernels' arguments.

    B, T, S, H, K, D, DV as in op.py (packed: B = 1), G = H // K, docs documents or sequences.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
        bias: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None, right: int | None,
        softcap: float, dropout_p: float, d_out: Tensor | None = None,
    ):  # fmt: skip
        self.B = 1 if cu_q is not None else q.shape[0]
        self.T, self.H, self.D = q.shape[-3:]
        self.S, self.K, self.DV = v.shape[-3:]
        self.G = self.H // self.K
        self.docs = self.B if cu_q is None else len(cu_q) - 1
        self.scale = softmax_scale(q, scale)
        options = {"bias": bias is not None, "dropout": seed is not None}
        self.way = route_of(q, k, v, portable=True, options=frozenset(n for n, there in options.items() if there))
        cu_q = None if cu_q is None else cu_q.contiguous()
        operands = {"q": q, "k": k, "v": v} if d_out is None else {"q": q, "k": k, "v": v, "g": d_out}
        strides = {n: t.stride() if t.dim() == 4 else (0, *t.stride()) for n, t in operands.items()}
        unit = 8 if all(s % 8 == 0 for four in strides.values() for s in four[:3]) else 1
        rows, cols = (max(four[side] for four in strides.values()) for side in (1, 3))
        farthest = rows * 512 + cols * max(self.way.D, self.way.Dv)
        pair = max(self.S * (self.D + self.DV) * q.element_size(), 1)
        self.group = max(1, min(L2_SHARE // pair, self.B * self.K))  # key heads whose programs run side by side
        self.arguments: dict = {
            "cu_q_ptr": cu_q,
            "cu_k_ptr": cu_q if cu_k is None else cu_k.contiguous(),
            "k_lens_ptr": k_lens,
            "bias_ptr": bias.view(torch.uint8) if bias is not None and bias.dtype == torch.bool else bias,
            "seed_ptr": seed,
            "B": self.B,
            "T": self.T,
            "S": self.S,
            "H": self.H,
            "n_docs": self.docs,
            "steps": (self.docs + 1).bit_length(),
            "left": left,
            "right": right,
            "scale": LOG2E * self.scale * (2 / softcap if softcap else 1.0),  # of exp2, or of tanh
            "cap": softcap * LOG2E if softcap else None,
            "threshold": None if seed is None else philox.threshold(dropout_p),
            "inv_keep": None if seed is None else 1 / (1 - dropout_p),
            **{
                f"stride_{n}{side}": s if side == "d" else s // unit
                for n, four in strides.items()
                for side, s in zip(("b", "s" if n in "kv" else "t", "h", "d"), four)
            },
            **dict(zip(("stride_bb", "stride_bh", "stride_bt", "stride_bs"), _bias_strides(bias))),
            "D": self.D,
            "DV": self.DV,
            "PAD": self.way.D,
            "PAD_V": self.way.Dv,
            "UNIT": unit,
            "WIDE": farthest >= 1 << 31,
        }

    def cut(self, kernel: str, length: int) -> tuple[int, dict[str, int]]:
        """(tiles along `length`, launch arguments) of a kernel that owns tiles of query rows, or for dkdv of keys."""
        M, N, warps, stages = getattr(self.way.tiles, kernel)
        tiles = cdiv(length, N if kernel == "dkdv" else M)
        return tiles, {"n_tiles": tiles, "M": M, "N": N, "num_warps": warps, "num_stages": stages}


def _bias_strides(bias: Tensor | None) -> tuple[int | None, ...]:
    """Of batch, head, row and key; 0 along what is broadcast."""
    if bias is None:
        return (None,) * 4
    return tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride()))
