"""What an adapter is: PEFT's settings of a LoRA, under PEFT's rules of matching names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import nn

BIASES = ("none", "all", "lora_only")


class AdapterError(ValueError):
    """An adapter that cannot be built, read or applied; the message says what to do."""


@dataclass(frozen=True)
class LoraSpec:
    """A LoRA adapter's configuration, as in peft.LoraConfig.

    Attributes:
        rank: R, 1 to 256.
        alpha: the delta is scaled by alpha / rank, or alpha / sqrt(rank) with `use_rslora`.
        target_modules: "all-linear" (every linear layer but the head), a regular expression that must match a
            module's whole name, or a tuple of name endings ("q_proj", "layers.0.mlp.up_proj", "embed_tokens").
        dropout: probability of dropping an input element of the adapter while training; nothing to embeddings.
        use_dora: the length of each output feature is learnt apart from its direction (DoRA).
        rank_pattern, alpha_pattern: exceptions by name ending or regular expression.
        exclude_modules: a regular expression or name endings that are never adapted.
        layers_to_transform, layers_pattern: adapt these layers only (with target_modules as name endings); the name of
            the list of layers, where it is not the first numbered one.
        modules_to_save: name endings of modules that are trained whole and saved beside the adapter.
        trainable_token_indices: rows of the input embedding that are trained, or a mapping from an embedding's name
            ending to its rows.
        bias: which biases are trained and saved: "none", "all", or "lora_only", those of adapted layers.
        ensure_weight_tying: where embedding and head share a weight and one of them is adapted or saved, they share
            what is trained, too. Without it, as in PEFT, each goes its own way (trained rows are always shared).
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: str | tuple[str, ...] = "all-linear"
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    exclude_modules: str | tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] = ()
    bias: str = "none"
    ensure_weight_tying: bool = False

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
        if self.bias not in BIASES:
            raise AdapterError(f"bias must be one of {', '.join(BIASES)}; got {self.bias!r}")
        if not self.target_modules:
            raise AdapterError("target_modules is empty; name the layers to adapt, or 'all-linear'")
        for what in ("target_modules", "exclude_modules"):
            value = getattr(self, what)
            if not isinstance(value, str) and not _names(value):
                raise AdapterError(f"{what} must be a text or a tuple of names; got {value!r}")
        for what in ("modules_to_save", "layers_pattern"):
            if not _names(getattr(self, what)):
                raise AdapterError(f"{what} must be a tuple of names; got {getattr(self, what)!r}")
        self._check_indices()
        named = [t for t in (self.target_modules, self.exclude_modules) if isinstance(t, str)]
        for expression in (*named, *self.rank_pattern, *self.alpha_pattern, *self.layers_pattern):
            try:
                re.compile(expression)
            except re.error as bad:
                raise AdapterError(f"{expression!r} is no regular expression: {bad}") from None

    def _check_indices(self) -> None:
        if not _whole(self.layers_to_transform):
            raise AdapterError(
                f"layers_to_transform must be a tuple of whole numbers; got {self.layers_to_transform!r}"
            )
        if self.layers_to_transform and isinstance(self.target_modules, str):
            raise AdapterError("layers_to_transform goes with target_modules as names, not with a text")
        if self.layers_pattern and not self.layers_to_transform:
            raise AdapterError("layers_pattern goes with layers_to_transform, which is empty")
        tokens = self.trainable_token_indices
        lists = tokens.values() if isinstance(tokens, Mapping) else [tokens]
        if not all(_whole(ids) for ids in lists):
            raise AdapterError(f"trainable_token_indices must be token ids, or map names to them; got {tokens!r}")

    def targets(self, name: str) -> bool:
        """Whether the linear or embedding layer `name` carries this adapter (the head, with "all-linear": never)."""
        if self.excludes(name):
            return False
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, name) is not None
        if name in self.target_modules:
            return True
        return _ends(name, self.target_modules) and (not self.layers_to_transform or self._in_a_layer(name))

    def excludes(self, name: str) -> bool:
        """Left out by exclude_modules, or inside of a module that is saved whole."""
        if isinstance(self.exclude_modules, str):
            if self.exclude_modules and re.fullmatch(self.exclude_modules, name):
                return True
        elif _ends(name, self.exclude_modules):
            return True
        return any(re.match(rf"(^|.*\.){m}($|\..*)", name) for m in self.modules_to_save)

    def _in_a_layer(self, name: str) -> bool:
        found = None
        for pattern in self.layers_pattern or (None,):
            found = re.match(r".*?\.[^.]*\.(\d+)\." if pattern is None else rf"(?:^|.*?\.){pattern}\.(\d+)\.", name)
            if found:
                break
        return found is not None and int(found[1]) in self.layers_to_transform

    def rank_of(self, name: str) -> int:
        """The rank of the layer of this name."""
        return _exception(self.rank_pattern, name, self.rank)

    def alpha_of(self, name: str) -> float:
        """The alpha of the layer of this name."""
        return _exception(self.alpha_pattern, name, self.alpha)


def _names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, str) for v in value)


def _whole(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)


def _ends(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == e or name.endswith(f".{e}") for e in endings)


def _exception(pattern: Mapping, name: str, default):
    for key, value in pattern.items():
        if re.fullmatch(rf"(.*\.)?({key})", name):
            return value
    return default
