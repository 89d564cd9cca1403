"""torch.nn.RMSNorm's twin."""

import torch
from torch import Tensor, nn

from .op import rms_norm


class RMSNorm(nn.Module):
    """RMS normalisation over the last dimensions, with torch.nn.RMSNorm's arguments and state_dict.

    Args:
        normalized_shape: the last dimensions of x.
        eps: added to the mean of squares; None: the eps of float32, for a float64 x of float64.
        elementwise_affine: whether there is a `weight` [normalized_shape].
        device, dtype: of the weight.
        offset: added to the weight, which starts at 1 - offset: Gemma's (1 + weight) is offset=1.0.
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size | tuple[int, ...],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device=None,
        dtype=None,
        *,
        offset: float = 0.0,
    ):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.offset = offset
        self.weight: nn.Parameter | None
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., *normalized_shape] -> y; with a residual of its shape (norm of x + residual, x + residual), made in
        one pass. y in x's dtype, the sum in the dtype that x and the residual promote to."""
        n = len(self.normalized_shape)
        if x.shape[x.dim() - n :] != self.normalized_shape:
            raise ValueError(f"RMSNorm: x must end in {self.normalized_shape}; got {tuple(x.shape)}")
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        if n == 1:
            return rms_norm(x, self.weight, eps, residual=residual, offset=self.offset)
        weight = None if self.weight is None else self.weight.flatten()
        if residual is None:
            return rms_norm(x.flatten(-n), weight, eps, offset=self.offset).view(x.shape)
        y, total = rms_norm(x.flatten(-n), weight, eps, residual=residual.flatten(-n), offset=self.offset)
        return y.view(x.shape), total.view(x.shape)

    def extra_repr(self) -> str:
        extra = f", offset={self.offset}" if self.offset else ""
        return f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}{extra}"
