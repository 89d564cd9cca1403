"""riftco memory"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from . import options
from .errors import FAILED, command

Opt = typer.Option


@command
def memory(
    model: Annotated[
        str, Opt("--model", help="A .gguf file, a Hugging Face folder, or a config.json alone: random weights.")
    ],
    top: Annotated[int, Opt("--top", help="How many tensors to list.")] = 20,
    tokens: Annotated[int, Opt("--tokens", help="Tokens of a row.")] = 512,
    batch: Annotated[int, Opt("--batch", help="Rows.")] = 1,
    method: Annotated[str, Opt("--method", autocompletion=options.METHODS, help="qlora, lora or full.")] = "qlora",
    rank: Annotated[int, Opt("--rank", help="Of the adapter.")] = 16,
    dtype: Annotated[str, Opt("--dtype", autocompletion=options.DTYPES, help="auto, fp32 or bf16.")] = "auto",
    activation_checkpointing: Annotated[
        str, Opt("--activation-checkpointing", autocompletion=options.CHECKPOINTING, help="As in riftco finetune.")
    ] = "disabled",
    attention: Annotated[
        str, Opt("--attention", autocompletion=options.ATTENTIONS, help="flash or materialized.")
    ] = "flash",
    optimizer_state: Annotated[
        str, Opt("--optimizer-state", autocompletion=options.MOMENTS, help="auto, contiguous, paged or paged-8bit.")
    ] = "auto",
    predict: Annotated[
        bool, Opt("--predict", help="Predict the peak from the config, for any --device; nothing is run or allocated.")
    ] = False,
    budget: Annotated[
        str | None, Opt("--budget", help="A size such as 24GiB (bytes without a unit): predict, and say what fits.")
    ] = None,
    batch_tokens: Annotated[
        int | None,
        Opt("--batch-tokens", help="To predict: as in riftco finetune, for --tokens, --batch."),
    ] = None,
    max_length: Annotated[int | None, Opt("--max-length", help="To predict: as in riftco finetune.")] = None,
    accumulate: Annotated[int | None, Opt("--accumulate", help="To predict: as in riftco finetune.")] = None,
    target_modules: Annotated[str | None, Opt("--target-modules", help="To predict: as in riftco finetune.")] = None,
    dora: Annotated[bool | None, Opt("--dora", help="To predict: as in riftco finetune.")] = None,
    modules_to_save: Annotated[str | None, Opt("--modules-to-save", help="To predict: as in riftco finetune.")] = None,
    device: options.Device = "auto",
    log_json: options.LogJson = False,
    debug: options.Debug = False,
) -> None:
    """Where one training step's memory goes: the largest tensors at its peak, their sources and owners; or, with
    --predict or --budget, what its peak will be. Exits with 1 where what was asked for fits the budget in no way.

    Example: riftco memory --model model.gguf --method lora --tokens 2048 --top 20

    Example: riftco memory --model config.json --batch-tokens 8192 --device cuda --budget 24GiB
    """
    from ..memory.budget import forecast
    from ..memory.step import memory_of

    shared: dict[str, Any] = {
        "method": method, "rank": rank, "dtype": dtype, "activation_checkpointing": activation_checkpointing,
        "attention": attention, "optimizer_state": optimizer_state,
    }  # fmt: skip
    asked = {
        "batch_tokens": batch_tokens, "max_length": max_length, "accumulate": accumulate,
        "target_modules": target_modules, "dora": dora, "modules_to_save": modules_to_save,
    }  # fmt: skip
    report: Any
    if predict or budget is not None:
        report = forecast(model, shared | asked, tokens=tokens, batch=batch, budget=budget, device=device)
    else:
        if given := [f"--{name.replace('_', '-')}" for name, value in asked.items() if value is not None]:
            raise ValueError(f"{given[0]} belongs to a prediction: add --predict, or leave it out")
        report = memory_of(model, tokens=tokens, batch=batch, top=top, device=device, **shared)
    if log_json:
        typer.echo(json.dumps(report.asdict()))
    else:
        for line in report.lines():
            typer.echo(line)
    if budget is not None and not any(fit.fits for fit in report.fits):
        raise typer.Exit(FAILED)
