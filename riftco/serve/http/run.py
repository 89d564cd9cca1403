"""`riftco serve`: a model loaded, an engine around it, and uvicorn in front."""

from __future__ import annotations

import contextlib
import errno
import pathlib
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn

from ...adapters import LoraSpec
from ...models import base_digest
from ...train.use import load_to_serve
from ..adopt import adopt, weights_for
from ..engine import Engine
from ..saved_slots import SlotFiles
from ..scheduler import LEARN_DUTY
from ..store import Store
from .app import create_app
from .auth import LOOPBACK, Keys, check_bind
from .service import Service


def serve_forever(
    model: str, *, host: str, port: int, slots: int, window: int | None, cache: str, chunk: int | None,
    learn_chunk: int | None, speculate: int,
    train_dir: str | None, rank: int, adapter: str, lr_max: float, journal: int, api_key: str | None,
    admin_key: str | None, insecure: bool, cuda_graphs: bool, learn_graphs: bool | None, weights: str,
    device: str, slot_save_path: str | None = None, cors_origins: Sequence[str] = (),
    tls: Mapping[str, Any] | None = None, duty: float = LEARN_DUTY, template: Mapping[str, Any] | None = None,
    tuned: str | None = None, reasoning: bool = True,
) -> None:  # fmt: skip
    """Until SIGINT or SIGTERM: what is being answered ends first, then what was learned is on disk already.

    `tuned` is a PEFT folder that `adapter` begins as; it serves whoever names no other. `tls` is uvicorn's
    (ssl_keyfile, ssl_certfile, ...).
    """
    keys = Keys(api_key, admin_key)
    check_bind(host, keys, insecure)
    check_free(host, port)
    loaded, held = load_to_serve(model, weights=weights_for(tuned, weights), device=device)
    digest = base_digest(model) if train_dir or slot_save_path else ""
    store = None if train_dir is None else Store(train_dir, digest, model)
    engine = Engine(
        loaded.model, slots=slots, window=window, cache_dtype=cache, chunk=chunk, learn_chunk=learn_chunk,
        store=store, journal=journal, lr_range=(1e-7, lr_max), cuda_graphs=cuda_graphs, learn_graphs=learn_graphs,
    )  # fmt: skip
    if tuned is not None:
        adopt(engine, adapter, tuned)
    elif store is not None and adapter not in engine.bank.adapters:
        engine.create(adapter, LoraSpec(rank=rank, alpha=2.0 * rank))
    scales = {adapter: 1.0} if tuned is not None else {}
    engine.prepare(scales, guesses=speculate)
    name = pathlib.Path(model).stem if model.endswith(".gguf") else pathlib.Path(model).name
    service = Service(
        engine,
        loaded.tokenizer,
        name=name,
        learns=store is not None,
        speculate=speculate,
        duty=duty,
        template=template,
        reasoning=reasoning,
    )
    service.scales = scales
    known = bool(api_key or admin_key) or insecure
    app = create_app(
        service, keys=keys, train_dir=None if train_dir is None else pathlib.Path(train_dir),
        slot_files=None if slot_save_path is None else SlotFiles(slot_save_path, digest),
        hosts=None if known else LOOPBACK, origins=cors_origins,
    )  # fmt: skip
    print(
        f"riftco: {name} on {loaded.device}, weights {held}, cache {engine.cache.dtype}, {slots} slots of "
        f"{engine.window} tokens", file=sys.stderr, flush=True,
    )  # fmt: skip
    uvicorn.run(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=10, **(tls or {}))


def check_free(host: str, port: int) -> None:
    """Refuse an address that is taken before a model is loaded and a folder made; uvicorn binds it after that.

    Raises:
        ValueError: something listens there already, this user may not, or the host is none, or another machine.
    """
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as why:
        raise ValueError(f"--host {host}: {getattr(why, 'strerror', None) or 'no name of a host'}") from None
    here = False
    for family, kind, protocol, _, address in places:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as asked:
            asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn's: a port just left is free
            if family == socket.AF_INET6:
                asked.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                asked.bind(address)
                here = True
            except OSError as why:
                if why.errno == errno.EADDRINUSE:
                    raise ValueError(f"--port {port} is in use on {host}; stop what listens, or name another") from None
                if why.errno == errno.EACCES:
                    raise ValueError(f"--port {port} is not this user's to listen on; name one above 1023") from None
    if not here:
        raise ValueError(f"--host {host} is no address of this machine")


def tls_options(
    keyfile: str | None, certfile: str | None, password: str | None = None, ca_certs: str | None = None
) -> dict[str, Any]:
    """uvicorn's options for TLS; none of them: plain HTTP.

    Raises:
        ValueError: a key without a certificate, or the other way round.
        FileNotFoundError: one of the files is not there.
    """
    if not certfile and (keyfile or password or ca_certs):
        raise ValueError("TLS needs --ssl-certfile, and --ssl-keyfile where the key is not in the same file")
    if not certfile:
        return {}
    for file in (keyfile, certfile, ca_certs):
        if file is not None and not pathlib.Path(file).is_file():
            raise FileNotFoundError(f"{file}: no such file")
    required = {"ssl_ca_certs": ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED} if ca_certs else {}
    return {"ssl_keyfile": keyfile, "ssl_certfile": certfile, "ssl_keyfile_password": password, **required}
