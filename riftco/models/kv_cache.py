"""Keys and values of the positions already read, for generation: one contiguous buffer per layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import DecoderConfig
from .errors import ModelError


class KVCache:
    """Room for `capacity` positions of `batch` sequences of one length; `length` positions are filled.

    A forward with a cache appends its keys and values and attends to everything before them. Keys are stored as
    attention reads them: normed and rotated. Holds no gradients.
    """

    def __init__(
        self,
        config: DecoderConfig,
        capacity: int,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if not 0 < capacity <= config.max_position_embeddings:
            raise ModelError(
                f"KVCache: capacity must be between 1 and the model's longest context, "
                f"{config.max_position_embeddings}; got {capacity}"
            )
        shape = (batch, capacity, config.num_kv_heads, config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.capacity = capacity
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k and v [B, T, K, D] behind the filled positions of `layer`; return views of all of them [B, S, K, D].

        The positions count as filled only after `advance`, once every layer has written its own.
        """
        end = self.length + k.shape[1]
        keys, values = self.keys[layer][:, :end], self.values[layer][:, :end]
        keys[:, self.length :].copy_(k)
        values[:, self.length :].copy_(v)
        return keys, values

    def check(self, batch: int, n_tokens: int) -> None:
        """Refuse, before any layer runs, what does not fit."""
        if batch != self.keys[0].shape[0]:
            raise ModelError(f"KVCache: made for {self.keys[0].shape[0]} sequences; got {batch}")
        if self.length + n_tokens > self.capacity:
            raise ModelError(
                f"KVCache: {n_tokens} more positions after {self.length} do not fit its capacity of {self.capacity}"
            )
        if torch.is_grad_enabled():
            raise ModelError("KVCache: holds no gradients; run the forward under torch.no_grad()")

    def advance(self, n_tokens: int) -> None:
        self.length += n_tokens

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        if not 0 <= length <= self.length:
            raise ModelError(f"KVCache: cannot cut {self.length} positions to {length}")
        self.length = length
