"""What the Hopper kernels take. Torch-only: routes and tests read it where there is no Triton."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

WIDTHS = (64, 128, 256)  # head dims that the kernels compute with
LONGEST = 1 << 30  # rows of a tensor
SHORT = 64  # packed documents that are shorter on average: a tile of 128 rows would be mostly empty


def width(D: int) -> int:
    """The head dim that the kernels compute with: what is missing up to it is filled with zeros by the hardware."""
    return next(w for w in WIDTHS if w >= D)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def why_not(t: Tensor) -> str:
    """Why no TMA descriptor can be made of t [.., T, H, D]; "" when one can."""
    D = t.shape[-1]
    if t.dtype not in (torch.float16, torch.bfloat16):
        return f"{t.dtype} is neither float16 nor bfloat16"
    if D % 8 or not 0 < D <= WIDTHS[-1]:
        return f"head dim {D} is no multiple of 8 up to {WIDTHS[-1]}"
    if t.stride(-1) != 1:
        return "the head dim is not contiguous"
    if t.data_ptr() % 16:
        return "the first element is not aligned to 16 bytes"
    for size, stride in zip(t.shape[:-1], t.stride()[:-1]):
        if size > 1 and (stride % 8 or not 0 <= stride < 1 << 34):
            return f"a stride of {stride} elements is no multiple of 16 bytes"
        if size >= LONGEST:
            return f"a dimension of {size} is too long"
    return ""


def forward_why_not(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, k_lens: Tensor | None, bias: Tensor | None,
    scale: float | None, dropout_p: float,
) -> str:  # fmt: skip
    """Why the forward kernel does not serve a call; "" when it does."""
    if not q.is_cuda or _capability(q.device)[0] != 9:
        return "not a Hopper GPU"
    if bias is not None or dropout_p:
        return "a bias" if bias is not None else "dropout"
    if q.shape[-1] != v.shape[-1]:
        return f"head dims {q.shape[-1]} and {v.shape[-1]} differ"
    if scale is not None and not scale > 0:
        return f"a scale of {scale}"  # the largest score is found before it is scaled
    if cu_q is not None and q.shape[0] < SHORT * (cu_q.shape[0] - 1):
        return f"documents are shorter than {SHORT} rows on average"
    for t in (q, k, v):
        if reason := why_not(t):
            return reason
    if k_lens is not None:
        for t in (k, v):
            batch, row = t.stride()[:2]
            if t.shape[0] > 1 and (row == 0 or batch % row or batch // row * t.shape[0] >= LONGEST):
                return "batches that do not lie whole rows apart"  # each ends where its own keys do
    return ""
