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
    result, skipped = evaluate_file(loaded, data, batch_tokens=batch_tokens, skip_bad=skip_bad)
    if skipped:
        shown.note(f"skipped {len(skipped)} bad lines; the first: {skipped[0]}")
    shown.evaluation(data, result)
