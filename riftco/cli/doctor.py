"""riftco doctor"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import options
from .errors import FAILED, command


@command
def doctor(
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            autocompletion=options.known("cpu", "cuda", "mps", "xla"),
            help="cpu, cuda, mps (or metal), xla (or tpu); may be repeated.",
        ),
    ] = None,
    op: Annotated[str | None, typer.Option("--op", help="Only ops whose name contains this; no training.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    debug: options.Debug = False,
) -> None:
    """Report this machine for a bug report: versions, devices, every op's small cases and short trainings on each.

    Exits with 0 when all that is here works, else with 1.

    Example: riftco doctor --device cpu
    """
    from ..doctor import examine

    report = examine(device or (), op, (lambda line: None) if as_json else typer.echo)
    if as_json:
        typer.echo(json.dumps(report.asdict(), indent=1))
    if report.failures:
        raise typer.Exit(FAILED)
