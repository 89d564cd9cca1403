"""The modules: torch.nn.CrossEntropyLoss's twin and LigerCrossEntropyLoss's."""

from typing import NamedTuple

from torch import Tensor, nn

from .checks import class_weight_for
from .op import cross_entropy, reduce
from .twins import torch_cross_entropy


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss of class indices, with its arguments; `torch_cross_entropy` says what differs."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return torch_cross_entropy(
            input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, label_smoothing={self.label_smoothing}"


class CrossEntropyOutput(NamedTuple):
    """What LigerCrossEntropyLoss returns when it is asked for more than the loss."""

    loss: Tensor
    z_loss: Tensor | None
    token_accuracy: Tensor | None
    predicted_tokens: Tensor | None


class LigerCrossEntropyLoss(nn.Module):
    """liger_kernel.transformers.LigerCrossEntropyLoss's arguments and results: input [N, V], target [N].

    Differs in documented ways: the logits are left as they were unless `inplace`; the z_loss that is returned is the
    reduced lse_square_scale * lse^2, and with class weights it is divided by their sum as the loss is.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        inplace: bool = False,
    ):
        super().__init__()
        self.weight = weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.inplace = inplace

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        more = self.return_z_loss or self.return_token_accuracy or self.return_predicted_tokens
        out = cross_entropy(
            _input, target, self.weight, ignore_index=self.ignore_index, z_loss=self.lse_square_scale,
            label_smoothing=self.label_smoothing, reduction=self.reduction, softcap=self.softcap,
            inplace=self.inplace, return_metrics=more,
        )  # fmt: skip
        if not more:
            return out
        loss, metrics = out
        return CrossEntropyOutput(
            loss,
            self._z_loss(metrics, target) if self.return_z_loss else None,
            metrics.accuracy if self.return_token_accuracy else None,
            metrics.argmax if self.return_predicted_tokens else None,
        )

    def _z_loss(self, metrics, target: Tensor) -> Tensor:
        rows = self.lse_square_scale * metrics.lse.square()
        weight = None if self.weight is None else class_weight_for(self.weight, rows)
        return reduce(rows, target, self.ignore_index, self.reduction, None, weight)
