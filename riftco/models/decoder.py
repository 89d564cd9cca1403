"""The decoder: one module for every family, with Hugging Face's parameter names; what differs is in its config.

B sequences, T positions (or `total` positions of packed documents), C hidden size, H query heads, K key/value heads,
D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .. import tpu
from ..functional import (
    attention,
    describe_head,
    geglu,
    last_product,
    recomputed,
    replay,
    rope,
    sliced_head_loss,
    swiglu,
)
from ..nn import Embedding, RMSNorm, linear_group, own_call, plain_call
from .config import DecoderConfig
from .errors import ModelError
from .joined import product
from .kv_cache import KVCache, RowStep, Step
from .rotary import Rotary, Rotation

ACTIVATION_CHECKPOINTING = ("disabled", "block", "selective")
ATTENTION = ("flash", "materialized")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Packing:
    """Where the documents of a packed row lie: [0, ..., total] int32, and the longest one's length (None: unknown)."""

    cu_seqlens: Tensor
    max_seqlen: int | None = None


class Attends(Protocol):
    """A cache: attention over rows that it keeps itself, [.., H, D] from rotated q, k and from v."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        """`how`: scale, window and softcap, as attention_with_cache takes them."""
        ...


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        C, H, K, D = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.index, self.head_dim, self.impl = index, D, "flash"
        self.rotates = index not in config.no_rope_layers
        window = config.window_of(index)
        self.how: dict[str, Any] = {
            "scale": config.attention_scale,
            "window": (None if window is None else window - 1, None),
            "softcap": config.attention_softcap,
        }
        self.sizes = (H * D, K * D, K * D)
        self.fused = config.fused_projections
        if self.fused:
            self.qkv_proj = nn.Linear(C, sum(self.sizes), bias=config.attention_bias)
        else:
            self.q_proj = nn.Linear(C, H * D, bias=config.attention_bias)
            self.k_proj = nn.Linear(C, K * D, bias=config.attention_bias)
            self.v_proj = nn.Linear(C, K * D, bias=config.attention_bias)
        self.o_proj = nn.Linear(H * D, C, bias=config.output_bias)
        self.norms_qk = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(D, eps=config.rms_norm_eps, offset=config.norm_offset)
            self.k_norm = RMSNorm(D, eps=config.rms_norm_eps, offset=config.norm_offset)

    def forward(
        self, x: Tensor, rotation: Rotation, packing: Packing | None = None, cache: Attends | None = None
    ) -> Tensor:
        q, k, v = (row.unflatten(-1, (-1, self.head_dim)) for row in self._projected(x))
        if self.norms_qk:
            q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(cache, RowStep):
            turn = rotation if self.rotates else None
            return self.o_proj(cache.decode(self.index, q, k, v, turn, **self.how).flatten(-2))
        if self.rotates:
            q, k = rope(q, k, rotation.cos, rotation.sin, positions=rotation.rows)
        if cache is not None:
            return self.o_proj(cache.attend(self.index, q, k, v, **self.how).flatten(-2))
        if packing is None:
            out = attention(q, k, v, causal=True, impl=self.impl, **self.how)
        else:
            cu, longest = packing.cu_seqlens, packing.max_seqlen
            out = attention(
                q, k, v, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
                impl=self.impl, **self.how,
            )  # fmt: skip
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return self.o_proj(out.flatten(-2))

    def _projected(self, x: Tensor) -> tuple[Tensor, ...]:
        with recomputed(x):  # what the norm has read is kept anyway
            if self.fused:
                return self.qkv_proj(x).split(self.sizes, -1)
            return _group(x, (self.q_proj, self.k_proj, self.v_proj))


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        C, inner = config.hidden_size, config.intermediate_size
        self.fused, self.activation = config.fused_projections, config.activation
        self.ends_block = not config.post_norms  # else a norm reads, and saves, what comes out
        if self.fused:
            self.gate_up_proj = nn.Linear(C, 2 * inner, bias=config.mlp_bias)
        else:
            self.gate_proj = nn.Linear(C, inner, bias=config.mlp_bias)
            self.up_proj = nn.Linear(C, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, C, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gated = self._gated(x)
        h = swiglu(*gated) if self.activation == "silu" else geglu(*gated, approximate="tanh")
        with recomputed(h):  # gate and up are kept, and give h again
            return last_product(self.down_proj, h) if self.ends_block else self.down_proj(h)

    def _gated(self, x: Tensor) -> tuple[Tensor, ...]:
        with recomputed(x):  # what the norm has read is kept anyway
            if self.fused:
                return (self.gate_up_proj(x),)
            return _group(x, (self.gate_proj, self.up_proj))


def _group(x: Tensor, layers: tuple[nn.Module, ...]) -> tuple[Tensor, ...]:
    return product(x, layers) or linear_group(x, layers)


class Block(nn.Module):
    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset)

        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        self.post_norms = config.post_norms
        if self.post_norms:
            self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()

    def forward(
        self, x: Tensor, rotation: Rotation, packing: Packing | None = None, cache: Attends | None = None
    ) -> Tensor:
        x, branch = self.branches(x, None, rotation, packing, cache)
        return x + branch

    def branches(
        self, x: Tensor, branch: Tensor | None, rotation: Rotation, packing: Packing | None, cache: Attends | None
    ) -> tuple[Tensor, Tensor]:
        """What is left to be added up, of x and a branch (None: of x alone): a norm takes both, and adds them in its
        own launch."""
        if branch is None:
            h = self.input_layernorm(x)
        else:
            h, x = _normed(self.input_layernorm, x, branch)
        attended = self.self_attn(h, rotation, packing, cache)
        if not self.post_norms:
            h, x = _normed(self.post_attention_layernorm, attended, x)
            return x, self.mlp(h)
        h, x = _normed(self.pre_feedforward_layernorm, self.post_attention_layernorm(attended), x)
        return x, self.post_feedforward_layernorm(self.mlp(h))


class Backbone(nn.Module):
    """What Hugging Face calls `model`: everything below the head."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset)


