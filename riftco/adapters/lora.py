"""Which layers an adapter touches, and putting it there. Names and matching rules are PEFT's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .. import nn

Linear = torch.nn.Linear | nn.NF4Linear | nn.GGUFLinear
HEAD = "lm_head"  # what "all-linear" leaves out, as PEFT does


class AdapterError(ValueError):
    """An adapter that cannot be built, read or applied; the message says what to do."""


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA adapter's configuration.

    Attributes:
        rank: R, 1 to 256.
        alpha: the delta is scaled by alpha / rank, or alpha / sqrt(rank) with `use_rslora`.
        target_modules: "all-linear" (every linear layer but the head), a regular expression that must match a
            module's whole name, or a tuple of name endings ("q_proj", "layers.0.mlp.up_proj").
        dropout: probability of dropping an input element of the adapter while training.
        use_dora: each output feature's length is learnt apart from its direction (DoRA).
        rank_pattern, alpha_pattern: exceptions by name ending or regular expression.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, pattern in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            if not isinstance(pattern, Mapping):
                raise AdapterError(f"{what} must map layer names to numbers; got {pattern!r}")
        for what, rank in [("rank", self.rank), *((f"rank_pattern[{k!r}]", r) for k, r in self.rank_pattern.items())]:
            if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= nn.LoRALinear.max_rank:
                raise AdapterError(
                    f"{what} must be a whole number between 1 and {nn.LoRALinear.max_rank}; got {rank!r}"
                )
        for alpha in (self.alpha, *self.alpha_pattern.values()):
            if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
                raise AdapterError(f"alpha must be a finite number; got {alpha!r}")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise AdapterError(f"dropout must be in [0, 1); got {self.dropout!r}")
        if not self.target_modules:
            raise AdapterError("target_modules is empty; name the layers to adapt, or 'all-linear'")
        if not isinstance(self.target_modules, (str, tuple)):
            raise AdapterError(f"target_modules must be a text or a tuple of names; got {self.target_modules!r}")
        named = [self.target_modules] if isinstance(self.target_modules, str) else []
        for expression in (*named, *self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(expression)
            except re.error as bad:
                raise AdapterError(f"{expression!r} is no regular expression: {bad}") from None

    def targets(self, name: str) -> bool:
        """Whether the linear layer `name` carries this adapter."""
        if self.target_modules == "all-linear":
            return name != HEAD and not name.endswith(f".{HEAD}")
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, name) is not None
        return any(name == t or name.endswith(f".{t}") for t in self.target_modules)

    def rank_of(self, name: str) -> int:
        return _exception(self.rank_pattern, name, self.rank)

    def alpha_of(self, name: str) -> float:
        return _exception(self.alpha_pattern, name, self.alpha)


def _exception(pattern: Mapping, name: str, default):
    for key, value in pattern.items():
        if re.fullmatch(rf"(.*\.)?({key})", name):
            return value
    return default


def adapted(model: torch.nn.Module) -> dict[str, nn.LoRALinear]:
    """Name -> layer of everything that carries an adapter."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.LoRALinear)}


def layers_to_adapt(
    model: torch.nn.Module, spec: LoraSpec
) -> dict[str, torch.nn.Linear | nn.NF4Linear | nn.GGUFLinear]:
    """Name -> linear layer of `model` that `spec` names; refuses an adapted model, and a spec that names nothing."""
    if adapted(model):
        raise AdapterError("the model already carries an adapter; load the base model again")
    linear = {n: m for n, m in model.named_modules() if isinstance(m, (torch.nn.Linear, nn.NF4Linear, nn.GGUFLinear))}
    targets = {n: m for n, m in linear.items() if spec.targets(n)}
    if not targets:
        endings = sorted({n.rpartition(".")[2] for n in linear})
        raise AdapterError(
            f"no linear layer matches target_modules={spec.target_modules!r}; the model has: {', '.join(endings)}"
        )
    return targets


def apply_lora(model: torch.nn.Module, spec: LoraSpec, *, seed: int | None = None) -> list[str]:
    """Freeze `model` and put a fresh adapter (B = 0: the outputs stay as they are) on the layers that `spec` names.

    Args:
        model: any module whose linear layers are torch.nn.Linear or riftco.nn's NF4Linear, GGUFLinear; changed.
        spec: what to adapt and how.
        seed: of the adapter's initial values; None draws from the global generator.

    Returns:
        The names of the adapted layers.

    Raises:
        AdapterError: the model carries an adapter already, or no layer matches.
    """
    targets = layers_to_adapt(model, spec)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        for name, linear in targets.items():
            options: dict = dict(dropout=spec.dropout, use_rslora=spec.use_rslora, use_dora=spec.use_dora)
            layer = nn.LoRALinear(linear, spec.rank_of(name), spec.alpha_of(name), **options)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, layer)
    return list(targets)
