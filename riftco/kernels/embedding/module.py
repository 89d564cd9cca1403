"""torch.nn.Embedding with a gradient that is summed in a fixed order, and adapters on an embedding.

V rows, C values, R rank, n trained rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .op import embedding

CHUNK_BYTES = 32 << 20  # of float32 rows of W held at once


class Embedding(nn.Embedding):
    """torch.nn.Embedding's arguments, state_dict and initialisation; `sparse=True` is refused by name."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if self.sparse:
            raise ValueError("Embedding: sparse=True is not supported; gradients are dense")

    def forward(self, input: Tensor) -> Tensor:
        return embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq
        )  # fmt: skip


class _OverEmbedding(nn.Module):
    """What adapters on an embedding share: the frozen base, dense or packed, and its size as the model asks for it."""

    base_layer: Any  # an nn.Embedding, or what looks rows up in a frozen weight of a format of its own

    def __init__(self, base: nn.Module):
        super().__init__()
        if getattr(base, "max_norm", None) is not None or getattr(base, "sparse", False):
            raise ValueError(f"{type(self).__name__}: an embedding with max_norm or sparse=True cannot be adapted")
        self.base_layer = base.requires_grad_(False)

    @property
    def weight(self) -> Any:
        """The frozen base's."""
        return self.base_layer.weight

    @property
    def num_embeddings(self) -> int:
        return self.base_layer.num_embeddings

    @property
    def embedding_dim(self) -> int:
        return self.base_layer.embedding_dim

    def _trained(self, ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of a trained weight, by the base's rules for gradients."""
        by_frequency = getattr(self.base_layer, "scale_grad_by_freq", False)
        return embedding(ids, weight, padding_idx, scale_grad_by_freq=by_frequency)

    def _scaled(self, rows: Tensor) -> Tensor:
        """Some families multiply what they look up; the adapter's part is multiplied with it."""
        factor = getattr(self.base_layer, "embed_scale", None)
        return rows if factor is None else rows * (factor.to(rows.dtype) if isinstance(factor, Tensor) else factor)


class LoRAOptions:
    """What layers with a LoRA share: PEFT's options, the factor that they make, and how they print."""

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    use_dora: bool

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    def extra_repr(self) -> str:
        return (
            f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}, use_rslora={self.use_rslora}, "
            f"use_dora={self.use_dora}"
        )


