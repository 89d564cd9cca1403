"""The nn.Module around attention_with_cache."""

import torch
from torch import Tensor, nn

from .cache import Cache
from .op import attention_with_cache


class CachedAttention(nn.Module):
    """Attention of new rows over one layer of a cache; see riftco.functional.attention_with_cache.

    Args:
        layer: which layer of the cache it reads.
        scale, window, softcap: as the function's.
        sinks: number of query heads to give a learnable sink each (initialised to 0), or None.
    """

    def __init__(
        self,
        layer: int,
        *,
        scale: float | None = None,
        window: tuple[int | None, int | None] = (None, None),
        softcap: float = 0.0,
        sinks: int | None = None,
    ):
        super().__init__()
        self.layer, self.scale, self.window, self.softcap = layer, scale, window, softcap
        self.sinks = None if sinks is None else nn.Parameter(torch.zeros(sinks))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Cache,
        slots: Tensor,
        positions: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        return attention_with_cache(  # type: ignore[return-value]
            q, k, v, cache, self.layer, slots, positions, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sinks,
        )  # fmt: skip
