"""riftco evaluate"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .errors import command


@command
def evaluate(
    model: options.Model,
    data: Annotated[str, typer.Option("--data", help="JSONL to evaluate on.")],
    adapter: options.Adapter = None,
    weights: options.Weights = "auto",
    device: options.Device = "auto",
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", help="Most tokens at once.")] = 2048,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Longest example [the model's context].")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut longer examples instead of refusing them.")] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad lines out and count them.")] = False,
    log_json: options.LogJson = False,
    debug: options.Debug = False,
) -> None:
    """Loss, perplexity and token accuracy of a model on a file.

    Example: riftco evaluate --model model.gguf --adapter run/adapter --data held_out.jsonl
    """
    from ..train.use import evaluate_file, load
    from .console import reporter

    shown = reporter(log_json=log_json)
    loaded = load(model, adapter=adapter, weights=weights, device=device)
    result, read = evaluate_file(
        loaded, data, batch_tokens=batch_tokens, max_length=max_length, truncate=truncate, skip_bad=skip_bad
    )
    if read.skipped:
        shown.note(f"skipped {len(read.skipped)} bad lines; the first: {read.skipped[0]}")
    if read.truncated:
        shown.note(f"cut {read.truncated} examples")
    shown.evaluation(data, result)
