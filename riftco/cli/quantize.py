"""riftco quantize"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .errors import command


@command
def quantize(
    model: options.Model,
    output: options.Output,
    type: Annotated[
        str, typer.Option("--type", help="nf4 (a folder for transformers + bitsandbytes), or GGUF: q8_0, q4_0, ...")
    ] = "nf4",
    tokenizer: options.WithTokenizer = True,
    debug: options.Debug = False,
) -> None:
    """Write a model with its matrices in fewer bits.

    Example: riftco quantize --model folder --type nf4 --output folder-nf4

    nf4 quantises the linear layers of the blocks; q8_0, q5_1, q5_0, q4_1 and q4_0 write a GGUF file.
    """
    from ..train.convert import quantize as run

    for line in run(model, output, type, tokenizer=tokenizer):
        typer.echo(line)
