"""Self-attention with its four projections."""

from torch import Tensor, nn

from .op import attention


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
    ):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(f"Attention: hidden_size {hidden_size} is no multiple of {num_heads} heads; give head_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"Attention: num_heads {num_heads} is no multiple of num_kv_heads {num_kv_heads}")
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.causal, self.scale = causal, scale
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = attention(q, k, v, causal=self.causal, scale=self.scale, cu_seqlens_q=cu_seqlens)
        assert isinstance(out, Tensor)
        return self.o_proj(out.flatten(-2))

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, causal={self.causal}, scale={self.scale}"
