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

SHARED = ("finetune", "bench")  # what several processes may run together

app = typer.Typer(
    name="riftco",
    help="Fine-tune language models: full, LoRA, QLoRA; on NVIDIA, Apple, TPU, CPU.",
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


app.command("quickstart")(quickstart.quickstart)
app.command("finetune")(finetune.finetune)
app.command("train-tiny")(train_tiny.train_tiny)
app.command("evaluate")(evaluate.evaluate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("generate")(generate.generate)
app.command("merge")(merge.merge)
app.command("export")(export.export)
app.command("quantize")(quantize.quantize)
app.command("memory")(memory.memory)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(bench.app, name="bench")
