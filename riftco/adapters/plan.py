"""What an adapter does to a model, decided before anything changes: which layers, which modules whole, which rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from .. import nn
from .spec import AdapterError, LoraSpec

PREFIX = "base_model.model."  # of PEFT's keys
LINEAR = (torch.nn.Linear, nn.NF4Linear, nn.GGUFLinear)
EMBEDDING = (torch.nn.Embedding, nn.GGUFEmbedding)
CARRIERS = (nn.LoRALinear, nn.LoRAEmbedding, nn.TiedLoRALinear, nn.TrainableTokens, nn.TokensHead)
RECORD = "adapter_record"  # where a model keeps its Record


@dataclass(frozen=True)
class Record:
    """What of a model's own parameters belongs to its adapter: those trained in place, and second names of tied ones.

    Attributes:
        trained: names of parameters (after the layers were wrapped) that are trained and saved.
        copies: a name under which a tied parameter is saved a second time -> its owner's name.
    """

    trained: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Plan:
    """Names of what is adapted.

    Attributes:
        layers: linear and embedding layers that get a LoRA of their own.
        tied_lora, tied_tokens, tied_saved: head -> embedding that it shares its adapter, trained rows or weight with.
        tokens: embedding -> rows that are trained.
        saved: modules that are trained whole.
        untied: the head, which leaves the weight that it shared with the embedding.
    """

    layers: dict[str, torch.nn.Module] = field(default_factory=dict)
    tied_lora: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied_tokens: dict[str, str] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    tied_saved: dict[str, str] = field(default_factory=dict)
    untied: str | None = None


def plan_adapter(model: torch.nn.Module, spec: LoraSpec) -> Plan:
    """What `spec` does to `model`; refuses an adapted model, a spec that names nothing, and what cannot be trained."""
    if hasattr(model, RECORD) or any(isinstance(m, CARRIERS) for m in model.modules()):
        raise AdapterError("the model already carries an adapter; load the base model again")
    modules = dict(model.named_modules(remove_duplicate=False))
    plan = Plan(layers=_layers(modules, spec))
    embedding, head = tied_pair(modules)
    _plan_saved(plan, modules, spec, embedding, head)
    _plan_tokens(plan, modules, spec, embedding, head)
    if spec.ensure_weight_tying and embedding and head and (embedding in plan.layers or head in plan.layers):
        if spec.use_dora:
            raise AdapterError("use_dora and ensure_weight_tying exclude each other where the embedding is adapted")
        plan.layers[embedding] = modules[embedding]
        plan.layers.pop(head, None)
        plan.tied_lora[head] = embedding
    if not plan.layers:
        endings = sorted({n.rpartition(".")[2] for n, m in modules.items() if isinstance(m, LINEAR)})
        raise AdapterError(
            f"no linear layer matches target_modules={spec.target_modules!r}; the model has: {', '.join(endings)}"
        )
    return plan


def shared_where_tied(model: torch.nn.Module, spec: LoraSpec) -> LoraSpec:
    """`spec` with ensure_weight_tying where it adapts or saves an embedding and a head that share their weight."""
    plan = plan_adapter(model, spec)
    pair = tied_pair(dict(model.named_modules(remove_duplicate=False)))
    touched = any(name in (*plan.layers, *plan.saved) for name in pair)
    return replace(spec, ensure_weight_tying=True) if touched else spec


def unmatched(model: torch.nn.Module, spec: LoraSpec) -> dict[str, list[str]]:
    """Field of `spec` -> what it names that `model` does not have, or that is not adapted: mostly slips of the pen.

    PEFT passes over them, as do `apply_lora` and `load_adapter`: one list may be made for many families.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    layers = plan_adapter(model, spec).layers
    found: dict[str, list[str]] = {}
    for field_name, given in (("target_modules", spec.target_modules), ("exclude_modules", spec.exclude_modules)):
        if not isinstance(given, str):
            found[field_name] = [g for g in given if not any(n == g or n.endswith(f".{g}") for n in names)]
    for field_name, pattern in (("rank_pattern", spec.rank_pattern), ("alpha_pattern", spec.alpha_pattern)):
        found[field_name] = [k for k in pattern if not any(re.fullmatch(rf"(.*\.)?({k})", n) for n in layers)]
    return {field_name: missing for field_name, missing in found.items() if missing}


