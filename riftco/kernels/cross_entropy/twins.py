"""torch.nn.functional.cross_entropy's twin: classes in dimension 1."""

from torch import Tensor
from torch.nn import _reduction

from .._arguments import floating, given
from .op import cross_entropy


def torch_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch.nn.functional.cross_entropy of class indices.

    Differs in documented ways: "mean" over nothing labelled is 0, not NaN; the loss is float32 for 16-bit inputs;
    every negative label means "no label".

    Args:
        input: [C], [N, C] or [N, C, d1, ...], float16/bfloat16/float32/float64. Differentiable.
        target: [], [N] or [N, d1, ...], int32 or int64.
        weight: [C], floating: of each class.
        size_average, reduce: PyTorch's older words for `reduction`.
        ignore_index, reduction, label_smoothing: as there.

    Returns:
        The loss: float32 (float64 for float64 input); a scalar, or target's shape for reduction "none".

    Raises:
        ValueError: class probabilities as the target (`topk_cross_entropy` takes soft labels by id); shapes, dtypes,
            devices or options that do not fit, each named.

    Devices, numerics and source: as `cross_entropy`.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    if not floating(input):
        raise ValueError(f"cross_entropy: input must be floating [C], [N, C] or [N, C, ...]; got {given(input)}")
    logits = input.movedim(1, -1) if input.dim() > 2 else input
    return cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
