"""PEFT's adapter folder: adapter_config.json + adapter_model.safetensors, written and read."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .. import nn
from .lora import adapter_parameters, apply_lora, tied_copies
from .peft_config import CONFIG, peft_config, read_spec
from .plan import EMBEDDING, PREFIX, Plan, plan_adapter
from .spec import AdapterError, LoraSpec

WEIGHTS = "adapter_model.safetensors"
NOTE = "riftco.json"  # beside PEFT's files, which have no place for it
HELD = ("nf4", "packed")  # what it can say of the base's weights
# how models with images name their text model's parts
TEXT = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
BASE = ".base_layer.weight"  # PEFT saves an adapted embedding's frozen weight, too


def adapter_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """PEFT's key -> tensor (contiguous, on the CPU) of everything that the adapter holds."""
    state = {key: p.detach().to("cpu").contiguous() for key, p in adapter_parameters(model).items()}
    if not state:
        raise AdapterError("the model carries no adapter; call apply_lora first")
    return state | {key: t.detach().to("cpu").contiguous().clone() for key, t in tied_copies(model).items()}


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
        base_weights: "nf4" or "packed" where the adapter was trained over such a base; kept in riftco.json.
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
    if base_weights is None:
        (where / NOTE).unlink(missing_ok=True)  # of an adapter that was here before


def base_weights_of(folder: str | os.PathLike) -> str | None:
    """How the base was held while the adapter was trained ("nf4" or "packed"); None where the folder does not say.

    Raises:
        AdapterError: a note that is damaged.
    """
    note = pathlib.Path(folder) / NOTE
    if not note.is_file():
        return None
    try:
        held = json.loads(note.read_text())["base_weights"]
    except (ValueError, KeyError, TypeError):
        held = None
    if held not in HELD:
        raise AdapterError(f"{note} is damaged; delete it, or give the weights by hand")
    return held


