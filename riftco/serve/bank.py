"""The adapters of a server: numbered versions that serve, and shadows that learn.

A version never changes once it is there. A shadow is what learning changes; it serves nobody until it is promoted to a
new version. Which adapters a row was made under is its key: (id, version, scale) of each, or () for the base.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import math
import numbers
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import AdapterError, LoraSpec
from ..adapters.lora import adapted, seeded
from ..adapters.plan import plan_adapter
from ..functional import lora_linear
from ..models import Decoder
from ..nn import GGUFLinear, LoRALinear, NF4Linear
from ..train.state import on_host
from .batch import Refused
from .side_by_side import SideBySide
from .versions import State, Versions

ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")  # also the name of a folder
PREPARED = 8  # how many sets' layers are kept ready
HASHERS = min(os.cpu_count() or 1, 16)  # threads


@dataclass(frozen=True, order=True)
class Use:
    """An adapter's version at a scale."""

    id: str
    version: int
    scale: float = 1.0


AdapterSet = tuple[Use, ...]  # in order of ids; () is the base


@dataclass
class Adapter:
    """One adapter: `versions[n - 1]` is version n; `shadow` holds the parameters that learn, if it may learn, which lie
    in `weights`."""

    spec: LoraSpec
    versions: Versions = field(default_factory=Versions)
    digests: list[str] = field(default_factory=list)
    shadow: dict[str, nn.Parameter] | None = None
    weights: SideBySide | None = None

    @property
    def version(self) -> int:
        return len(self.versions)


