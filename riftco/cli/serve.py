"""riftco serve"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .errors import command

Opt = typer.Option


@command
def serve(
    model: options.Model,
    host: Annotated[str, Opt("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Opt("--port", min=1, max=65535, help="Port to listen on.")] = 8080,
    slots: Annotated[int, Opt("--slots", min=1, help="Conversations held at once.")] = 4,
    window: Annotated[int | None, Opt("--window", help="Tokens of a slot; the model's context unless given.")] = None,
    cache: Annotated[
        str, Opt("--cache", autocompletion=options.CACHES, help="float32, float16, bfloat16 or q8_0.")
    ] = "q8_0",
    chunk: Annotated[
        int | None,
        Opt(
            "--chunk", min=1, help="The most rows of a forward; 512, and on a GPU 2048 while nobody waits for a token."
        ),
    ] = None,
    learn_chunk: Annotated[
        int | None, Opt("--learn-chunk", min=1, help="Rows of a learn's chunk; 2048 on a GPU, else --chunk.")
    ] = None,
    speculate: Annotated[int, Opt("--speculate", min=0, help="Tokens to guess from the text so far.")] = 0,
    train_dir: Annotated[
        str | None, Opt("--train-dir", help="Learn, and keep what was learned here; without it nothing learns.")
    ] = None,
    tuned: Annotated[
        str | None,
        Opt("--adapter", help="A PEFT folder, such as riftco finetune writes: serves everyone; may learn on."),
    ] = None,
    rank: Annotated[int, Opt("--rank", help="Of a new adapter.")] = 8,
    adapter: Annotated[str, Opt("--adapter-id", help="The adapter that learns; made where there is none.")] = "live",
    lr_max: Annotated[float, Opt("--lr-max", help="The largest learning rate that a request may ask for.")] = 1e-2,
    journal: Annotated[int, Opt("--journal", min=0, help="How many steps can be undone.")] = 8,
    learn_duty: Annotated[
        float,
        Opt("--learn-duty", envvar="LEARN_DUTY", help="Part of the time to learn in while others are served; 1: all."),
    ] = 0.1,
    template_kwargs: Annotated[
        str | None, Opt("--chat-template-kwargs", help="JSON: options of the chat template where a request has none.")
    ] = None,
    reasoning_format: Annotated[
        str,
        Opt(
            "--reasoning-format",
            help="auto: <think>..</think> before an answer is its reasoning_content, or thinking; none: a part of it.",
        ),
    ] = "auto",
    api_key: Annotated[str | None, Opt("--api-key", envvar="RIFTCO_API_KEY", help="Asked of every caller.")] = None,
    admin_key: Annotated[
        str | None, Opt("--admin-key", envvar="RIFTCO_ADMIN_KEY", help="Asked of who learns, promotes or undoes.")
    ] = None,
    slot_save_path: Annotated[
        str | None, Opt("--slot-save-path", help="Folder that /slots/ID?action=save writes; without it nothing does.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        Opt("--cors-origin", help="A site whose pages may use this server; repeatable; * is all."),
    ] = None,
    ssl_keyfile: Annotated[str | None, Opt("--ssl-keyfile", help="TLS: the private key (PEM).")] = None,
    ssl_certfile: Annotated[str | None, Opt("--ssl-certfile", help="TLS: the certificate chain (PEM).")] = None,
    ssl_keyfile_password: Annotated[
        str | None, Opt("--ssl-keyfile-password", envvar="RIFTCO_SSL_PASSWORD", help="TLS: the key's password.")
    ] = None,
    ssl_ca_certs: Annotated[
        str | None, Opt("--ssl-ca-certs", help="TLS: callers must show a certificate that one of these signed.")
    ] = None,
    insecure: Annotated[bool, Opt("--insecure", help="Listen to other machines without a key.")] = False,
    cuda_graphs: Annotated[
        bool, Opt("--cuda-graphs/--no-cuda-graphs", help="Record decode steps on a GPU; replies do not depend on it.")
    ] = True,
    learn_graphs: Annotated[
        bool | None,
        Opt(
            "--learn-graphs/--no-learn-graphs",
            help="Record learns on a GPU, whose memory then stays taken; what is learned does not depend on it; "
            "default: as --cuda-graphs.",
        ),
    ] = None,
    weights: options.ServedWeights = "auto",
    device: options.Device = "auto",
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP, in OpenAI's, Anthropic's and llama.cpp's forms, and learn in place.

    Example: riftco serve --model model.gguf --train-dir mine
    """
    from ..serve.http.run import serve_forever, tls_options
    from ..train.use import template_options

    if not 0 < learn_duty <= 1:
        raise ValueError(f"--learn-duty must be above 0 and at most 1; got {learn_duty:g}")
    if reasoning_format not in ("auto", "none"):
        raise ValueError(f"--reasoning-format must be auto or none; got {reasoning_format!r}")
    template = template_options(template_kwargs)
    tls = tls_options(ssl_keyfile, ssl_certfile, ssl_keyfile_password, ssl_ca_certs)
    serve_forever(
        model, host=host, port=port, slots=slots, window=window, cache=cache, chunk=chunk, learn_chunk=learn_chunk,
        speculate=speculate, train_dir=train_dir, rank=rank, adapter=adapter, lr_max=lr_max, journal=journal,
        api_key=api_key, admin_key=admin_key, insecure=insecure, cuda_graphs=cuda_graphs, learn_graphs=learn_graphs,
        weights=weights, device=device, slot_save_path=slot_save_path, cors_origins=cors_origin or (), tls=tls,
        duty=learn_duty, template=template, tuned=tuned, reasoning=reasoning_format == "auto",
    )  # fmt: skip
