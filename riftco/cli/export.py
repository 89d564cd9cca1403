"""riftco export"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .errors import command


@command
def export(
    model: options.Model,
    output: options.Output,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            autocompletion=options.known("gguf-lora", "gguf", "hf"),
            help="gguf-lora (the adapter for llama.cpp), gguf or hf (the model).",
        ),
    ] = "gguf",
    adapter: options.Adapter = None,
    dtype: options.Dtype = "auto",
    weights: options.Weights = "auto",
    tokenizer: options.WithTokenizer = True,
    debug: options.Debug = False,
) -> None:
    """Write a model, or its adapter alone, in the form of another program.

    Example: riftco export --model folder --adapter run/adapter --format gguf-lora --output adapter.gguf

    gguf and hf merge the adapter first, where one is named. riftco quantize writes GGUF files of fewer bits.
    """
    from ..train.convert import export as run

    for line in run(model, output, format, adapter=adapter, dtype=dtype, weights=weights, tokenizer=tokenizer):
        typer.echo(line)
