"""torch.nn.LayerNorm's twin."""

import torch
from torch import Tensor, nn

from .op import layer_norm


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimensions, with torch.nn.LayerNorm's arguments and state_dict.

    Args:
        normalized_shape: the last dimensions of x.
        eps: added to the variance.
        elementwise_affine: whether there are a `weight` and a `bias` [normalized_shape].
        bias: whether there is a bias beside the weight.
        device, dtype: of both.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        for name, present in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            shape = self.normalized_shape
            value = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if present else None
            self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., *normalized_shape] -> y; with a residual of its shape (norm of x + residual, x + residual), made in
        one pass. y in x's dtype, the sum in the dtype that x and the residual promote to."""
        n = len(self.normalized_shape)
        if x.shape[x.dim() - n :] != self.normalized_shape:
            raise ValueError(f"LayerNorm: x must end in {self.normalized_shape}; got {tuple(x.shape)}")
        if n == 1:
            return layer_norm(x, self.weight, self.bias, self.eps, residual=residual)
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        if residual is None:
            return layer_norm(x.flatten(-n), weight, bias, self.eps).view(x.shape)
        y, total = layer_norm(x.flatten(-n), weight, bias, self.eps, residual=residual.flatten(-n))
        return y.view(x.shape), total.view(x.shape)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, bias={bias}"
