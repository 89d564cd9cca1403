"""riftco explain"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import options
from .errors import command


@command
def explain(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            autocompletion=options.known("cpu", "cuda", "mps", "xla"),
            help="cpu, cuda, mps (or metal), xla (or tpu).",
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            autocompletion=options.known("float32", "float16", "bfloat16", "float64"),
            help="float32, float16, bfloat16 or float64.",
        ),
    ] = "float32",
    op: Annotated[str | None, typer.Option("--op", help="Only ops whose name contains this.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Which attention backward a run of this model would pick.")
    ] = None,
    log_json: options.LogJson = False,
    debug: options.Debug = False,
) -> None:
    """For each op and device: which implementation runs, and why; or why there is none.

    Example: riftco explain --device cuda --op attention
    """
    from ..train.use import explained

    rows = explained(device, dtype, op, model)
    width = max(len(row["op"]) for row in rows)
    for row in rows:
        if log_json:
            typer.echo(json.dumps(row))
        else:
            typer.echo(f"{row['op']:{width}s} {row['device']:5s} {row['implementation']}  ({row['why']})")
