"""`riftco serve`: a model loaded, an engine around it, and uvicorn in front."""

from __future__ import annotations

import pathlib

import uvicorn

from ...adapters import LoraSpec
from ...models import base_digest
from ...train.use import load
from ..engine import Engine
from ..store import Store
from .app import create_app
from .auth import Keys, check_bind
from .service import Service


def serve_forever(
    model: str, *, host: str, port: int, slots: int, window: int | None, cache: str, chunk: int, speculate: int,
    train_dir: str | None, rank: int, adapter: str, lr_max: float, journal: int, api_key: str | None,
    admin_key: str | None, insecure: bool, cuda_graphs: bool, weights: str, device: str,
) -> None:  # fmt: skip
    """Until SIGINT or SIGTERM: what is being answered ends first, then what was learned is on disk already."""
    keys = Keys(api_key, admin_key)
    check_bind(host, keys, insecure)
    loaded = load(model, weights=weights, device=device)
    store = None if train_dir is None else Store(train_dir, base_digest(model), model)
    engine = Engine(
        loaded.model, slots=slots, window=window, cache_dtype=cache, chunk=chunk, store=store, journal=journal,
        lr_range=(1e-7, lr_max), cuda_graphs=cuda_graphs,
    )  # fmt: skip
    if store is not None and adapter not in engine.bank.adapters:
        engine.create(adapter, LoraSpec(rank=rank, alpha=2.0 * rank))
    name = pathlib.Path(model).stem if model.endswith(".gguf") else pathlib.Path(model).name
    service = Service(engine, loaded.tokenizer, name=name, learns=store is not None, speculate=speculate)
    app = create_app(service, keys=keys, train_dir=None if train_dir is None else pathlib.Path(train_dir))
    uvicorn.run(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=10)
