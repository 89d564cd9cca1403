"""Rotary position embedding that holds its tables."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .op import rope
from .tables import rope_tables


class RotaryEmbedding(nn.Module):
    """Holds `rope_tables`' cos and sin (float32 whatever the module is cast to, and not in the state_dict) and turns
    q [B, T, H, D] and k [B, T, K, D] by them; positions int32 or int64 [B, T], by default 0, 1, ...

    Args:
        head_dim, max_position, theta, scaling: as `rope_tables`.
        interleaved: pairs (2 i, 2 i + 1) instead of (i, i + R / 2), as `rope`.
        device: of the tables.

    Raises:
        ValueError: what `rope_tables` and `rope` refuse.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_position: int,
        *,
        theta: float = 10000.0,
        scaling: Mapping[str, Any] | None = None,
        interleaved: bool = False,
        device=None,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.max_position = max_position
        self.theta = theta
        self.scaling = None if scaling is None else dict(scaling)
        self.interleaved = interleaved
        cos, sin = self._tables(device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _tables(self, device) -> tuple[Tensor, Tensor]:
        return rope_tables(self.head_dim, self.max_position, theta=self.theta, scaling=self.scaling, device=device)

    def _apply(self, fn, recurse=True):
        """Moves like any module, but a cast to 16 bit or a start on the meta device must not spoil the tables."""
        super()._apply(fn, recurse)
        self.cos, self.sin = self._tables(self.cos.device)
        return self

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return rope(q, k, self.cos, self.sin, positions=positions, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, max_position={self.max_position}, theta={self.theta}, "
            f"scaling={self.scaling}, interleaved={self.interleaved}"
        )