class Decoder(nn.Module):
    """A causal language model.

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
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = Rotary(config.rope)
        self.local_rotary = None if config.local_rope is None else Rotary(config.local_rope)
        self.attention = attention
        # rounded to the dtype of what it scales, as the weights were trained
        self._embedding_scale = {
            d: float(torch.full((), config.embedding_scale, dtype=d, device="cpu")) for d in DTYPES
        }
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

    def _apply(self, fn, recurse=True):
        """Parameters that modules share stay shared: on XLA they are not changed in place but replaced, one by one."""
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    places.setdefault(p, []).append((module, name))
        super()._apply(fn, recurse)
        for (first, named), *others in places.values():
            for module, name in others:
                module._parameters[name] = first._parameters[named]
        return self

    @property
    def device(self) -> torch.device:
        return self._unpacked.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self._unpacked.dtype

    @property
    def _unpacked(self) -> Tensor:
        """A weight that is never held in a format of its own, unlike the embedding's."""
        weight = self.model.norm.weight
        assert weight is not None
        return weight

    def forward(self, input_ids: Tensor, **options) -> Tensor:
        """input_ids [B, T] or packed [total] -> logits [..., V]. Options as in `hidden`."""
        return self.logits(self.hidden(input_ids, **options))

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's logits [..., V] of hidden states [..., C], bent by the final softcap where there is one."""
        z, cap = self.lm_head(hidden), self.config.final_softcap
        return z if not cap else cap * torch.tanh(z / cap)

    def hidden(
        self,
        input_ids: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        kv_cache: KVCache | Step | None = None,
    ) -> Tensor:
        """The hidden states that the head reads, [..., C].

        Args:
            input_ids: int32 or int64 [B, T]; or, with `cu_seqlens` or a Step, packed [total].
            positions: the position of each token, [T] or as input_ids; from 0 in each row or document unless given.
            cu_seqlens: int32 [documents + 1], where packed documents begin and end: no token sees another's document.
            max_seqlen: the longest document's length, where the caller knows it.
            kv_cache: what was read before: a KVCache, whose first B slots these rows go on; or a Step that
                KVCache.begin made, for runs of any slots. This forward appends to it.
        """
        self._check(input_ids, positions, cu_seqlens, max_seqlen, kv_cache)
        step = kv_cache
        if isinstance(kv_cache, KVCache):
            B, T = input_ids.shape
            step = kv_cache.begin([(slot, T) for slot in range(B)])
        assert step is None or isinstance(step, Step)
        packing = None if cu_seqlens is None else Packing(cu_seqlens, max_seqlen)
        reach: int | Tensor | None = None if step is None else step.reach
        if step is not None and positions is None:
            positions = step.positions.view(input_ids.shape)
        elif packing is not None:
            positions, reach = _of_documents(packing.cu_seqlens, input_ids, positions, self.rotary.switches_at)
        elif positions is None:
            positions = torch.arange(input_ids.shape[-1], device=input_ids.device, dtype=torch.int64)
        x = self.run(input_ids, positions, reach, packing, step)
        if step is not None:
            step.finish()
        return x

    def embed(self, input_ids: Tensor) -> Tensor:
        """What the first layer reads, [..., C]."""
        x = self.model.embed_tokens(input_ids)
        return x if self.config.embedding_scale == 1.0 else x * self._embedding_scale[x.dtype]

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        reach: int | Tensor | None = None,
        packing: Packing | None = None,
        cache: Attends | None = None,
        *,
        checkpointing: str | None = None,
    ) -> Tensor:
        """The hidden states of tokens at given positions: what `hidden` does once it knows them.

        Args:
            input_ids: [B, T] or [total].
            positions: [T] or as input_ids.
            reach: as Rotary takes it.
            packing: where documents lie.
            cache: what attends in attention's place.
            checkpointing: in place of `activation_checkpointing`, which a cache switches off.
        """
        rotation = local = self.rotary(positions, reach)
        if self.local_rotary is not None:
            local = self.local_rotary(positions, reach)
        x = self.embed(input_ids)
        mode = checkpointing or (self.activation_checkpointing if cache is None else "disabled")
        mode = mode if torch.is_grad_enabled() else "disabled"
        more: dict[str, Any] = {"context_fn": _keep_attention} if mode == "selective" else {}
        replayed: Callable = checkpoint
        if mode != "disabled" and x.device.type == tpu.DEVICE_TYPE:
            if mode == "selective":
                raise ModelError("activation_checkpointing='selective' is not made for tpu; use 'block' or 'disabled'")
            replayed, more = tpu.checkpoint, {}
            x = x if x.requires_grad else x.detach().requires_grad_()
        open_ended = mode == "disabled" and all(plain_call(layer, Block) for layer in self.model.layers)
        # where a block is compiled, the partitioner leaves out what nobody reads
        spares = mode == "block" and replayed is checkpoint and not torch.compiler.is_compiling()
        branch = None
        for i, layer in enumerate(self.model.layers):
            turn = local if i in self.config.sliding_layers else rotation
            if open_ended:
                x, branch = cast(Block, layer).branches(x, branch, turn, packing, cache)
            elif mode == "disabled":
                x = layer(x, turn, packing, cache)
            else:
                if spares:
                    more = {"context_fn": _keep_nothing} if _ends_unread(layer) else {}
                x = replayed(layer, x, turn, packing, cache, use_reentrant=False, **more)
        return self.model.norm(x) if branch is None else _normed(self.model.norm, x, branch)[0]

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
            describe_head(self.lm_head)  # before anything is computed
        except ValueError as refused:
            raise ModelError(f"loss: {refused}") from None
        return self.head_loss(
            self.hidden(input_ids, **options),
            target,
            row_weight=row_weight,
            n_labelled=n_labelled,
            denominator=denominator,
            reduction=reduction,
        )

    def head_loss(self, hidden: Tensor, target: Tensor, **options) -> Tensor:
        """The cross-entropy of the logits that the head makes of hidden states; options as linear_cross_entropy's."""
        loss = sliced_head_loss(hidden, self.lm_head, target, softcap=self.config.final_softcap or None, **options)
        assert isinstance(loss, Tensor)
        return loss

    def _check(self, input_ids, positions, cu_seqlens, max_seqlen, kv_cache) -> None:
        if input_ids.dtype not in (torch.int32, torch.int64):
            raise ModelError(f"input_ids must be int32 or int64; got {input_ids.dtype}")
        packed = cu_seqlens is not None or isinstance(kv_cache, Step)
        if input_ids.dim() != (1 if packed else 2):
            raise ModelError(
                f"input_ids must be [B, T], or [total] together with cu_seqlens; got {tuple(input_ids.shape)}"
            )
        if positions is not None and positions.shape not in (input_ids.shape, input_ids.shape[-1:]):
            raise ModelError(f"positions must be {tuple(input_ids.shape)} or [T]; got {tuple(positions.shape)}")
        if kv_cache is not None and cu_seqlens is not None:
            raise ModelError("kv_cache knows where its runs begin; it cannot be used with cu_seqlens")
        if isinstance(kv_cache, Step) and len(input_ids) != kv_cache.total:
            raise ModelError(f"this step of the cache is of {kv_cache.total} tokens; got {len(input_ids)}")
        longest = max_seqlen if packed else input_ids.shape[1]
        if kv_cache is None and longest is not None and longest > self.config.max_position_embeddings:
            raise ModelError(too_long(longest, self.config))


