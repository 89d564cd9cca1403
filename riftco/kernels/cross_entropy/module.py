"""torch.nn.CrossEntropyLoss's twin for class indices."""

from torch import Tensor, nn

from .op import cross_entropy


class CrossEntropyLoss(nn.Module):
    """Cross-entropy of class indices: input [N, C, d1, ...] or [C], target [N, d1, ...], as in PyTorch.

    Differs in one documented way: "mean" over nothing labelled is 0, not NaN.
    """

    def __init__(self, *, ignore_index: int = -100, reduction: str = "mean"):
        super().__init__()
        self.ignore_index = ignore_index
        self.reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        logits = input.movedim(1, -1) if input.dim() > 2 else input
        loss = cross_entropy(logits, target, ignore_index=self.ignore_index, reduction=self.reduction)
        assert isinstance(loss, Tensor)
        return loss

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}"
