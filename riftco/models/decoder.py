"""The decoder: one module for the whole Llama family, with Hugging Face's parameter names.

B sequences, T positions (or `total` positions of packed documents), C hidden size, H query heads, K key/value heads,
D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..functional import attention, describe_head, recomputed, rope, sliced_head_loss, swiglu
from ..nn import Embedding, RMSNorm, linear_group
from .config import DecoderConfig
from .errors import ModelError
from .kv_cache import KVCache
from .rotary import Rotary, Rotation

ACTIVATION_CHECKPOINTING = ("disabled", "block", "selective")
ATTENTION = ("flash", "materialized")


@dataclass(frozen=True)
class Packing:
    """Where the documents of a packed row lie: [0, ..., total] int32, and the longest one's length (None: unknown)."""

    cu_seqlens: Tensor
    max_seqlen: int | None = None


class Attends(Protocol):
    """In a cache's place: attention over rows that it keeps itself, [B, T, H, D] from rotated q, k and from v."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        C, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.index, self.head_dim, self.impl = index, D, "flash"
        self.rotates = index not in config.no_rope_layers
        self.q_proj = nn.Linear(C, H * D, bias=config.attention_bias)
        self.k_proj = nn.Linear(C, K * D, bias=config.attention_bias)
        self.v_proj = nn.Linear(C, K * D, bias=config.attention_bias)
        self.o_proj = nn.Linear(H * D, C, bias=config.output_bias)
        self.norms_qk = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(D, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(D, eps=config.rms_norm_eps)

    def forward(
        self, x: Tensor, rotation: Rotation, packing: Packing | None = None, cache: KVCache | Attends | None = None
    ) -> Tensor:
        with recomputed(x):  # what the norm has read is kept anyway
            rows = linear_group(x, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (row.unflatten(-1, (-1, self.head_dim)) for row in rows)
        if self.norms_qk:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rope(q, k, rotation.cos, rotation.sin, positions=rotation.rows)
        if cache is not None:
            if not isinstance(cache, KVCache):
                return self.o_proj(cache.attend(self.index, q, k, v).flatten(-2))
            k, v = cache.append(self.index, k, v)
        if packing is None:
            out = attention(q, k, v, causal=True, impl=self.impl)
        else:
            cu, longest = packing.cu_seqlens, packing.max_seqlen
            out = attention(
                q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
                impl=self.impl,
            )  # fmt: skip
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return self.o_proj(out.flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        C, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(C, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(C, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, C, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        h = swiglu(*self._gated(x))
        with recomputed(h):  # gate and up are kept, and give h again
            return self.down_proj(h)

    def _gated(self, x: Tensor) -> tuple[Tensor, ...]:
        with recomputed(x):  # what the norm has read is kept anyway
            return linear_group(x, (self.gate_proj, self.up_proj))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, x: Tensor, rotation: Rotation, packing: Packing | None = None, cache: KVCache | Attends | None = None
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rotation, packing, cache)
        h, x = self.post_attention_layernorm(attended, x)  # the norm of their sum, and the sum
        return x + self.mlp(h)


class Backbone(nn.Module):
    """What Hugging Face calls `model`: everything below the head."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model of the Llama family.

    Args:
        config: shape and options.
        activation_checkpointing: "disabled"; "block": keep only each block's input and run the block again in the
            backward; or "selective": keep what attention returned too (out and lse), which is then not run again.
            Results are equal. May be set on the model later.
        attention: "flash", linear in memory, or "materialized", which keeps the probabilities [B, H, T, T] of every
            layer for the backward. Results are equal up to rounding. May be set on the model later.

    New weights are normal with standard deviation 0.02 (norms 1, biases 0). A tied head is the embedding's parameter.
    """

    def __init__(self, config: DecoderConfig, *, activation_checkpointing: str = "disabled", attention: str = "flash"):
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = Rotary(config.rope)
        self.attention = attention
        self.apply(_initialise)

    @property
    def activation_checkpointing(self) -> str:
        return self._activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, value: str) -> None:
        if value not in ACTIVATION_CHECKPOINTING:
            raise ModelError(
                f"activation_checkpointing must be one of {', '.join(ACTIVATION_CHECKPOINTING)}; got {value!r}"
            )
        self._activation_checkpointing = value

    @property
    def attention(self) -> str:
        return self._attention

    @attention.setter
    def attention(self, value: str) -> None:
        if value not in ATTENTION:
            raise ModelError(f"attention must be one of {', '.join(ATTENTION)}; got {value!r}")
        self._attention = value
        for module in self.modules():
            if isinstance(module, Attention):
                module.impl = value

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.model.embed_tokens.weight.dtype

    def forward(self, input_ids: Tensor, **options) -> Tensor:
        """input_ids [B, T] or packed [total] -> logits [..., V]. Options as in `hidden`."""
        return self.lm_head(self.hidden(input_ids, **options))

    def hidden(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        """The hidden states that the head reads, [..., C].

        Args:
            input_ids: int32 or int64 [B, T]; or, with `cu_seqlens`, packed documents [total].
            positions: the position of each token, [T] or as input_ids; from 0 in each row or document unless given.
            cu_seqlens: int32 [documents + 1], where packed documents begin and end: no token sees another's document.
            max_seqlen: the longest document's length, where the caller knows it.
            kv_cache: what was read before, for B rows; this forward appends to it.
        """
        self._check(input_ids, positions, cu_seqlens, max_seqlen, kv_cache)
        packing = None if cu_seqlens is None else Packing(cu_seqlens, max_seqlen)
        if positions is None:
            kind = torch.int64 if cu_seqlens is None else cu_seqlens.dtype
            positions = torch.arange(input_ids.shape[-1], device=input_ids.device, dtype=kind)
            if cu_seqlens is not None:
                starts = torch.searchsorted(cu_seqlens, positions, right=True) - 1
                positions = positions - cu_seqlens[starts]
            elif kv_cache is not None:
                positions = positions + kv_cache.length
        rotation = self.rotary(positions)
        x = self.model.embed_tokens(input_ids)
        replay = self.activation_checkpointing != "disabled" and torch.is_grad_enabled()
        for layer in self.model.layers:
            if replay and self.activation_checkpointing == "selective":
                x = checkpoint(layer, x, rotation, packing, use_reentrant=False, context_fn=_keep_attention)
            elif replay:
                x = checkpoint(layer, x, rotation, packing, use_reentrant=False)
            else:
                x = layer(x, rotation, packing, kv_cache)
        if kv_cache is not None:
            kv_cache.advance(input_ids.shape[-1])
        return self.model.norm(x)

    def loss(
        self,
        input_ids: Tensor,
        target: Tensor,
        row_weight: Tensor | None = None,
        n_labelled: int | None = None,
        denominator: int | Tensor | None = None,
        *,
        reduction: str = "mean",
        **options,
    ) -> Tensor:
        """The cross-entropy of `target` given `input_ids`, in nats, without ever holding [tokens, V] logits.

        Args:
            input_ids: [B, T] or packed [total].
            target: the token that follows each position, as input_ids; negative where there is no label.
            row_weight: float32, as target: scales a position's loss and gradient.
            n_labelled: how many positions carry a label, where the caller knows it.
            denominator: replaces the number of labelled positions in "mean" (gradient accumulation).
            reduction: "mean", "sum" or "none".
            options: as in `hidden`.
        """
        try:
            describe_head(self.lm_head)
        except ValueError as refused:
            raise ModelError(f"loss: {refused}") from None
        loss = sliced_head_loss(
            self.hidden(input_ids, **options),
            self.lm_head,
            target,
            row_weight=row_weight,
            n_labelled=n_labelled,
            denominator=denominator,
            reduction=reduction,
        )
        assert isinstance(loss, Tensor)
        return loss

    def _check(self, input_ids, positions, cu_seqlens, max_seqlen, kv_cache) -> None:
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise ModelError(f"input_ids must be int32 or int64; got {input_ids.dtype}")
        if input_ids.dim() != (2 if cu_seqlens is None else 1):
            raise ModelError(
                f"input_ids must be [B, T], or [total] together with cu_seqlens; got {tuple(input_ids.shape)}"
            )
        if positions is not None and positions.shape not in (input_ids.shape, input_ids.shape[-1:]):
            raise ModelError(f"positions must be {tuple(input_ids.shape)} or [T]; got {tuple(positions.shape)}")
        longest = max_seqlen if cu_seqlens is not None else input_ids.shape[1]
        if kv_cache is not None:
            if cu_seqlens is not None:
                raise ModelError("kv_cache takes rows of one length; it cannot be used with cu_seqlens")
            kv_cache.check(*input_ids.shape)
            longest += kv_cache.length
        if longest is not None and longest > self.config.max_position_embeddings:
            raise ModelError(too_long(longest, self.config))


def too_long(n_tokens: int, config: DecoderConfig) -> str:
    return f"a context of {n_tokens} tokens is longer than this model's {config.max_position_embeddings}"


def _keep_attention():
    return create_selective_checkpoint_contexts([torch.ops.riftco.attention_fwd.default])


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
