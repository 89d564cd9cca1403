"""riftco memory"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import options
from .errors import command

Opt = typer.Option


@command
def memory(
    model: Annotated[
        str, Opt("--model", help="A .gguf file, a Hugging Face folder, or a config.json alone: random weights.")
    ],
    top: Annotated[int, Opt("--top", help="How many tensors to list.")] = 20,
    tokens: Annotated[int, Opt("--tokens", help="Tokens of a row.")] = 512,
    batch: Annotated[int, Opt("--batch", help="Rows.")] = 1,
    method: Annotated[str, Opt("--method", help="qlora, lora or full.")] = "qlora",
    rank: Annotated[int, Opt("--rank", help="Of the adapter.")] = 16,
    dtype: Annotated[str, Opt("--dtype", help="auto, fp32 or bf16.")] = "auto",
    activation_checkpointing: Annotated[
        str, Opt("--activation-checkpointing", help="As in riftco finetune.")
    ] = "disabled",
    attention: Annotated[str, Opt("--attention", help="flash or materialized.")] = "flash",
    optimizer_state: Annotated[str, Opt("--optimizer-state", help="auto, contiguous, paged or paged-8bit.")] = "auto",
    device: options.Device = "auto",
    log_json: options.LogJson = False,
    debug: options.Debug = False,
) -> None:
    """Where one training step's memory goes: the largest tensors at its peak, their sources and owners.

    Example: riftco memory --model model.gguf --method lora --tokens 2048 --top 20
    """
    from ..memory.step import memory_of

    report = memory_of(
        model, method=method, tokens=tokens, batch=batch, rank=rank, top=top, device=device, dtype=dtype,
        activation_checkpointing=activation_checkpointing, attention=attention, optimizer_state=optimizer_state,
    )  # fmt: skip
    if log_json:
        typer.echo(json.dumps(report.asdict()))
    else:
        for line in report.lines():
            typer.echo(line)
