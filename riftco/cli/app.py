"""All commands."""

from __future__ import annotations

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
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"riftco {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
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