def load_adapter_state(model: torch.nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Copy PEFT-keyed tensors into an adapted model.

    Args:
        model: with the adapter's layers.
        state: PEFT's key -> tensor; every one must be used, and every layer must be served.
        source: what a refusal calls it.

    Raises:
        AdapterError: a tensor that nothing takes, one that is lacking, or another shape, by name.
    """
    want, copies = adapter_parameters(model), tied_copies(model)
    state = _without_bases(model, state, source)
    _check(state, {k: tuple(p.shape) for k, p in (want | copies).items()}, source)
    with torch.no_grad():
        for key, parameter in want.items():
            parameter.copy_(state[key])
    for key, shared in tied_copies(model).items():
        if not torch.equal(state[key].to(shared.device, shared.dtype), shared):
            raise AdapterError(f"{source}: {key} differs from what the embedding has, which ensure_weight_tying shares")


def _without_bases(model: torch.nn.Module, state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The state without the frozen weights of embeddings (and head) that PEFT puts beside their adapters, which must
    be the model's own."""
    kept = dict(state)
    for key in [k for k in state if k.startswith(PREFIX) and k.endswith(BASE)]:
        name = key.removeprefix(PREFIX).removesuffix(BASE)
        try:
            own: Any = getattr(model.get_submodule(name), "base_layer", model.get_submodule(name)).weight
        except AttributeError:
            continue  # no such module: left for the check of names
        if not isinstance(own, Tensor):
            own = own.decoded(0, own.shape[0], torch.float32)
        stored = kept.pop(key)
        coarse = min(own.dtype, stored.dtype, key=lambda d: d.itemsize)
        if stored.shape != own.shape or not torch.equal(stored.to(coarse), own.detach().to("cpu", coarse)):
            raise AdapterError(
                f"{source}: {key} is not this model's weight; load the base that the adapter was trained over"
            )
    return kept


def _check(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    for what, keys in (("has tensors that nothing consumes", state.keys() - shapes), ("lacks", shapes.keys() - state)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise AdapterError(f"{source} {what}: {', '.join(sorted(keys)[:3])}{more}")
    for key, shape in shapes.items():
        if tuple(state[key].shape) != shape:
            raise AdapterError(f"{source}: {key} has shape {tuple(state[key].shape)}, the model needs {shape}")


def read_adapter(folder: str | os.PathLike, model: torch.nn.Module) -> tuple[LoraSpec, dict[str, Tensor]]:
    """A PEFT folder's specification and tensors, by the layers' names without PEFT's prefix. `model`, its base, stays
    as it is: where the folder has weights of it, they must be its own."""
    spec, state = _of_text_model(read_spec(folder), _weights(folder))
    state = _without_bases(model, state, str(pathlib.Path(folder) / WEIGHTS))
    return spec, {k.removeprefix(PREFIX): t for k, t in state.items()}


def _of_text_model(spec: LoraSpec, state: dict[str, Tensor]) -> tuple[LoraSpec, dict[str, Tensor]]:
    """An adapter that was trained on a model with images, by the names of its text model alone."""
    renamed = {
        PREFIX + _own(key.removeprefix(PREFIX)) if key.startswith(PREFIX) else key: tensor
        for key, tensor in state.items()
    }
    if renamed.keys() == state.keys():
        return spec, renamed
    targets = spec.target_modules
    if isinstance(targets, str):  # an expression may name what is not here: the layers are those that the file has
        layers = {k.removeprefix(PREFIX).rpartition(".lora_")[0] for k in renamed if ".lora_A." in k}
        targets = tuple(sorted(layers))
    return replace(
        spec,
        target_modules=tuple(map(_own, targets)),
        rank_pattern={_own(name): rank for name, rank in spec.rank_pattern.items()},
        alpha_pattern={_own(name): alpha for name, alpha in spec.alpha_pattern.items()},
    ), renamed


def _own(name: str) -> str:
    """A text model's name for its layer, of the name that a model with images has."""
    return next((own + name.removeprefix(prefix) for prefix, own in TEXT.items() if name.startswith(prefix)), name)


def _weights(folder: str | os.PathLike) -> dict[str, Tensor]:
    file = pathlib.Path(folder) / WEIGHTS
    if not file.is_file():
        raise AdapterError(f"{folder}: {WEIGHTS} is missing (pickled adapter_model.bin files are not read)")
    try:
        return load_file(file)
    except SafetensorError as bad:
        raise AdapterError(f"{file} cannot be read: {bad}") from None


def load_adapter(model: torch.nn.Module, folder: str | os.PathLike) -> LoraSpec:
    """Read a PEFT folder onto `model` (frozen, changed in place) and return its specification.

    Everything is checked before the model changes.

    Raises:
        AdapterError: a file that is missing or damaged, a setting that riftco cannot honour, an adapter of another
            model, a model that carries one already.
    """
    spec, state, file = read_spec(folder), _weights(folder), pathlib.Path(folder) / WEIGHTS
    if not any(name.endswith("language_model") for name, _ in model.named_modules()):
        spec, state = _of_text_model(spec, state)
    plan = plan_adapter(model, spec)
    try:
        _check(_without_bases(model, state, str(file)), _shapes(model, plan, spec), str(file))
    except AdapterError as why:
        base = json.loads((pathlib.Path(folder) / CONFIG).read_text()).get("base_model_name_or_path")
        raise AdapterError(f"{why}; {f'it was trained over {base}' if base else 'is this its base model?'}") from None
    apply_lora(model, spec)
    load_adapter_state(model, state, str(file))
    return spec


def _shapes(model: torch.nn.Module, plan: Plan, spec: LoraSpec) -> dict[str, tuple[int, ...]]:
    """PEFT's key -> shape of everything that the adapter of `plan` will hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in plan.layers.items():
        rank = spec.rank_of(name)
        if isinstance(layer, EMBEDDING):
            V, C = layer.weight.shape
            shapes |= {f"{name}.lora_embedding_A": (rank, V), f"{name}.lora_embedding_B": (C, rank)}
            length = C
        else:
            assert isinstance(layer, (torch.nn.Linear, nn.NF4Linear, nn.GGUFLinear))
            length = layer.out_features
            shapes |= {f"{name}.lora_A.weight": (rank, layer.in_features), f"{name}.lora_B.weight": (length, rank)}
        if spec.use_dora:
            shapes[f"{name}.lora_magnitude_vector"] = (length,)
    for head, owner in plan.tied_lora.items():
        rank, (V, C) = spec.rank_of(owner), _weight(model, owner).shape
        shapes |= {f"{head}.lora_A.weight": (rank, C), f"{head}.lora_B.weight": (V, rank)}
    for name, ids in plan.tokens.items():
        shapes[f"{name}.token_adapter.trainable_tokens_delta"] = (len(ids), _weight(model, name).shape[1])
    for module in (*plan.saved, *plan.tied_saved):
        shapes |= {f"{module}.{n}": tuple(p.shape) for n, p in model.get_submodule(module).named_parameters()}
    if spec.bias != "none":
        for name, module in model.named_modules():
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor) and (name in plan.layers or spec.bias == "all"):
                shapes[f"{name}.base_layer.bias" if name in plan.layers else f"{name}.bias"] = tuple(bias.shape)
    return {f"{PREFIX}{name}": shape for name, shape in shapes.items()}


def _weight(model: torch.nn.Module, name: str) -> Any:
    return model.get_submodule(name).weight
