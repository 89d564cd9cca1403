"""The tables of rotary position embedding, with the scalings of long-context checkpoints. Torch-only."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._arguments import number, whole

TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
SCALARS = (
    "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "partial_rotary_factor", "rope_theta",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip


def rope_tables(
    head_dim: int,
    max_position: int,
    *,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles: cos(p * theta^(-2 i / R)), scaled as `scaling` says.

    Args:
        head_dim: D. R = int(D * partial_rotary_factor), the whole of D unless `scaling` says otherwise.
        max_position: rows of the tables. It also stands for the model's max_position_embeddings where `scaling` lacks
            original_max_position_embeddings or factor, and for the sequence length that dynamic and longrope adapt to.
        theta: the base; a rope_theta in `scaling` takes precedence.
        scaling: a checkpoint's rope_scaling or rope_parameters: rope_type (or type) "default", "linear", "dynamic",
            "yarn", "longrope", "llama3" or "proportional" with the keys that transformers reads.
        device: where the tables are made.

    Returns:
        cos, sin: float32 [max_position, R / 2]. The attention factor of YaRN and LongRoPE is multiplied into both.

    Raises:
        ValueError: an unknown rope_type, a missing key, or an odd R, each named.

    Devices: any that PyTorch has; plain torch.
    Numerics: float32, as transformers makes them.
    Source: Su et al. 2021 (RoFormer); Peng et al. 2023 (YaRN), sections 3.2 to 3.4; Ding et al. 2024 (LongRoPE);
        Llama 3.1's published scaling.
    """
    inv_freq, factor = rope_frequencies(head_dim, max_position, theta=theta, scaling=scaling, device=device)
    angles = torch.arange(max_position, dtype=torch.float32, device=device).unsqueeze(-1) * inv_freq
    return angles.cos() * factor, angles.sin() * factor


def rope_frequencies(
    head_dim: int,
    max_position: int,
    *,
    theta: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, float]:
    """What `rope_tables` makes its tables of, with its arguments and errors.

    Returns:
        (inv_freq, factor): float32 [R / 2] in radians a position, and what cos and sin are multiplied by.
    """
    whole("rope_tables", "head_dim", head_dim, "at least 2", least=2)
    whole("rope_tables", "max_position", max_position, "at least 0", least=0)
    number("rope_tables", "theta", theta, "positive and finite", above=0)
    s = dict(scaling or {})
    for key in SCALARS:
        if s.get(key) is not None:
            number("rope_tables", key, s[key], "finite and not negative", least=0)
    kind = s.get("rope_type") or s.get("type") or "default"
    if kind not in TYPES:
        raise ValueError(f"rope_tables: rope_type {kind!r} is not supported; supported: {', '.join(TYPES)}")
    missing = [k for k in _REQUIRED[kind] if s.get(k) is None]
    if missing:
        raise ValueError(f"rope_tables: rope_type {kind!r} needs {', '.join(missing)}")
    base = float(s.get("rope_theta") or theta)
    part = s.get("partial_rotary_factor") or 1.0
    R = head_dim if kind == "proportional" else int(head_dim * part)
    if R < 2 or R % 2:
        raise ValueError(f"rope_tables: the rotary dim must be even and positive; got {R} of head dim {head_dim}")
    original = s.get("original_max_position_embeddings") or max_position
    if kind == "dynamic":
        length = max(max_position, original)
        base *= (s["factor"] * length / original - (s["factor"] - 1)) ** (R / (R - 2))
    inv_freq = 1.0 / (base ** (torch.arange(0, R, 2, dtype=torch.float32, device=device) / R))
    if kind == "linear":
        return inv_freq / s["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, original, s), 1.0
    if kind == "proportional":  # frequencies of the whole head, of which the slowest stand still
        turning = torch.arange(R // 2, device=device) < int(part * head_dim // 2)
        return inv_freq * turning / (s.get("factor") or 1.0), 1.0
    if kind == "longrope":
        return _longrope(inv_freq, original, max_position, s)
    if kind == "yarn":
        return _yarn(inv_freq, original, base, s.get("factor") or max_position / original, s)
    return inv_freq, 1.0


_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "proportional": (),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _llama3(inv_freq: Tensor, original: int, s: Mapping[str, Any]) -> Tensor:
    """Short wavelengths as they are, long ones divided by the factor, those between blended."""
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    turns = original * inv_freq / (2 * math.pi)  # full turns over the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / s["factor"] + blend * inv_freq


def _longrope(inv_freq: Tensor, original: int, max_position: int, s: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Each frequency divided by its own factor, one list up to the original context and another beyond it."""
    name = "long_factor" if max_position > original else "short_factor"
    divisors = torch.tensor(s[name], dtype=torch.float32, device=inv_freq.device)
    if divisors.shape != inv_freq.shape:
        raise ValueError(f"rope_tables: {name} must hold {len(inv_freq)} numbers; got {divisors.numel()}")
    factor, scale = s.get("factor") or max_position / original, s.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inv_freq / divisors, float(scale)


def _yarn(inv_freq: Tensor, original: int, base: float, factor: float, s: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Dimensions that turn often are kept, those that turn seldom are divided by the factor, a ramp between."""
    R = 2 * inv_freq.numel()

    def dimension(turns: float) -> float:
        return R * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(s.get("beta_fast") or 32), dimension(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    index = torch.arange(R // 2, dtype=torch.float32, device=inv_freq.device)
    kept = 1 - ((index - low) / (high - low)).clamp(0, 1)
    scale = s.get("attention_factor")
    if scale is None:
        m, m_all = s.get("mscale"), s.get("mscale_all_dim")
        scale = _magnitude(factor, m) / _magnitude(factor, m_all) if m and m_all else _magnitude(factor, 1.0)
    return inv_freq / factor * (1 - kept) + inv_freq * kept, float(scale)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