def too_long(n_tokens: int, config: DecoderConfig) -> str:
    return f"a context of {n_tokens} tokens is longer than this model's {config.max_position_embeddings}"


def _of_documents(
    cu_seqlens: Tensor, input_ids: Tensor, positions: Tensor | None, switches_at: int | None
) -> tuple[Tensor, Tensor | None]:
    """Positions of packed tokens, from 0 in each document unless given; and the length of each token's document, where
    the rotation depends on it."""
    if positions is not None and switches_at is None:
        return positions, None
    rows = torch.arange(input_ids.shape[-1], device=input_ids.device, dtype=cu_seqlens.dtype)
    if rows.device.type == tpu.DEVICE_TYPE:  # by counting starts: torch_xla leaves searchsorted to the CPU
        of = (cu_seqlens <= rows.unsqueeze(-1)).sum(-1) - 1
    else:
        of = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    if positions is None:
        positions = rows - cu_seqlens[of]
    if switches_at is None:
        return positions, None
    ends = torch.zeros(len(cu_seqlens), dtype=positions.dtype, device=positions.device)
    return positions, ends.scatter_reduce(0, of, positions + 1, "amax")[of]


def _normed(norm: nn.Module, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of x + branch, x + branch): one launch, whose norm has x's dtype, unless somebody sees or changes what the
    norm is given."""
    if plain_call(norm, RMSNorm):
        return norm(x, branch)
    x = x + branch
    return norm(x), x


def _ends_unread(layer: nn.Module) -> bool:
    """Whether nobody reads what the layer's last product gives but the sum that the layer returns."""
    return own_call(layer, Block) and own_call(cast(Block, layer).mlp, MLP)


def _keep_attention():
    """What checkpointing runs a block under, the first time and again. A replay must make the same calls here."""
    return create_selective_checkpoint_contexts([torch.ops.riftco.attention_fwd.default])


def _keep_nothing():
    return nullcontext(), replay()


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
