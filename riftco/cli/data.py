"""riftco data inspect"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .errors import command
from .foreign import Command

app = typer.Typer(help="Look at training data.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None: ...


@app.command("inspect", cls=Command, short_help="Show what of each example is trained on.")
@command
def inspect(
    file: Annotated[str, typer.Argument(help="A JSONL file.")],
    model: options.Model,
    count: Annotated[int, typer.Option("--count", help="How many examples to show.")] = 5,
    line: Annotated[int | None, typer.Option("--line", help="Show the example of this line only.")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Longest example.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut longer examples.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out and count them.")] = False,
    debug: options.Debug = False,
) -> None:
    """Show what of each example is trained on (prompt dim, trained text marked), weights, token counts, lengths.

    Example: riftco data inspect chat.jsonl --model model.gguf
    """
    from rich.console import Console
    from rich.text import Text

    from ..train.use import inspected

    console = Console(highlight=False)
    seen = inspected(file, model, max_length=max_length, truncate=truncate, skip_bad=skip_bad)
    for example in seen.chosen(count, line):
        console.rule(f"line {example.line}: {example.tokens} tokens, {example.labelled} trained", style="dim")
        text = Text()
        for piece, weight in example.pieces:
            shown = piece if console.is_terminal or not weight else f"⟦{piece}⟧"
            text.append(shown, style="bold green" if weight else "dim")
            if weight not in (0.0, 1.0):
                text.append(f" (weight {weight:g})", style="yellow")
        console.print(text, soft_wrap=True)
    for row in seen.summary:
        console.print(row, markup=False, soft_wrap=True)
