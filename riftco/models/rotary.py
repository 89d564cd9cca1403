"""The rotation of q and k: which frequencies, from whatever file, and their cos and sin at given positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """The first `dim` dimensions of a head rotate, with base `theta`; `scaling` as in transformers' rope_parameters.

    "dynamic" differs from "default" only past the model's context, which riftco refuses. "longrope" has one list of
    divisors for sequences up to `original_max_position_embeddings` and another for longer ones; equal lists are
    divisors of the frequencies, as a GGUF file carries Llama 3's.
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
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            value = self.scaling.get(name)
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ModelError(f"config: rope {name} must be a positive number; got {value!r}")
        for name in ("short_factor", "long_factor") if self.kind == "longrope" else ():
            given = self.scaling[name]
            if not isinstance(given, (list, tuple)) or len(given) != self.dim // 2:
                raise ModelError(f"config: rope {name} must hold {self.dim // 2} numbers; got {given!r}")

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], head_dim: int, default_theta: float, given: Any = None, partial: bool = False
    ) -> Rope:
        """transformers 5 writes `rope_parameters`; 4 writes `rope_theta` and `rope_scaling`.

        Args:
            config: the mapping of config.json.
            head_dim: D.
            default_theta: the base where the config names none.
            given: the parameters, where they are not in their usual places.
            partial: whether the architecture may rotate a part of the head only.
        """
        given = given if given is not None else config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            raise ModelError(f"config: rope parameters must be a JSON object; got {given!r}")
        params = dict(given)
        if any(isinstance(v, Mapping) for v in params.values()):
            raise ModelError(
                "config: rope parameters per layer type are not supported here; accepted: one set for all layers"
            )
        kind = params.pop("rope_type", None) or params.pop("type", None) or "default"
        params.pop("type", None)
        theta = params.pop("rope_theta", None) or config.get("rope_theta") or default_theta
        part = params.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
        if kind == "su" or (kind == "yarn" and "short_factor" in params):
            kind = "longrope"  # what Phi-3's first checkpoints called it
        if kind in ("llama3", "yarn", "longrope"):
            longest = config.get("max_position_embeddings")
            original = config.get("original_max_position_embeddings")
            if original is not None:
                params["original_max_position_embeddings"] = original
            params.setdefault("original_max_position_embeddings", longest)
            if kind != "llama3" and params.get("factor") is None and longest:
                params["factor"] = longest / params["original_max_position_embeddings"]
        if part != 1 and not partial:
            raise ModelError(f"config: partial_rotary_factor {part!r} is not supported; accepted: 1")
        return cls(int(head_dim * part), float(theta), kind, params)

    def to_hf(self) -> dict[str, Any]:
        """The parameters as transformers 5 has them in `rope_parameters`."""
        return {"rope_type": self.kind, **self.scaling, "rope_theta": self.theta}

    def frequencies(self, long: bool = False) -> tuple[Tensor, float]:
        """(radians per position [dim / 2] in float32, the factor on cos and sin); `long`: of LongRoPE's long list."""
        kind = "default" if self.kind == "dynamic" else self.kind
        # to choose LongRoPE's list is all that a number of positions does here
        reach = int(self.scaling["original_max_position_embeddings"]) + long if kind == "longrope" else 1
        scaling = {**self.scaling, "rope_type": kind}
        return rope_frequencies(self.dim, reach, theta=self.theta, scaling=scaling, device="cpu")

    @property
    def switches_at(self) -> int | None:
        """The longest sequence that takes LongRoPE's short list, where the two differ."""
        if self.kind != "longrope" or list(self.scaling["short_factor"]) == list(self.scaling["long_factor"]):
            return None
        return int(self.scaling["original_max_position_embeddings"])


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
        self.switches_at = rope.switches_at
        self.long = self.frequencies if self.switches_at is None else rope.frequencies(long=True)[0]
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, positions: Tensor, reach: int | Tensor | None = None) -> Rotation:
        """
        Args:
            positions: integers, [T] or [B, T].
            reach: how long each token's sequence gets, a number or broadcastable to positions: what LongRoPE chooses
                its frequencies by. Default: to the last position of each row.
        """
        freqs = self._of(positions, reach)
        angles = positions.unsqueeze(-1).float() * freqs
        cos, sin = angles.flatten(0, -2).cos(), angles.flatten(0, -2).sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        rows = None
        if positions.dim() > 1:
            rows = torch.arange(positions.numel(), device=positions.device).view(positions.shape)
        return Rotation(cos, sin, rows)

    def _of(self, positions: Tensor, reach: int | Tensor | None) -> Tensor:
        """Frequencies [dim / 2], or [.., T, dim / 2] where tokens differ."""
        if positions.device not in self._on:
            self._on[positions.device] = self.frequencies.to(positions.device), self.long.to(positions.device)
        short, long = self._on[positions.device]
        if self.switches_at is None or positions.numel() == 0:
            return short
        if isinstance(reach, int):
            return long if reach > self.switches_at else short
        if reach is None:
            reach = positions.amax(-1, keepdim=True) + 1
        return torch.where((reach > self.switches_at).unsqueeze(-1), long, short)  # on the device: nobody waits
