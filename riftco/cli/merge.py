"""riftco merge"""

from __future__ import annotations

import typer

from . import options
from .errors import command


@command
def merge(
    model: options.Model,
    adapter: options.NamedAdapter,
    output: options.Output,
    dtype: options.Dtype = "auto",
    weights: options.Weights = "auto",
    tokenizer: options.WithTokenizer = True,
    debug: options.Debug = False,
) -> None:
    """Put an adapter into the weights and write the model as a Hugging Face folder.

    Example: riftco merge --model folder --adapter run/adapter --output merged

    The base is held as the adapter was trained over it (--weights says otherwise): over NF4, its dequantised weights
    are what the delta is added to. The size of the delta is printed.
    """
    from ..train.convert import merge as run

    for line in run(model, adapter, output, dtype=dtype, weights=weights, tokenizer=tokenizer):
        typer.echo(line)
