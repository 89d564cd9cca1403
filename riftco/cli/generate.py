"""riftco generate"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .errors import command


@command
def generate(
    model: options.Model,
    prompt: Annotated[str, typer.Option("--prompt", help="What to answer, or with --raw what to continue.")],
    adapter: options.Adapter = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue plain text, without the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Most tokens of the answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample among the likeliest of this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the sampling.")] = None,
    template_kwargs: options.TemplateKwargs = None,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    debug: options.Debug = False,
) -> None:
    """Answer a prompt with a model, with or without an adapter.

    Example: riftco generate --model model.gguf --adapter run/adapter --prompt "I put two jars of honey in the attic."
    """
    from ..models import ModelError
    from ..models import generate as pieces
    from ..train.use import load, messages, template_options

    if raw and (system or template_kwargs):
        raise ModelError("--raw goes without the chat template, which --system and --chat-template-kwargs are for")
    template = template_options(template_kwargs)
    loaded = load(model, adapter=adapter, weights=weights, device=device)
    asked = prompt if raw else messages(prompt, system)
    for piece in pieces(
        loaded.model,
        loaded.tokenizer,
        asked,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        template=template,
    ):
        typer.echo(piece, nl=False)
    typer.echo()
