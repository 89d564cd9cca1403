"""The rotation of q and k: which frequencies, from whatever file, and their cos and sin at given positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
        params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if any(isinstance(v, Mapping) for v in params.values()):
            raise ModelError(
                "config: rope parameters per layer type are not supported; accepted: one set for all layers"
            )
        kind = params.pop("rope_type", None) or params.pop("type", None) or "default"
        params.pop("type", None)
        theta = params.pop("rope_theta", None) or config.get("rope_theta") or default_theta
        part = params.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if kind in ("llama3", "yarn", "longrope"):
            params.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
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
        # float32 from the first step, as the models were trained: at position 8,000 the last bit of a frequency shows
        base = 1.0 / (self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim))
        if self.kind == "linear":
            return base / self.scaling["factor"], 1.0
        if self.kind == "llama3":
            return _llama3(base, self.scaling), 1.0
        if self.kind == "yarn":
            return _yarn(base, self.theta, self.dim, self.scaling)
        if self.kind == "longrope":
            return base / torch.tensor(self.scaling["short_factor"], device="cpu"), self._longrope_attention_factor()
        return base, 1.0

    def _longrope_attention_factor(self) -> float:
        given, factor = self.scaling.get("attention_factor"), self.scaling.get("factor") or 1.0
        if given is not None:
            return float(given)
        original = self.scaling["original_max_position_embeddings"]
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _llama3(base: Tensor, s: Mapping[str, Any]) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1)."""
    turns = s["original_max_position_embeddings"] * base / (2 * math.pi)  # over the original context
    keep = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
    return (1 - keep) * base / s["factor"] + keep * base


def _yarn(base: Tensor, theta: float, dim: int, s: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Peng et al. 2023, "YaRN", equations 20 to 25 (NTK-by-parts) and the temperature of section 3.4."""
    original, factor = s["original_max_position_embeddings"], s["factor"]

    def dim_of(turns: float) -> float:  # the dimension that makes `turns` rotations over the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(s.get("beta_fast") or 32), dim_of(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    attention_factor = s.get("attention_factor")
    if attention_factor is None:
        mscale, every = s.get("mscale"), s.get("mscale_all_dim")
        temperature = [0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0 for m in (mscale or 1, every or 1)]
        attention_factor = temperature[0] / temperature[1] if mscale and every else 0.1 * math.log(max(factor, 1)) + 1
    return base / factor * ramp + base * (1 - ramp), float(attention_factor)


class Rotary:
    """cos and sin [..., dim / 2] of integer positions, in float32. No module: casting a model must not round them."""

    def __init__(self, rope: Rope):
        self.frequencies, self.factor = rope.frequencies()
        self._on: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        freqs = self._on.get(positions.device)
        if freqs is None:
            freqs = self._on[positions.device] = self.frequencies.to(positions.device)
        angles = positions.unsqueeze(-1).float() * freqs
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)
