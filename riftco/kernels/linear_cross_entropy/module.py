"""The fused-loss modules of PyTorch, Liger and cut-cross-entropy; and the loss of a head that is a module."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._frozen_weight import FrozenWeight
from ..embedding.module import TokensHead
from ..gguf_linear.module import GGUFLinear
from ..lora_linear.module import LoRALinear, TiedLoRALinear
from ..nf4.module import NF4Linear
from .op import linear_cross_entropy
from .twins import (
    CrossEntropyOutput,
    cce_linear_cross_entropy,
    liger_fused_linear_cross_entropy,
    torch_linear_cross_entropy,
)


class LinearCrossEntropyLoss(nn.Module):
    """torch.nn.LinearCrossEntropyLoss: Linear(in_features, num_classes) and the cross-entropy of its output.

    input [..., in_features], target [...] class indices; parameters `linear.weight` and `linear.bias`, as in PyTorch.
    Differs in one documented way: "mean" over nothing labelled is 0, not NaN.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
    ):
        super().__init__()
        if out_features:
            raise ValueError(f"LinearCrossEntropyLoss: out_features must be (); got {out_features}")
        if weight is not None and weight.shape != (num_classes,):
            raise ValueError(f"LinearCrossEntropyLoss: weight must be ({num_classes},); got {tuple(weight.shape)}")
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.options = options

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return torch_linear_cross_entropy(
            input, self.linear.weight, target, linear_bias=self.linear.bias, weight=self.weight,
            reduction=self.reduction, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
            options=self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}"


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Liger's module: forward(lin_weight, _input, target, bias=None), the weight first."""

    ce_weight: Tensor | None

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__()
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.options: dict[str, Any] = dict(
            ignore_index=ignore_index, lse_square_scale=lse_square_scale, label_smoothing=label_smoothing,
            reduction=reduction, softcap=softcap, return_z_loss=return_z_loss, accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling, return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )  # fmt: skip

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, self.ce_weight, **self.options)


class LinearCrossEntropy(nn.Module):
    """cut-cross-entropy's module: forward(e, c, targets, bias=None); options as in cce_linear_cross_entropy."""

    def __init__(self, **options: Any):
        super().__init__()
        self.options = options

    def forward(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return cce_linear_cross_entropy(e, c, targets, bias, **self.options)


class Head(NamedTuple):
    weight: Tensor | FrozenWeight
    bias: Tensor | None
    lora: tuple[Tensor, Tensor, float] | None


def describe_head(head: nn.Module) -> Head:
    """What linear_cross_entropy needs of `head`: a Linear, an NF4Linear, a GGUFLinear, one of them under a LoRALinear,
    or a tied head under a TiedLoRALinear or a TokensHead.

    Raises:
        ValueError: anything else, hooks on the head, DoRA, dropout in training: slices of such a head would not be it.
    """
    kind = type(head)
    if kind not in (nn.Linear, NF4Linear, GGUFLinear, LoRALinear, TiedLoRALinear, TokensHead):
        raise ValueError(
            f"the head must be a torch.nn.Linear, riftco.nn.NF4Linear, riftco.nn.GGUFLinear or riftco.nn.LoRALinear, "
            f"so that its rows can be taken in slices; got {kind.__name__}"
        )
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        raise ValueError(f"the head {kind.__name__} has hooks, which a sliced loss would not call; remove them")
    if isinstance(head, (nn.Linear, NF4Linear, GGUFLinear)):
        return Head(head.weight, head.bias, None)
    if isinstance(head, (LoRALinear, TiedLoRALinear)) and head.dropout and head.training:
        raise ValueError("the head's adapter has dropout, which a sliced loss does not apply; set it to 0 for the head")
    assert isinstance(head, (LoRALinear, TiedLoRALinear, TokensHead))
    base = describe_head(head.base_layer)
    if not isinstance(head, LoRALinear):
        return base._replace(lora=head.adapter())
    if head.use_dora:
        raise ValueError("the head's adapter is a DoRA, which a sliced loss does not apply; adapt the head with LoRA")
    a, b = (describe_head(part).weight for part in (head.lora_A, head.lora_B))
    assert isinstance(a, Tensor) and isinstance(b, Tensor)
    return base._replace(lora=(a, b, head.scale))


def sliced_head_loss(x: Tensor, head: nn.Module, target: Tensor, **options):
    """linear_cross_entropy through a module: `head` as `describe_head` accepts it, options as linear_cross_entropy's.

    Raises:
        ValueError: a head that is not a row-wise linear function; what linear_cross_entropy refuses.
    """
    weight, bias, lora = describe_head(head)
    return linear_cross_entropy(x, weight, target, bias, lora=lora, **options)
