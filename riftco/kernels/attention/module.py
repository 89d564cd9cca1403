"""Self-attention with its four projections. B sequences, T positions, C hidden size, H and K heads, D head dim."""

import torch
from torch import Tensor, nn

from ..rms_norm.module import RMSNorm
from ..rope.module import RotaryEmbedding
from ..rope.op import rope
from .op import attention

Sides = tuple[int | None, int | None]


class Attention(nn.Module):
    """q, k, v and output projections around `attention`: x [B, T, C] or packed [total, C] -> the same shape.

    Args:
        hidden_size: C.
        num_heads: query heads H.
        num_kv_heads: key/value heads K, a divisor of H; default H.
        head_dim: D; default C // H.
        bias: whether the projections have a bias.
        causal: whether a token sees only itself and those before it.
        scale: of the scores; default D ** -0.5.
        window: (left, right): a token sees that many tokens to either side of itself; None for no limit.
        softcap: > 0 caps the scaled scores at +-softcap.
        sinks: a learnable score a head without a value (parameter `sinks` [H], zeros at first).
        qk_norm: RMS normalisation of each head of q and k before they are turned (`q_norm`, `k_norm`, weights [D]).
        norm_eps: its epsilon.
        rotary: a RotaryEmbedding that turns q and k; several layers may share one.
        dropout: of softmax weights, in training mode.
        attention: "flash", linear in memory, or "materialized", which holds all scores; see `attention`'s impl.

    Parameters have the names of transformers' Llama family.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: Sides = (None, None),
        softcap: float = 0.0,
        sinks: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rotary: RotaryEmbedding | None = None,
        dropout: float = 0.0,
        attention: str = "flash",
        device=None,
        dtype=None,
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"Attention: hidden_size {hidden_size} is no multiple of {num_heads} heads; give head_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"Attention: num_heads {num_heads} is no multiple of num_kv_heads {num_kv_heads}")
        self.head_dim = D = hidden_size // num_heads if head_dim is None else head_dim
        if rotary is not None and rotary.head_dim != D:
            raise ValueError(f"Attention: rotary turns heads of {rotary.head_dim}, but head_dim is {D}")
        self.causal, self.scale, self.window, self.softcap, self.dropout = causal, scale, window, softcap, dropout
        self.impl = attention
        make = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * D, bias=bias, **make)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * D, bias=bias, **make)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * D, bias=bias, **make)
        self.o_proj = nn.Linear(num_heads * D, hidden_size, bias=bias, **make)
        self.q_norm = RMSNorm(D, norm_eps, **make) if qk_norm else None
        self.k_norm = RMSNorm(D, norm_eps, **make) if qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(num_heads, **make)) if sinks else None
        self.rotary = rotary

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        max_seqlen: int | None = None,
        k_lens: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            x: [B, T, C], or packed documents [total, C] with cu_seqlens. Differentiable.
            cu_seqlens: int32 or int64 [documents + 1].
            max_seqlen: the longest document, where the caller knows it.
            k_lens: int32 or int64 [B]: tokens of each sequence of a batch padded at the right. No token sees padding;
                what comes out at padding has no meaning, and padding must be finite.
            rotation: (cos, sin) as `rope_tables` makes, in place of the module's `rotary`.
            positions: of each token, [T] or as x without C; default from 0 in each sequence or document.
        """
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if positions is None and cu_seqlens is not None and (rotation is not None or self.rotary is not None):
            positions = _positions(x.shape[0], cu_seqlens)
        if rotation is not None:
            interleaved = self.rotary is not None and self.rotary.interleaved
            q, k = rope(q, k, *rotation, positions=positions, interleaved=interleaved)
        elif self.rotary is not None:
            q, k = self.rotary(q, k, positions)
        lens, bias = self._padding(x, k_lens)
        out = attention(
            q, k, v, causal=self.causal, scale=self.scale, window=self.window, softcap=self.softcap, sinks=self.sinks,
            bias=bias, dropout_p=self.dropout if self.training else 0.0, cu_seqlens_q=cu_seqlens,
            max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, k_lens=lens, impl=self.impl,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return self.o_proj(out.flatten(-2))

    def _padding(self, x: Tensor, k_lens: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(k_lens, bias) for `attention`, which would align a window at the end of k_lens, not at the token itself."""
        if k_lens is None:
            return None, None
        if x.dim() != 3 or k_lens.shape != x.shape[:1]:
            raise ValueError(
                f"Attention: k_lens must be [B] of x [B, T, C]; got {tuple(k_lens.shape)} and {tuple(x.shape)}"
            )
        if self.causal:  # padding comes after every token
            return None, None
        if all(side in (None, -1) for side in self.window):
            return k_lens, None
        return None, (torch.arange(x.shape[1], device=x.device) < k_lens.unsqueeze(-1))[:, None, None]

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, causal={self.causal}, scale={self.scale}, window={self.window}, "
            f"softcap={self.softcap}, dropout={self.dropout}, attention={self.impl}"
        )


def _positions(total: int, cu: Tensor) -> Tensor:
    """Each packed row's place in its document."""
    row = torch.arange(total, device=cu.device, dtype=cu.dtype)
    document = (torch.searchsorted(cu, row, right=True) - 1).clamp(0, len(cu) - 2)
    return (row - cu[document]).where(row < cu[-1], 0)  # rows of no document must stay inside the tables
