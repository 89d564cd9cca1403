"""torch.nn.LinearCrossEntropyLoss's twin for class indices."""

import torch
from torch import Tensor, nn

from .op import linear_cross_entropy


class LinearCrossEntropyLoss(nn.Module):
    """Linear(in_features, num_classes) and the cross-entropy of its output, without the logits in memory at once.

    input [..., in_features], target [...] class indices; parameters `linear.weight` and `linear.bias`, as in PyTorch.
    Differs in one documented way: "mean" over nothing labelled is 0, not NaN.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        slice_bytes: int = 256 << 20,
    ):
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.reduction = reduction
        self.ignore_index = -100 if ignore_index is None else ignore_index
        self.slice_bytes = slice_bytes

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        loss = linear_cross_entropy(
            input, self.linear.weight, target, self.linear.bias,
            ignore_index=self.ignore_index, reduction=self.reduction, slice_bytes=self.slice_bytes,
        )  # fmt: skip
        assert isinstance(loss, Tensor)
        return loss

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, slice_bytes={self.slice_bytes}"
