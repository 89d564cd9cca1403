"""The forwards that riftco.patch gives to norms, MLPs, rotary embeddings and attention of transformers' models."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ...functional import geglu, recomputed, rms_norm, rope, swiglu

# names of transformers' ACT2FN that are one of riftco's gated units
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}


def norm_forward(base: type[nn.Module], offset: float) -> Callable:
    def forward(self, hidden_states: Tensor) -> Tensor:
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return rms_norm(hidden_states, self.weight, eps, offset=offset)

    return forward


def activation(mlp: nn.Module) -> nn.Module | None:
    return getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)


def activation_of(mlp: nn.Module) -> str | None:
    """The gated unit that an MLP of transformers computes; None if riftco has none for it."""
    found = activation(mlp)
    return next((ours for name, ours in ACTIVATIONS.items() if type(found) is type(ACT2FN[name])), None)


def mlp_forward(base: type[nn.Module], unit: str) -> Callable:
    def forward(self, hidden_states: Tensor) -> Tensor:
        if hasattr(self, "gate_up_proj"):
            gate, up = self.gate_up_proj(hidden_states), None
        else:
            gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
        if unit == "silu":
            h = swiglu(gate, up)
        else:
            h = geglu(gate, up, approximate="tanh" if unit == "gelu_tanh" else "none")
        with recomputed(h):
            return self.down_proj(h)

    return forward


def rotary_forward(base: type[nn.Module]) -> Callable:
    original = base.forward

    def forward(self, x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Tables for riftco's rope: float32 whatever x is, and one half of transformers', whose halves are equal."""
        tables = original(self, x.new_empty(0, dtype=torch.float32), *args, **kwargs)
        cos, sin = (t[..., : t.shape[-1] // 2].contiguous() for t in tables)
        return cos, sin

    return forward


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb over the tables of `rotary_forward`.

    q [B, H, T, D], k [B, K, T, D], cos and sin [B or 1, T, R / 2].
    """
    B, _, T, _ = q.shape
    positions = None if cos.shape[0] == 1 else torch.arange(B * T, device=q.device).view(B, T)
    cos, sin = (t.flatten(0, 1) for t in (cos, sin))
    q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, positions=positions)
    return q.transpose(1, 2), k.transpose(1, 2)


def attention_forward(base: type[nn.Module]) -> Callable:
    """The class's own forward, in whose view of its module apply_rotary_pos_emb is riftco's: its other names, and
    everybody else's view, stay as they are."""
    inner = inspect.unwrap(base.forward)
    made = types.FunctionType(
        inner.__code__, {**inner.__globals__, ROTATION: turned}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    made.__kwdefaults__ = inner.__kwdefaults__
    return made


ROTATION = "apply_rotary_pos_emb"


def rotates(base: type[nn.Module]) -> bool:
    """Whether `attention_forward` and `rotary_forward` of the class meet in a call of apply_rotary_pos_emb."""
    return ROTATION in inspect.unwrap(base.forward).__code__.co_names
