"""A server on a port of its own, over a small random model with a real tokenizer."""

import contextlib
import socket
import threading

import torch
import uvicorn

from riftco.adapters import LoraSpec
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.serve import Engine, Store
from riftco.serve.http import Service, create_app

WINDOW = 160


def service(tokenizer, folder=None, slots=2, cache_dtype="float32", head=16, **options):
    torch.manual_seed(3)
    config = DecoderConfig("llama", tokenizer.vocabulary_size, 32, 64, 2, 2, 1, head, WINDOW, Rope(head, 1e4))
    store = None if folder is None else Store(folder, "digest")
    engine = Engine(Decoder(config), slots=slots, window=WINDOW, cache_dtype=cache_dtype, store=store)
    if "live" not in engine.bank.adapters:
        engine.create("live", LoraSpec(rank=2, alpha=4), seed=1)
    return Service(engine, tokenizer, name="tiny", learns=folder is not None, **options)


@contextlib.contextmanager
def served(made, config=None, **options):
    """The address of a running server; `config` is more of uvicorn's."""
    app = create_app(made, **options)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", **(config or {})))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listening.close()
