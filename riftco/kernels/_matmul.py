"""x W^T: float32 products on the CPU go through oneDNN, where PyTorch was built with it.

`torch.mm` hands them to MKL, which takes 1.1 to 1.8 times as long on AMD processors, whatever the strides of the weight
(256 rows of 576 to 1536: 3.0 against 2.5 ms, 128 of 576 to 49152: 71 against 39 ms, on two cores of Zen 4).
"""

from collections.abc import Callable

import torch
from torch import Tensor

WORTH_FROM = 128  # both sizes of the weight; oneDNN's sums are long chains where a result has few columns
_onednn: Callable[..., Tensor] | None = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
)


def through_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `matmul` computes products of x by oneDNN, which gives them memory of their own.

    Of meta tensors: whether it would on a CPU.
    """
    plain = x.dtype == torch.float32 and x.device.type in ("cpu", "meta") and min(weight.shape) >= WORTH_FROM
    if not plain or _onednn is None or not torch.backends.mkldnn.enabled:
        return False
    (down, right), (N, K) = weight.stride(), weight.shape
    return down >= right * K or right >= down * N  # oneDNN cannot describe rows that overlap


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N], on any device; the weight may have any strides."""
    if _onednn is not None and x.shape[0] > 1 and not x.is_meta and through_onednn(x, weight):
        made = _onednn(x, weight, None if bias is None else bias.contiguous(), "none", [], "")
        return made if out is None else out.copy_(made)
    if bias is None:
        return torch.mm(x, weight.t()) if out is None else torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t()) if out is None else torch.addmm(bias, x, weight.t(), out=out)
