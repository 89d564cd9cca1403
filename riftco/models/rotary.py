"""The rotation of q and k: which frequencies, from whatever file, and their cos and sin at given positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functional import rope_frequencies
from .errors import ModelError

KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class Rope:
    """All `dim` dimensions of a head rotate, with base `theta`; `scaling` as in transformers' rope_parameters.

    "dynamic" differs from "default" only past the model's context, which riftco refuses; "longrope" is accepted where
    its long and short factors are equal: divisors of the frequencies, as a GGUF file carries them.
    """

    dim: int
    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ModelError(f"config: rope_type {self.kind!r} is not supported; accepted: {', '.join(KINDS)}")
        if not isinstance(self.theta, (int, float)) or self.theta <= 0:
            raise ModelError(f"config: rope_theta must be a positive number; got {self.theta!r}")
        lacking = [n for n in _NEEDS.get(self.kind, ()) if self.scaling.get(n) is None]
        if lacking:
            raise ModelError(f"config: rope_type {self.kind!r} needs {', '.join(lacking)}")
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            value = self.scaling.get(name)
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ModelError(f"config: rope {name} must be a positive number; got {value!r}")
        if self.kind == "longrope":
            short, long = list(self.scaling["short_factor"]), list(self.scaling["long_factor"])
            if short != long or len(short) != self.dim // 2:
                raise ModelError(
                    f"config: rope_type 'longrope' is supported only with equal short and long factors, "
                    f"{self.dim // 2} of each"
                )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int, default_theta: float) -> Rope:
        """transformers 5 writes `rope_parameters`; 4 writes `rope_theta` and `rope_scaling`."""
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"config: rope parameters must be a JSON object; got {given!r}")
        params = dict(given)
        if any(isinstance(v, Mapping) for v in params.values()):
            raise ModelError(
                "config: rope parameters per layer type are not supported; accepted: one set for all layers"
            )
        kind = params.pop("rope_type", None) or params.pop("type", None) or "default"
        params.pop("type", None)
        theta = params.pop("rope_theta", None) or config.get("rope_theta") or default_theta
        part = params.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if kind in ("llama3", "yarn", "longrope"):
            longest = config.get("max_position_embeddings")
            params.setdefault("original_max_position_embeddings", longest)
            if kind == "yarn" and params.get("factor") is None and longest:
                params["factor"] = longest / params["original_max_position_embeddings"]
        if part != 1:
            raise ModelError(f"config: partial_rotary_factor {part!r} is not supported; accepted: 1")
        return cls(head_dim, float(theta), kind, params)

    @classmethod
    def from_gguf(cls, get: Callable[..., Any], head_dim: int, divisors: Tensor | None, longest: int) -> Rope:
        dim, theta = get("rope.dimension_count", head_dim), get("rope.freq_base", 1e4)
        if dim != head_dim:
            raise ModelError(
                f"config: rope.dimension_count {dim} is not supported; accepted: the head size, {head_dim}"
            )
        kind = get("rope.scaling.type", "none")
        if kind not in ("none", "linear", "yarn"):
            raise ModelError(f"config: rope.scaling.type {kind!r} is not supported; accepted: none, linear, yarn")
        if divisors is not None:
            if kind != "none":
                raise ModelError(f"config: rope_freqs.weight together with rope.scaling.type {kind!r} is not supported")
            factors = [float(f) for f in divisors]
            scaling = {
                "short_factor": factors,
                "long_factor": factors,
                "factor": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": longest,
            }
            return cls(dim, float(theta), "longrope", scaling)
        if kind == "none":
            return cls(dim, float(theta))
        scaling = {"factor": float(get("rope.scaling.factor"))}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length", longest)
        return cls(dim, float(theta), kind, scaling)

    def to_hf(self) -> dict[str, Any]:
        params = {"rope_type": self.kind, **self.scaling}
        return {
            "rope_parameters": {**params, "rope_theta": self.theta},
            "rope_theta": self.theta,
            "rope_scaling": None if self.kind == "default" else params,
        }

    def frequencies(self) -> tuple[Tensor, float]:
        """(radians per position [dim / 2] in float32, the factor on cos and sin)."""
        if self.kind == "longrope":
            plain, _ = rope_frequencies(self.dim, 1, theta=self.theta, device="cpu")
            return plain / torch.tensor(self.scaling["short_factor"], device="cpu"), self._longrope_factor()
        if self.kind == "dynamic":
            return rope_frequencies(self.dim, 1, theta=self.theta, device="cpu")
        return rope_frequencies(
            self.dim, 1, theta=self.theta, scaling={**self.scaling, "rope_type": self.kind}, device="cpu"
        )

    def _longrope_factor(self) -> float:
        given, factor = self.scaling.get("attention_factor"), self.scaling.get("factor") or 1.0
        if given is not None:
            return float(given)
        original = self.scaling["original_max_position_embeddings"]
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


class Rotation(NamedTuple):
    """Arguments of functional.rope: cos and sin [rows, dim / 2] in float32, and each token's row (None: in order)."""

    cos: Tensor
    sin: Tensor
    rows: Tensor | None


class Rotary:
    """The rotation of tokens at integer positions, [T] or [B, T]. No module: casting a model must not round it.

    Made for the positions at hand, once a forward: tables of a long context would outweigh what they save.
    """

    def __init__(self, rope: Rope):
        self.frequencies, self.factor = rope.frequencies()
        self._on: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor) -> Rotation:
        freqs = self._on.get(positions.device)
        if freqs is None:
            freqs = self._on[positions.device] = self.frequencies.to(positions.device)
        angles = positions.reshape(-1, 1).float() * freqs
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        rows = None
        if positions.dim() > 1:
            rows = torch.arange(positions.numel(), device=positions.device).view(positions.shape)
        return Rotation(cos, sin, rows)