class LoRAEmbedding(LoRAOptions, _OverEmbedding):
    """A frozen embedding with a trainable adapter: y = W[ids] + scale * A^T[ids] B^T, in W's dtype.

    `lora_embedding_A` [R, V] starts as zeros, `lora_embedding_B` [C, R] as normal, so that y starts as W[ids]; scale is
    alpha / rank, or alpha / sqrt(rank) with `use_rslora`. Adapters are float32 unless `dtype` says otherwise. With
    `use_dora`, `lora_magnitude_vector` [C] starts as the norm of each column of W, and y is multiplied by it over the
    norm of W + scale * A^T B^T, a constant to the gradient. As in PEFT, dropout does nothing to an embedding: ids have
    no elements to hide; `dropout` is kept for a head that shares the adapter.

    The gradient of A is summed over equal ids in their order, as Embedding's; only [n, R] is kept for the backward.

    Args:
        base: an nn.Embedding or GGUFEmbedding [V, C]; frozen.
        rank: R.
        alpha, use_rslora, use_dora, dropout, dtype: see above.

    Raises:
        ValueError: an embedding with max_norm or sparse=True.
    """

    lora_magnitude_vector: Tensor | None

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        use_rslora: bool = False,
        use_dora: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(base)
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        self.use_rslora, self.use_dora = use_rslora, use_dora
        V, C = self.weight.shape
        like: dict = dict(device=self.weight.device, dtype=dtype)
        self.lora_embedding_A = nn.Parameter(torch.empty(rank, V, **like))
        self.lora_embedding_B = nn.Parameter(torch.empty(C, rank, **like))
        self.register_parameter("lora_magnitude_vector", nn.Parameter(torch.empty(C, **like)) if use_dora else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.lora_embedding_A)
        nn.init.normal_(self.lora_embedding_B)
        if self.lora_magnitude_vector is not None and self.lora_magnitude_vector.device.type != "meta":
            with torch.no_grad():
                self.lora_magnitude_vector.copy_(self.weight_norm())

    @torch.no_grad()
    def weight_norm(self) -> Tensor:
        """||W + scale * A^T B^T|| of each column [C], in float32 (float64 in float64): a few rows of W at a time."""
        A, B, W = self.lora_embedding_A, self.lora_embedding_B, self.base_layer.weight
        dense = isinstance(W, Tensor)
        acc = torch.promote_types(torch.promote_types(A.dtype, W.dtype if dense else A.dtype), torch.float32)
        V, C = W.shape
        total = A.new_zeros(C, dtype=acc)
        step = max(1, CHUNK_BYTES // (max(C, 1) * acc.itemsize))
        for lo in range(0, V, step):
            base = W[lo : lo + step].to(acc) if dense else W.decoded(lo, min(lo + step, V), acc)
            inner = A[:, lo : lo + step].t().to(acc)
            total += torch.addmm(base, inner, B.t().to(acc), alpha=self.scale).square().sum(0)
        return total.sqrt()

    def forward(self, input: Tensor) -> Tensor:
        inner = self._trained(input, self.lora_embedding_A.t(), getattr(self.base_layer, "padding_idx", None))
        delta = self._scaled(F.linear(inner, self.lora_embedding_B) * self.scale)
        y = self.base_layer(input)
        if self.lora_magnitude_vector is None:
            return (y + delta).to(y.dtype)
        return ((self.lora_magnitude_vector / self.weight_norm()) * (y + delta)).to(y.dtype)


class TrainableTokens(_OverEmbedding):
    """A frozen embedding in which the rows `token_indices` alone are trained.

    `trainable_tokens_delta` [n, C] holds those rows themselves, not differences; it starts as theirs. No copy of W is
    made: each token's row is looked up in W or among the trained ones, and their gradient is summed over equal ids in
    the ids' order. float32 unless `dtype` says otherwise.

    Raises:
        ValueError: `token_indices` that are empty, not distinct or outside of [0, V); an embedding with max_norm or
            sparse=True.
    """

    row_of: Tensor
    ids: Tensor

    def __init__(self, base: nn.Module, token_indices: list[int], *, dtype: torch.dtype = torch.float32):
        super().__init__(base)
        V = self.num_embeddings
        if not token_indices or len(set(token_indices)) != len(token_indices):
            raise ValueError(f"TrainableTokens: token_indices must be distinct and not empty; got {token_indices}")
        if bad := [i for i in token_indices if not 0 <= i < V]:
            raise ValueError(f"TrainableTokens: token_indices must be in [0, {V}); got {bad[0]}")
        self.token_indices = list(token_indices)
        device = self.weight.device
        ids = torch.tensor(self.token_indices, device="cpu")
        row_of = torch.full((V,), -1, dtype=torch.int64, device="cpu")
        row_of[ids] = torch.arange(len(ids), device="cpu")
        self.register_buffer("row_of", row_of.to(device), persistent=False)
        self.register_buffer("ids", ids.to(device), persistent=False)
        self.trainable_tokens_delta = nn.Parameter(self.frozen_rows().to(dtype))

    def frozen_rows(self) -> Tensor:
        """The base's rows of the same tokens [n, C]."""
        weight = self.weight
        return weight.detach().index_select(0, self.ids) if isinstance(weight, Tensor) else self.base_layer(self.ids)

    def forward(self, input: Tensor) -> Tensor:
        padding = getattr(self.base_layer, "padding_idx", None)
        if padding is not None:
            padding = self.token_indices.index(padding) if padding in self.token_indices else None
        y, own = self.base_layer(input), self.row_of[input]
        rows = self._trained(own.clamp(min=0), self.trainable_tokens_delta, padding)
        return torch.where((own >= 0).unsqueeze(-1), self._scaled(rows).to(y.dtype), y)

    def extra_repr(self) -> str:
        return f"token_indices={self.token_indices[:8]}{'...' if len(self.token_indices) > 8 else ''}"


class SharedHead(nn.Module):
    """The head of a tied model whose embedding is adapted: a frozen `base` over the shared weight. What is trained
    belongs to the embedding, which gets both gradients.
    """

    base_layer: Any

    def __init__(self, base: nn.Module, owner: nn.Module):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self._owner: tuple[Any] = (owner,)  # in a tuple: no submodule, so that what is trained is saved once

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def in_features(self) -> int:
        return self.base_layer.in_features

    @property
    def out_features(self) -> int:
        return self.base_layer.out_features


class TokensHead(SharedHead):
    """The head of a tied model whose embedding is a TrainableTokens: the same rows, as columns of the logits.

    The rows belong to the embedding, which gets both gradients. `base` is the frozen head over the shared weight.
    """

    def __init__(self, base: nn.Module, tokens: TrainableTokens):
        super().__init__(base, tokens)

    @property
    def tokens(self) -> TrainableTokens:
        return self._owner[0]

    def adapter(self) -> tuple[Tensor, Tensor, float]:
        """The same head as a LoRA (A [n, C], B [V, n], scale): what a sliced loss takes."""
        tokens, frozen = self.tokens, self.tokens.frozen_rows()
        acc = torch.promote_types(frozen.dtype, torch.float32)
        difference = tokens.trainable_tokens_delta.to(acc) - frozen.to(acc)
        picks = frozen.new_zeros(self.out_features, len(tokens.ids))
        picks[tokens.ids, torch.arange(len(tokens.ids), device=picks.device)] = 1
        return difference, picks, 1.0

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens
        z = self.base_layer(x)
        bias = None if self.base_layer.bias is None else self.base_layer.bias[tokens.ids]
        own = F.linear(x, tokens.trainable_tokens_delta.to(x.dtype), bias)
        return z.index_copy(-1, tokens.ids, own.to(z.dtype))
