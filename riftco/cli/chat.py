"""riftco chat"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .errors import command

Opt = typer.Option
HELP = """/learn TEXT   learn TEXT in place of the last answer; what serves changes with /promote only
/promote      serve what was learned from the next question on
/undo [N]     take the last N steps of learning back (1); what was promoted goes on serving
/new          forget the conversation
/quit"""


@command
def chat(
    model: options.Model,
    train_dir: Annotated[
        str | None,
        Opt("--train-dir", help="Keep the adapter here; without it nothing outlasts the chat."),
    ] = None,
    tuned: Annotated[
        str | None, Opt("--adapter", help="A PEFT folder, such as riftco finetune writes, to talk with and learn on.")
    ] = None,
    rank: Annotated[int, Opt("--rank", help="Of a new adapter.")] = 8,
    adapter: Annotated[str, Opt("--adapter-id", help="The adapter that learns; made where there is none.")] = "live",
    lr: Annotated[float, Opt("--lr", help="Learning rate of a step.")] = 2e-3,
    steps: Annotated[int, Opt("--steps", min=1, help="Steps of one /learn.")] = 4,
    system: Annotated[str | None, Opt("--system", help="A system message.")] = None,
    window: Annotated[int | None, Opt("--window", help="Tokens that the conversation may have.")] = None,
    cache: Annotated[
        str, Opt("--cache", autocompletion=options.CACHES, help="float32, float16, bfloat16 or q8_0.")
    ] = "q8_0",
    max_new_tokens: Annotated[int, Opt("--max-new-tokens", help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, Opt("--temperature", help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, Opt("--seed", help="Of the sampling.")] = None,
    template_kwargs: options.TemplateKwargs = None,
    weights: options.ServedWeights = "auto",
    device: options.Device = "auto",
    debug: options.Debug = False,
) -> None:
    """Talk with a model, correct its answers, and have it learn them in place.

    Example: riftco chat --model model.gguf --train-dir mine
    """
    from ..serve import Sampling
    from ..serve.session import open_chat
    from ..train.use import template_options

    talk = open_chat(
        model, train_dir=train_dir, rank=rank, window=window, cache=cache, weights=weights, device=device,
        system=system, tuned=tuned, adapter=adapter, template=template_options(template_kwargs),
    )  # fmt: skip
    sampling = Sampling(temperature=temperature, seed=seed)
    typer.echo(f"weights: {talk.held}", err=True)
    typer.echo("/help for what can be done besides talking")
    try:
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return
            if line in ("/quit", "/exit"):
                return
            if line == "/help":
                typer.echo(HELP)
            elif line == "/new":
                talk.restart()
            elif line.split(" ")[0] in ("/learn", "/promote", "/undo"):
                _do(talk, line, lr, steps)
            elif line.startswith("/"):
                typer.echo(f"{line.split()[0]}: no such command; /help lists them", err=True)
            elif line:
                _ask(talk, line, max_new_tokens, sampling)
    finally:
        talk.close()


def _ask(talk, line: str, max_new_tokens: int, sampling) -> None:
    """A question that does not fit does not end the chat."""
    from ..serve import Refused

    try:
        for piece in talk.chat.say(line, max_new_tokens=max_new_tokens, sampling=sampling):
            typer.echo(piece, nl=False)
        typer.echo()
    except Refused as why:
        typer.echo(f"riftco: {why}; /new forgets the conversation", err=True)


def _do(talk, line: str, lr: float, steps: int) -> None:
    """A command that a refusal does not end the chat for."""
    from ..serve import Refused

    word, _, rest = line.partition(" ")
    try:
        if word == "/promote":
            typer.echo(f"version {talk.promote()} serves from the next question on")
        elif word == "/undo":
            if rest.strip() and not rest.strip().isdigit():
                raise Refused(f"/undo takes a number; got {rest.strip()!r}")
            typer.echo(f"back at step {talk.undo(int(rest or 1))}")
        elif not rest.strip():
            raise Refused("/learn takes the answer that should have come: /learn TEXT")
        else:
            outcomes = talk.chat.correct(rest.strip(), lr=lr, steps=steps)
            for outcome in outcomes:
                if not outcome.success:
                    raise Refused(str(outcome.reason))
                typer.echo(f"loss {outcome.loss_before:.3f}  {outcome.n_labelled} tokens  {outcome.ms:.0f} ms")
            if outcomes[-1].loss_before > outcomes[0].loss_before:  # too large steps, or an answer that it had
                raise Refused(f"the loss rose; /undo {len(outcomes)} takes that back, a smaller --lr may teach it")
    except Refused as why:
        typer.echo(f"riftco: {why}", err=True)