class Joined(nn.Module):
    """A linear layer under several adapters at once: their ranks side by side, each with its own scale."""

    def __init__(self, parts: list[LoRALinear]):
        super().__init__()
        self.base_layer, self.parts = parts[0].base_layer, tuple(parts)
        if sum(part.rank for part in parts) > LoRALinear.max_rank:
            raise Refused(f"adapters used together may have ranks of up to {LoRALinear.max_rank} in all")

    dropout = 0.0

    def adapter(self) -> tuple[Tensor, Tensor, float]:
        """(A, B, scale) of them all."""
        a = torch.cat([part.lora_A.weight for part in self.parts])
        return a, torch.cat([part.scale * part.lora_B.weight for part in self.parts], 1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        a, b, scale = self.adapter()
        return lora_linear(x, self.base_layer.weight, a, b, scale=scale, bias=self.base_layer.bias)


class AdapterBank:
    """Every adapter of one base model, and which of them the model's layers have now.

    Args:
        model: a decoder without an adapter; its parameters are frozen.
    """

    def __init__(self, model: Decoder):
        if adapted(model):
            raise AdapterError("the model already carries an adapter; load the base model and add the adapter here")
        self.model = model.requires_grad_(False)
        self.adapters: dict[str, Adapter] = {}
        self.active: AdapterSet = ()
        self._prepared: OrderedDict[AdapterSet, dict[str, nn.Module]] = OrderedDict()
        self._learning: OrderedDict[tuple[AdapterSet, str], tuple[dict[str, nn.Parameter], dict[str, nn.Module]]]
        self._learning = OrderedDict()
        self._preparing = threading.Lock()  # requests are checked while others are served

    def create(self, id: str, spec: LoraSpec, *, seed: int = 0, state: State | None = None) -> Adapter:
        """A new adapter at version 1, which gives the base's outputs unless `state` has its weights.

        Raises:
            Refused: the id is taken or no name.
            AdapterError: the spec fits no layer, or the state does not fit the spec.
        """
        if not isinstance(id, str) or not ID.fullmatch(id):
            raise Refused(
                f"adapter id {id!r} must be letters, digits (ASCII), '-', '_' and '.', not '.' at first, up to 128"
            )
        if id in self.adapters:
            raise Refused(f"adapter id {id!r} is taken")
        fresh = _fresh(self.model, spec, seed)
        if state is not None:
            _check_state(id, fresh, state)
            fresh = {name: state[name].to(t, copy=True) for name, t in fresh.items()}
        made = Adapter(spec)
        self.adapters[id] = made
        self.publish(id, fresh)
        return made

    def remove(self, id: str) -> None:
        """Forget an adapter and its versions. Raises Refused while one of them serves."""
        self.of(id)
        if any(use.id == id for use in self.active):
            raise Refused(f"adapter {id!r} is in use")
        for version in range(1, self.adapters[id].version + 1):
            self._forget(Use(id, version))
        del self.adapters[id]

    def set_of(self, uses: Mapping[str, float]) -> AdapterSet:
        """The newest versions of these adapters (id -> scale), as a key; scale 0 leaves one out."""
        for id, scale in uses.items():
            self.of(id)
            if not isinstance(scale, numbers.Real) or not math.isfinite(scale):
                raise Refused(f"adapter {id!r}: the scale must be finite; got {scale!r}")
        return tuple(sorted(Use(id, self.adapters[id].version, float(scale)) for id, scale in uses.items() if scale))

    def shadow(self, id: str) -> dict[str, nn.Parameter]:
        """The trainable parameters of an adapter, which start as its newest version."""
        adapter = self.of(id)
        if adapter.shadow is None:
            newest = adapter.versions[-1]
            adapter.weights = SideBySide({name: t.shape for name, t in newest.items()}, self.model.device)
            adapter.weights.copy_(newest)
            adapter.shadow = {name: nn.Parameter(t) for name, t in adapter.weights.views.items()}
        return adapter.shadow

    def weights(self, id: str) -> SideBySide:
        """What the shadow lies in."""
        self.shadow(id)
        weights = self.of(id).weights
        assert weights is not None
        return weights

    def promotable(self, id: str) -> bool:
        """Whether the shadow differs from what serves."""
        adapter, newest = self.of(id), self.of(id).versions[-1]
        shadow = adapter.shadow
        return shadow is not None and any(not torch.equal(newest[n].to(p), p) for n, p in shadow.items())

    def promote(self, id: str) -> int:
        """Publish the shadow as the next version; its number."""
        adapter = self.of(id)
        if adapter.shadow is None:
            raise Refused(f"adapter {id!r} has learned nothing; there is nothing to promote")
        state = {name: p.detach().clone() for name, p in adapter.shadow.items()}
        if not self.promotable(id):
            raise Refused(f"adapter {id!r} has learned nothing since version {adapter.version}")
        self.publish(id, state)
        return adapter.version

    @contextlib.contextmanager
    def serving(self, key: AdapterSet) -> Iterator[None]:
        """Within the block the model's layers carry this set."""
        yield from self._with(key, self.layers(key))

    @contextlib.contextmanager
    def learning(self, key: AdapterSet, id: str) -> Iterator[None]:
        """Within the block the set has the shadow of adapter `id`, at scale 1, in place of its version."""
        yield from self._with(key, self.learning_layers(key, id))

    def learning_layers(self, key: AdapterSet, id: str) -> Mapping[str, nn.Module]:
        """The model's layers with that shadow; the same object for as long as they are the same."""
        adapter, shadow = self.of(id), self.shadow(id)
        others = tuple(use for use in key if use.id != id)
        if others and adapter.spec.dropout:
            raise Refused(f"adapter {id!r} has dropout; such a one learns only where it serves alone")
        with self._preparing:
            found = self._learning.get((others, id))
            if found is None or found[0] is not shadow:
                own = _layers_of(self.model, adapter.spec, shadow, 1.0, adapter.spec.dropout)
                found = shadow, _join([*(self._parts(use) for use in others), own])
                self._learning[others, id] = found
                while len(self._learning) > PREPARED:
                    self._learning.popitem(last=False)
            self._learning.move_to_end((others, id))
            return found[1]

    def _with(self, key: AdapterSet, layers: Mapping[str, nn.Module]) -> Iterator[None]:
        before, was = {}, self.active
        try:
            for path, layer in layers.items():
                before[path] = self.model.get_submodule(path)
                _put(self.model, path, layer)
            self.active = key
            yield
        finally:
            for path, layer in before.items():
                _put(self.model, path, layer)
            self.active = was

    def ready(self, key: AdapterSet) -> None:
        """Refuse a set that cannot serve, before anything is served under it."""
        self.layers(key)

    def layers(self, key: AdapterSet) -> Mapping[str, nn.Module]:
        """The model's layers under this set; the same object for as long as they are the same."""
        with self._preparing:
            if key not in self._prepared:
                self._prepared[key] = _join([self._parts(use) for use in key])
                while len(self._prepared) > PREPARED:
                    self._prepared.popitem(last=False)
            self._prepared.move_to_end(key)
            return self._prepared[key]

    def _parts(self, use: Use) -> dict[str, LoRALinear]:
        adapter = self.of(use.id)
        if not 1 <= use.version <= adapter.version:
            raise Refused(f"adapter {use.id!r} has no version {use.version}; newest: {adapter.version}")
        return _layers_of(self.model, adapter.spec, adapter.versions[use.version - 1], use.scale)

    def withdraw(self, id: str) -> None:
        """Take back the newest version, which served nobody yet."""
        adapter = self.of(id)
        self._forget(Use(id, adapter.version))
        adapter.versions.take_back()
        del adapter.digests[-1]

    def publish(self, id: str, state: State) -> None:
        """Add a version, which is not to be changed afterwards."""
        adapter = self.of(id)
        if adapter.versions:
            _check_state(id, adapter.versions[-1], state)
        order = adapter.versions[-1] if adapter.versions else state  # the optimizer knows parameters by their order
        adapter.versions.append({name: state[name].to(self.model.device) for name in order})
        adapter.digests.append(digest(state))

    def _forget(self, gone: Use) -> None:
        with self._preparing:
            for key in [k for k in self._prepared if any((u.id, u.version) == (gone.id, gone.version) for u in k)]:
                del self._prepared[key]
            for others, id in list(self._learning):
                if id == gone.id or any((u.id, u.version) == (gone.id, gone.version) for u in others):
                    del self._learning[others, id]

    def of(self, id: str) -> Adapter:
        """The adapter of this id; Refused where there is none."""
        if not isinstance(id, str) or id not in self.adapters:
            known = ", ".join(sorted(self.adapters)) or "none"
            raise Refused(f"no adapter {id!r}; loaded: {known}")
        return self.adapters[id]


def digest(state: State) -> str:
    """SHA-256 over names, shapes, dtypes and each tensor's SHA-256, which threads compute side by side."""
    tensors = on_host({name: t for name, t in state.items() if t.is_cuda})
    flat = {name: tensors.get(name, t).detach().cpu().contiguous().flatten() for name, t in state.items()}
    names = sorted(flat, key=lambda name: flat[name].numel(), reverse=True)
    shares = [names[i::HASHERS] for i in range(HASHERS)]  # of about as many bytes
    made = _hashers().map(lambda share: [_sha256(flat[name]) for name in share], shares)
    hashes = dict(zip(itertools.chain(*shares), itertools.chain(*made)))
    seen = hashlib.sha256()
    for name in sorted(state):
        seen.update(f"{name} {tuple(state[name].shape)} {state[name].dtype} {hashes[name]}\n".encode())
    return seen.hexdigest()


@functools.cache
def _hashers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(HASHERS, "riftco-hash")


def _sha256(t: Tensor) -> str:
    return hashlib.sha256(t.view(torch.uint8).numpy().data).hexdigest()


def _fresh(model: Decoder, spec: LoraSpec, seed: int) -> dict[str, Tensor]:
    """A new adapter's tensors on the model's device."""
    plan = plan_adapter(model, spec)
    more = [f for f in fields(plan) if f.name != "layers" and getattr(plan, f.name)]
    if more or spec.use_dora or spec.bias != "none" or any(isinstance(m, nn.Embedding) for m in plan.layers.values()):
        raise AdapterError(
            "a server takes adapters that are LoRA on linear layers alone; DoRA, embeddings, biases, whole modules and "
            "single tokens cannot be switched between requests: merge such an adapter into the model first "
            "(riftco merge)"
        )
    state = {}
    with seeded(model, seed):
        for path, linear in plan.layers.items():
            assert isinstance(linear, (nn.Linear, NF4Linear, GGUFLinear))
            layer = LoRALinear(linear, spec.rank_of(path), spec.alpha_of(path))
            state[f"{path}.lora_A.weight"] = layer.lora_A.weight.detach()
            state[f"{path}.lora_B.weight"] = layer.lora_B.weight.detach()
    return state


def _check_state(id: str, wanted: State, state: State) -> None:
    for what, names in (("lacks", wanted.keys() - state.keys()), ("does not use", state.keys() - wanted.keys())):
        if names:
            raise AdapterError(f"adapter {id!r} {what} {min(names)} ({len(names)} in all)")
    for name, t in wanted.items():
        if state[name].shape != t.shape:
            raise AdapterError(f"adapter {id!r}: {name} must be {tuple(t.shape)}; got {tuple(state[name].shape)}")


def _layers_of(
    model: Decoder, spec: LoraSpec, state: Mapping[str, Tensor], scale: float, dropout: float = 0.0
) -> dict[str, LoRALinear]:
    """Layer name -> the layer under these tensors. Parameters stay themselves, so that they receive gradients."""
    layers = {}
    for path in (name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")):
        base: Any = model.get_submodule(path)
        base = getattr(base, "base_layer", base)  # another set may be in place
        alpha = spec.alpha_of(path) * scale
        layer = LoRALinear(base, spec.rank_of(path), alpha, dropout, spec.use_rslora, device="meta")
        for part in ("lora_A", "lora_B"):
            t = state[f"{path}.{part}.weight"]
            getattr(layer, part).weight = t if isinstance(t, nn.Parameter) else nn.Parameter(t, requires_grad=False)
        layers[path] = layer
    return layers


def _join(parts: list[dict[str, LoRALinear]]) -> dict[str, nn.Module]:
    paths = dict.fromkeys(path for part in parts for path in part)
    layers: dict[str, nn.Module] = {}
    for path in paths:
        some = [part[path] for part in parts if path in part]
        layers[path] = some[0] if len(some) == 1 else Joined(some)
    return layers


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)
