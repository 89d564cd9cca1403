"""PEFT's adapter folder: adapter_config.json + adapter_model.safetensors, written and read."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .lora import AdapterError, LoraSpec, adapted, apply_lora, layers_to_adapt

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NOTE = "riftco.json"  # beside PEFT's files, which have no place for it
PREFIX = "base_model.model."
# Settings that change the arithmetic and are not supported: refused unless they hold the value that means "off".
UNSUPPORTED: dict[str, tuple] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "fan_in_fan_out": (False, None),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "megatron_config": (None, {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "arrow_config": (None, {}),
}


def adapter_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """PEFT's key -> tensor (contiguous, on the CPU) of every adapted layer."""
    state = {key: p.detach().to("cpu").contiguous() for key, p in _parameters(model).items()}
    if not state:
        raise AdapterError("the model carries no adapter; call apply_lora first")
    return state


def _parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """PEFT's key -> parameter of every adapted layer: its own names, as LoRALinear carries PEFT's."""
    return {
        f"{PREFIX}{name}.{part}": p
        for name, layer in adapted(model).items()
        for part, p in layer.named_parameters()
        if part.startswith("lora_")
    }


def peft_config(spec: LoraSpec, base: str) -> dict[str, Any]:
    """adapter_config.json as PEFT reads it."""
    targets = spec.target_modules if isinstance(spec.target_modules, str) else sorted(spec.target_modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": targets,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": dict(spec.alpha_pattern),
        "use_rslora": spec.use_rslora,
        "use_dora": spec.use_dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def save_adapter(
    model: torch.nn.Module,
    spec: LoraSpec,
    folder: str | os.PathLike,
    *,
    base: str = "",
    base_weights: str | None = None,
) -> None:
    """Write the model's adapter as a PEFT folder; each file appears whole or not at all.

    Args:
        model: a model that `apply_lora` or `load_adapter` changed.
        spec: the specification it was made with.
        folder: created if missing.
        base: what PEFT should load as the base model (a name or a path).
        base_weights: "nf4" where the adapter was trained over a quantised base; kept in riftco.json.
    """
    where = pathlib.Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    weights, config = where / f".{WEIGHTS}.tmp", where / f".{CONFIG}.tmp"
    save_file(adapter_state(model), weights, metadata={"format": "pt"})
    config.write_text(json.dumps(peft_config(spec, base), indent=2) + "\n")
    files = [(weights, WEIGHTS), (config, CONFIG)]
    if base_weights is not None:
        files.append((where / f".{NOTE}.tmp", NOTE))
        files[-1][0].write_text(json.dumps({"base_weights": base_weights}) + "\n")
    for temporary, name in files:
        with open(temporary, "rb") as f:
            os.fsync(f.fileno())
        os.replace(temporary, where / name)


def base_weights_of(folder: str | os.PathLike) -> str | None:
    """How the base was held while the adapter was trained, where the folder says so."""
    note = pathlib.Path(folder) / NOTE
    if not note.is_file():
        return None
    try:
        return json.loads(note.read_text())["base_weights"]
    except (ValueError, KeyError, TypeError):
        raise AdapterError(f"{note} is damaged; delete it, or give the weights by hand") from None


def read_spec(folder: str | os.PathLike) -> LoraSpec:
    """The LoraSpec of a PEFT folder; what riftco cannot honour is refused by name."""
    where = pathlib.Path(folder)
    if not (where / CONFIG).is_file():
        raise AdapterError(f"{where} is no adapter folder: it has no {CONFIG}")
    try:
        config = json.loads((where / CONFIG).read_text())
    except ValueError as bad:
        raise AdapterError(f"{where / CONFIG} is not valid JSON: {bad}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{where / CONFIG} must hold a JSON object; got {type(config).__name__}")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{where / CONFIG}: peft_type {config.get('peft_type')!r} is not supported; accepted: LORA")
    for key, off in UNSUPPORTED.items():
        if config.get(key) not in off:
            raise AdapterError(f"{where / CONFIG}: {key}={config[key]!r} is not supported")
    if missing := [k for k in ("r", "lora_alpha", "target_modules") if config.get(k) is None]:
        raise AdapterError(f"{where / CONFIG} lacks {', '.join(missing)}")
    targets = config["target_modules"]
    return LoraSpec(
        rank=config["r"],
        alpha=config["lora_alpha"],
        target_modules=tuple(targets) if isinstance(targets, list) else targets,
        dropout=config.get("lora_dropout") or 0.0,
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
    )


def load_adapter_state(model: torch.nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy PEFT-keyed tensors into an adapted model: every tensor must be used, and every layer must be served."""
    want = _parameters(model)
    _check(state, {k: tuple(p.shape) for k, p in want.items()}, source)
    with torch.no_grad():
        for key, parameter in want.items():
            parameter.copy_(state[key])


def _check(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    for what, keys in (("has tensors that nothing consumes", state.keys() - shapes), ("lacks", shapes.keys() - state)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise AdapterError(f"{source} {what}: {', '.join(sorted(keys)[:3])}{more}")
    for key, shape in shapes.items():
        if tuple(state[key].shape) != shape:
            raise AdapterError(f"{source}: {key} has shape {tuple(state[key].shape)}, the model needs {shape}")


def load_adapter(model: torch.nn.Module, folder: str | os.PathLike) -> LoraSpec:
    """Read a PEFT folder onto `model` (frozen, changed in place) and return its specification.

    Everything is checked before the model changes.
    """
    spec = read_spec(folder)
    file = pathlib.Path(folder) / WEIGHTS
    if not file.is_file():
        raise AdapterError(f"{folder}: {WEIGHTS} is missing (pickled adapter_model.bin files are not read)")
    try:
        state = load_file(file)
    except SafetensorError as bad:
        raise AdapterError(f"{file} cannot be read: {bad}") from None
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in layers_to_adapt(model, spec).items():
        rank = spec.rank_of(name)
        shapes[f"{PREFIX}{name}.lora_A.weight"] = (rank, layer.in_features)
        shapes[f"{PREFIX}{name}.lora_B.weight"] = (layer.out_features, rank)
        if spec.use_dora:
            shapes[f"{PREFIX}{name}.lora_magnitude_vector"] = (layer.out_features,)
    _check(state, shapes, str(file))
    apply_lora(model, spec)
    load_adapter_state(model, state, str(file))
    return spec
