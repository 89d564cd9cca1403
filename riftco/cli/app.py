"""All commands."""

from __future__ import annotations

import json
import os

import typer

from .. import __version__
from . import (
    bench,
    chat,
    data,
    doctor,
    evaluate,
    explain,
    export,
    finetune,
    generate,
    memory,
    merge,
    quantize,
    quickstart,
    serve,
    train_tiny,
)
from .errors import BAD_INPUT
from .foreign import Command

SHARED = ("finetune", "bench")  # what several processes may run together

app = typer.Typer(
    name="riftco",
    help="Fine-tune language models (QLoRA, LoRA, full) and serve them; on NVIDIA, Apple, TPU, CPU.",
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(as_json: bool) -> None:
    """For people at once; as JSON with what riftco stands on, which a bug report or a script asks for."""
    if not as_json:
        typer.echo(f"riftco {__version__}")
        return
    from ..doctor.machine import versions

    typer.echo(json.dumps(versions()))


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
    as_json: bool = typer.Option(False, "--json", help="With --version: those of Python and the packages, too."),
) -> None:
    if version:
        _print_version(as_json)
        raise typer.Exit
    if as_json:
        raise typer.BadParameter("it goes with --version; commands have one of their own", param_hint="--json")
    if context.invoked_subcommand is None:
        raise typer.BadParameter("name a command; riftco --help lists them", param_hint="COMMAND")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and context.invoked_subcommand not in SHARED:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(
                f"riftco: torchrun started several processes, which only {' and '.join(SHARED)} share work among; "
                "start this command without it",
                err=True,
            )
        raise typer.Exit(BAD_INPUT)


app.command("quickstart", cls=Command, short_help="Fine-tune a small model on sample data, in a few minutes.")(
    quickstart.quickstart
)
app.command("finetune", cls=Command, short_help="Fine-tune a model on your data: QLoRA, LoRA or full.")(
    finetune.finetune
)
app.command("train-tiny", cls=Command, short_help="Train a tiny model from scratch, to check a machine.")(
    train_tiny.train_tiny
)
app.command("evaluate", cls=Command)(evaluate.evaluate)
app.command("chat", cls=Command, short_help="Talk with a model, correct it, and have it learn.")(chat.chat)
app.command("serve", cls=Command, short_help="Serve a model over HTTP, and have it learn.")(serve.serve)
app.command("generate", cls=Command)(generate.generate)
app.command("merge", cls=Command, short_help="Put an adapter into the weights of a model.")(merge.merge)
app.command("export", cls=Command, short_help="Write a model or an adapter as another program reads it.")(export.export)
app.command("quantize", cls=Command)(quantize.quantize)
app.command("memory", cls=Command, short_help="Where a training step's memory goes, and what fits.")(memory.memory)
app.command("explain", cls=Command, short_help="Which implementation each op runs on a device, and why.")(
    explain.explain
)
app.command("doctor", cls=Command, short_help="What of this machine works, as text for a bug report.")(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")
