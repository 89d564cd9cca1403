"""adapter_config.json: what riftco writes, and what of PEFT's settings it reads or refuses by name."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .spec import BIASES, AdapterError, LoraSpec

CONFIG = "adapter_config.json"
_NOTHING: tuple = (None, False, [], {}, "")
# Initialisations that leave the base's weights as they are: once an adapter is trained, they mean nothing.
_INITIALISED = (True, False, "gaussian", "eva", "orthogonal")
_READ = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern",
    "alpha_pattern", "use_rslora", "use_dora", "modules_to_save", "trainable_token_indices", "bias",
    "layers_to_transform", "layers_pattern", "ensure_weight_tying", "init_lora_weights",
}  # fmt: skip
# What does not change the arithmetic of a trained adapter over linear and embedding layers.
_INDIFFERENT = {
    "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
    "megatron_core", "qalora_group_size", "eva_config", "runtime_config",
}  # fmt: skip

MERGED = "merge the adapter in PEFT (merge_and_unload) and use the merged model"


def peft_config(spec: LoraSpec, base: str) -> dict[str, Any]:
    """adapter_config.json as PEFT reads it."""
    tokens = spec.trainable_token_indices
    indices = {k: list(v) for k, v in tokens.items()} if isinstance(tokens, Mapping) else list(tokens)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": _text_or_list(spec.target_modules),
        "exclude_modules": _text_or_list(spec.exclude_modules) or None,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": dict(spec.alpha_pattern),
        "use_rslora": spec.use_rslora,
        "use_dora": spec.use_dora,
        "bias": spec.bias,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "layers_to_transform": list(spec.layers_to_transform) or None,
        "layers_pattern": list(spec.layers_pattern) or None,
        "modules_to_save": list(spec.modules_to_save) or None,
        "trainable_token_indices": indices or None,
        "ensure_weight_tying": spec.ensure_weight_tying,
    }


def _text_or_list(value: str | tuple[str, ...]) -> str | list[str]:
    return value if isinstance(value, str) else list(value)


def read_spec(folder: str | os.PathLike) -> LoraSpec:
    """The LoraSpec of a PEFT folder.

    Raises:
        AdapterError: no adapter_config.json, one that is no JSON, or a setting that riftco cannot honour, by name.
    """
    file = pathlib.Path(folder) / CONFIG
    if not file.is_file():
        inside = pathlib.Path(folder) / "adapter"  # of a run of riftco finetune
        hint = f"; did you mean {inside}?" if (inside / CONFIG).is_file() else ""
        raise AdapterError(f"{folder} is no adapter folder: it has no {CONFIG}{hint}")
    try:
        config = json.loads(file.read_text())
    except ValueError as bad:
        raise AdapterError(f"{file} is not valid JSON: {bad}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{file} must hold a JSON object; got {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{file}: peft_type {config.get('peft_type')!r} is not supported; accepted: LORA")
    for key, value in config.items():
        if key not in _READ and key not in _INDIFFERENT and value not in _NOTHING:
            raise AdapterError(f"{file}: {key}={value!r} is not supported; {MERGED}")
    start = config.get("init_lora_weights", True)
    if start is not None and start not in _INITIALISED:
        raise AdapterError(
            f"{file}: init_lora_weights={start!r} changes the base's weights; let PEFT's save_pretrained make a plain "
            f"LoRA of it (path_initial_model_for_weight_conversion), or {MERGED}"
        )
    _one_of(file, config, "bias", BIASES, "none")
    if missing := [k for k in ("r", "lora_alpha", "target_modules") if config.get(k) is None]:
        raise AdapterError(f"{file} lacks {', '.join(missing)}")
    layers, tokens = config.get("layers_to_transform"), config.get("trainable_token_indices")
    return LoraSpec(
        rank=config["r"],
        alpha=config["lora_alpha"],
        target_modules=_tuple(config["target_modules"]),
        dropout=config.get("lora_dropout") or 0.0,
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
        exclude_modules=_tuple(config.get("exclude_modules") or ()),
        layers_to_transform=(layers,) if isinstance(layers, int) else _tuple(layers or ()),
        layers_pattern=_several(config.get("layers_pattern")),
        modules_to_save=_several(config.get("modules_to_save")),
        trainable_token_indices=(
            {k: _tuple(v) for k, v in tokens.items()} if isinstance(tokens, dict) else _tuple(tokens or ())
        ),
        bias=config.get("bias") or "none",
        ensure_weight_tying=bool(config.get("ensure_weight_tying")),
    )


def _one_of(file: pathlib.Path, config: Mapping[str, Any], key: str, accepted: tuple, default: Any) -> None:
    value = config.get(key, default)
    if value is not None and value not in accepted:
        named = ", ".join(str(a) for a in accepted)
        raise AdapterError(f"{file}: {key}={value!r} is not supported; accepted: {named}")


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) and value else _tuple(value or ())
