"""Putting an adapter on a model, and what of the model is then the adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import nn
from .plan import EMBEDDING, PREFIX, RECORD, Plan, Record, plan_adapter
from .spec import LoraSpec


def adapted(model: torch.nn.Module) -> dict[str, nn.LoRALinear | nn.LoRAEmbedding]:
    """Name -> layer of everything that carries a LoRA of its own."""
    return {name: m for name, m in model.named_modules() if isinstance(m, (nn.LoRALinear, nn.LoRAEmbedding))}


def adapter_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """PEFT's key -> parameter of everything that the adapter trains."""
    found: dict[str, torch.nn.Parameter] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.LoRALinear, nn.LoRAEmbedding)):  # whose own names are PEFT's
            found |= {f"{PREFIX}{name}.{n}": p for n, p in layer.named_parameters() if n.startswith("lora_")}
        elif isinstance(layer, nn.TrainableTokens):
            found[f"{PREFIX}{name}.token_adapter.trainable_tokens_delta"] = layer.trainable_tokens_delta
    record: Record = getattr(model, RECORD, Record())
    return found | {f"{PREFIX}{name}": model.get_parameter(name) for name in record.trained}


def tied_copies(model: torch.nn.Module) -> dict[str, Tensor]:
    """PEFT's key -> what it saves a second time, because a tied head shares it with the embedding."""
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.TiedLoRALinear):
            a, b, _ = layer.adapter()
            found |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    record: Record = getattr(model, RECORD, Record())
    return found | {f"{PREFIX}{copy}": model.get_parameter(owner) for copy, owner in record.copies.items()}


def apply_lora(model: torch.nn.Module, spec: LoraSpec, *, seed: int | None = None) -> list[str]:
    """Freeze `model` and put a fresh adapter (the outputs stay as they are) where `spec` says.

    Args:
        model: any module whose layers are torch.nn.Linear, torch.nn.Embedding or riftco.nn's NF4Linear, GGUFLinear;
            changed.
        spec: what to adapt and how.
        seed: of the adapter's initial values; None draws from the global generator.

    Returns:
        The names of the layers that got a LoRA.

    Raises:
        AdapterError: the model carries an adapter already, no layer matches, or one that is named cannot be trained.
    """
    plan = plan_adapter(model, spec)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with contextlib.nullcontext() if seed is None else seeded(model, seed):
        for name, layer in plan.layers.items():
            options: dict = dict(dropout=spec.dropout, use_rslora=spec.use_rslora, use_dora=spec.use_dora)
            kind = nn.LoRAEmbedding if isinstance(layer, EMBEDDING) else nn.LoRALinear
            _replace(model, name, kind(layer, spec.rank_of(name), spec.alpha_of(name), **options))  # type: ignore[arg-type]
    _share(model, plan)
    trained, copies = _train_in_place(model, plan, spec)
    setattr(model, RECORD, Record(tuple(trained), copies))
    return [*plan.layers, *plan.tied_lora]


@contextlib.contextmanager
def seeded(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Within the block the CPU and the model's devices draw from `seed`; their generators go on as if nothing had been
    drawn. Other GPUs are left alone, which may not even be in use."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    gpus = sorted(d.index for d in devices if d.type == "cuda")
    with torch.random.fork_rng(devices=gpus):
        if any(d.type not in ("cpu", "cuda", "meta") for d in devices):
            torch.manual_seed(seed)
        torch.default_generator.manual_seed(seed)
        for i in gpus:
            torch.cuda.default_generators[i].manual_seed(seed)
        yield


def _replace(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    model.set_submodule(name, layer.train(model.training))


def _share(model: torch.nn.Module, plan: Plan) -> None:
    """Trained rows, and heads that follow their embedding."""
    for name, ids in plan.tokens.items():
        _replace(model, name, nn.TrainableTokens(model.get_submodule(name), list(ids)))
    for head, owner in (plan.tied_lora | plan.tied_tokens).items():
        base, embedding = model.get_submodule(head), model.get_submodule(owner)
        assert isinstance(base, (torch.nn.Linear, nn.GGUFLinear))
        if isinstance(embedding, nn.LoRAEmbedding):
            _replace(model, head, nn.TiedLoRALinear(base, embedding))
        else:
            assert isinstance(embedding, nn.TrainableTokens)
            _replace(model, head, nn.TokensHead(base, embedding))


def _train_in_place(model: torch.nn.Module, plan: Plan, spec: LoraSpec) -> tuple[list[str], dict[str, str]]:
    """Make modules that are saved whole, and biases, trainable; their names, and the second names of tied ones."""
    if plan.untied is not None:
        head = model.get_submodule(plan.untied)
        assert isinstance(head, torch.nn.Linear)
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        head.weight.requires_grad_(False)
    names = {n: None for module in plan.saved for n, _ in _named(model, module)}
    copies = {f"{head}.weight": f"{owner}.weight" for head, owner in plan.tied_saved.items()}
    if spec.bias == "all":
        names |= {n: None for n, _ in model.named_parameters() if n.endswith(".bias")}
    elif spec.bias == "lora_only":
        layers = {n: m for n, m in adapted(model).items() if isinstance(m, nn.LoRALinear)}
        names |= {f"{n}.base_layer.bias": None for n, m in layers.items() if m.base_layer.bias is not None}
    for name in names:
        model.get_parameter(name).requires_grad_(True)
    return list(names), copies


def _named(model: torch.nn.Module, module: str):
    return ((f"{module}.{n}", p) for n, p in model.get_submodule(module).named_parameters())
