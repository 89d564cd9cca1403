"""A fine-tuned adapter as one of a server's: it serves at once, and goes on learning."""

from __future__ import annotations

import torch

from ..adapters.peft_files import base_weights_of, read_adapter, read_spec
from .batch import Refused
from .engine import Engine


def weights_for(folder: str | None, weights: str) -> str:
    """How the base is held; "auto": as it was while this adapter was trained. A folder that is none is refused here,
    before a model is loaded for it."""
    if folder is None:
        return weights
    read_spec(folder)
    return (base_weights_of(folder) or weights) if weights == "auto" else weights


def adopt(engine: Engine, id: str, folder: str) -> None:
    """Adapter `id` begins as this PEFT folder. One that a store has brought back is left as it is, with what it learned
    since, provided that it began as this folder.

    Raises:
        Refused: the adapter that is there began as another.
        AdapterError: the folder is no adapter, or one that a server does not take.
    """
    spec, state = read_adapter(folder, engine.model)
    if id not in engine.bank.adapters:
        engine.create(id, spec, state=state)
        return
    first, known = engine.bank.of(id).versions[0], engine.bank.of(id).spec
    same = first.keys() == state.keys() and all(torch.equal(t.cpu(), state[n].to(t.dtype)) for n, t in first.items())
    layers = {name.partition(".lora_")[0] for name in state}
    scaled = all(spec.alpha_of(name) == known.alpha_of(name) for name in layers)
    if not same or not scaled or spec.use_rslora != known.use_rslora:
        where = f" in {engine.store.folder}" if engine.store is not None else ""
        raise Refused(f"adapter {id!r}{where} did not begin as {folder}; name another --train-dir for it")