def tied_pair(modules: Mapping[str, torch.nn.Module]) -> tuple[str | None, str | None]:
    """The embedding and the linear layer that share one weight, by name."""
    embeddings = {id(m.weight): n for n, m in modules.items() if isinstance(m, EMBEDDING)}
    for name, module in modules.items():
        if isinstance(module, (torch.nn.Linear, nn.GGUFLinear)) and id(module.weight) in embeddings:
            return embeddings[id(module.weight)], name
    return None, None


def _layers(modules: Mapping[str, torch.nn.Module], spec: LoraSpec) -> dict[str, torch.nn.Module]:
    if spec.target_modules == "all-linear":
        heads = ("lm_head",)
        return {
            n: m
            for n, m in modules.items()
            if isinstance(m, LINEAR) and n.rpartition(".")[2] not in heads and not spec.excludes(n)
        }
    found = {n: m for n, m in modules.items() if spec.targets(n)}
    for name, module in found.items():
        bare = not isinstance(module, (*LINEAR, *EMBEDDING))
        if bare and any(True for _ in module.parameters(recurse=False)):
            raise AdapterError(
                f"target_modules names {name}, a {type(module).__name__}, which cannot carry a LoRA; accepted: linear "
                "layers and embeddings (train others whole with modules_to_save)"
            )
    return {n: m for n, m in found.items() if isinstance(m, (*LINEAR, *EMBEDDING))}


def _plan_saved(plan: Plan, modules, spec: LoraSpec, embedding: str | None, head: str | None) -> None:
    for ending in spec.modules_to_save:
        if not any(n.endswith(ending) for n in modules if n):
            raise AdapterError(f"modules_to_save names {ending!r}, which the model does not have")
    plan.saved = [n for n in modules if n and any(n.endswith(e) for e in spec.modules_to_save)]
    for name in plan.saved:
        for path, module in modules[name].named_modules():
            if isinstance(module, (nn.NF4Linear, nn.GGUFLinear, nn.GGUFEmbedding)):
                whole = f"{name}.{path}" if path else name
                raise AdapterError(
                    f"modules_to_save names {whole}, whose weights are quantised and cannot be trained; load the base "
                    "in 16 or 32 bits, or give it a LoRA"
                )
    if embedding and head and (embedding in plan.saved or head in plan.saved):
        if spec.ensure_weight_tying:
            plan.saved = [n for n in plan.saved if n not in (embedding, head)] + [embedding]
            plan.tied_saved[head] = embedding
        else:
            plan.untied = head


def _plan_tokens(plan: Plan, modules, spec: LoraSpec, embedding: str | None, head: str | None) -> None:
    tokens = spec.trainable_token_indices
    if not tokens:
        return
    found = [n for n, m in modules.items() if isinstance(m, EMBEDDING)]
    wanted: dict[str, tuple[int, ...]] = {}
    if isinstance(tokens, Mapping):
        for ending, ids in tokens.items():
            names = [n for n in modules if n and n.endswith(ending)]
            if not names:
                raise AdapterError(f"trainable_token_indices names {ending!r}, which the model does not have")
            wanted |= dict.fromkeys(names, ids)
    elif found:
        wanted[found[0]] = tokens
    if embedding and head in wanted and wanted.get(embedding) == wanted[head]:
        wanted.pop(head)
    for name, ids in wanted.items():
        if name not in found:
            raise AdapterError(
                f"trainable_token_indices names {name}, a {type(modules[name]).__name__}; accepted: embeddings (a tied "
                "head follows its embedding)"
            )
        if name in plan.layers or name in plan.saved:
            raise AdapterError(f"{name} is adapted or saved whole, and cannot have trained rows as well; choose one")
        if not ids or max(ids) >= modules[name].num_embeddings or len(set(ids)) != len(ids):
            raise AdapterError(
                f"trainable_token_indices of {name} must be distinct and below {modules[name].num_embeddings}; "
                f"got {list(ids)}"
            )
    plan.tokens = wanted
    if embedding in wanted and head is not None:
        if head in plan.layers or head in plan.saved:
            raise AdapterError(
                f"{head} shares the trained rows of {embedding} and cannot be adapted or saved as well; choose one"
            )
        plan.tied_tokens[head] = embedding
