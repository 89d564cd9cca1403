"""The gated feed-forward block of the Llama family."""

from torch import Tensor, nn

from .._recompute import recomputed
from .op import geglu, swiglu


class SwiGLU(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), with the parameter names of transformers' Llama MLP. Kept for the
    backward are gate and up; what down_proj reads is made again.

    Args:
        hidden_size: size of x's last dimension.
        intermediate_size: size between the projections.
        bias: whether the three projections carry one.
        activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU; Gemma's is the latter).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        *,
        activation: str = "silu",
        device=None,
        dtype=None,
    ):
        super().__init__()
        if activation not in ("silu", "gelu", "gelu_tanh"):
            raise ValueError(f"SwiGLU: activation must be 'silu', 'gelu' or 'gelu_tanh'; got {activation!r}")
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.activation == "silu":
            h = swiglu(gate, up)
        else:
            h = geglu(gate, up, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        with recomputed(h):
            return self.down_proj(h)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"
