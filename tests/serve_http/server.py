"""A server on a port of its own, over a small random model with a real tokenizer."""

import contextlib
import copy
import socket
import threading

import torch
import uvicorn

from riftco.adapters import LoraSpec
from riftco.models import Decoder, DecoderConfig, Tokenizer
from riftco.models.rotary import Rope
from riftco.serve import Engine, Store
from riftco.serve.http import Service, create_app

WINDOW = 160


def service(tokenizer, folder=None, slots=2, cache_dtype="float32", head=16, window=WINDOW, frozen=None, **options):
    """`frozen` makes each linear layer of the base what it returns."""
    torch.manual_seed(3)
    config = DecoderConfig("llama", tokenizer.vocabulary_size, 32, 64, 2, 2, 1, head, window, Rope(head, 1e4))
    store = None if folder is None else Store(folder, "digest")
    model = Decoder(config)
    for name, layer in list(model.model.named_modules()) if frozen else ():
        if isinstance(layer, torch.nn.Linear):
            model.model.set_submodule(name, frozen(layer))
    engine = Engine(model, slots=slots, window=window, cache_dtype=cache_dtype, store=store)
    if "live" not in engine.bank.adapters:
        engine.create("live", LoraSpec(rank=2, alpha=4), seed=1)
    return Service(engine, tokenizer, name="tiny", learns=folder is not None, **options)


def templated(tokenizer, template, special=(), shown=()):
    """The same tokenizer with another chat template, and more tokens that are not shown, or are."""
    hf = copy.deepcopy(tokenizer.hf)
    hf.add_tokens(list(shown))
    if special:
        hf.add_special_tokens({"additional_special_tokens": list(special)})
    hf.chat_template = template
    return Tokenizer(hf, tokenizer.stop_ids)


@contextlib.contextmanager
def says(made, text):
    """Within the block every reply of the model is this text, whatever was asked."""
    engine, script = made.engine, [*made.tokenizer.encode(text), made.tokenizer.eos_id]
    decode = engine.decode

    def scripted(batch):
        served, row = decode(batch), 0
        logits = torch.zeros_like(served.logits)
        for run in batch.runs():
            if batch.output[run.start : run.end].any():
                logits[row, script[len(made.scheduler.turns[run.slot].reply)]] = 1e4
                row += 1
        return served._replace(logits=logits, likeliest=logits.argmax(-1))

    engine.decode = scripted
    try:
        yield
    finally:
        del engine.decode


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


KEY = {"x-api-key": "root"}


def refused(answer, status, why):
    assert answer.status_code == status and why in answer.json()["error"]["message"], answer.text


def check_shape(answer, path):
    """An answer, or a refusal in the dialect's shape."""
    assert answer.status_code < 500 or answer.status_code in (501, 503), (path, answer.status_code, answer.text[:500])
    if answer.status_code < 400:
        return
    said = answer.json()
    error = said["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str), said
    if path.startswith("/v1/messages"):
        assert said["type"] == "error"
    else:
        assert isinstance(error["code"], str) and "param" in error
    assert answer.headers.get("x-should-retry") in ("false", ["false"]) or answer.status_code in (429, 503)
