"""riftco train-tiny"""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .errors import command

Opt = typer.Option


@command
def train_tiny(
    steps: Annotated[int, Opt("--steps", help="Optimizer steps, 1 or more.")] = 200,
    backend: Annotated[
        str,
        Opt("--backend", autocompletion=options.known("cpu", "cuda", "metal", "tpu"), help="cpu, cuda, metal or tpu."),
    ] = "cpu",
    attention: Annotated[
        str, Opt("--attention", autocompletion=options.ATTENTIONS, help="materialized or flash.")
    ] = "materialized",
    activation_checkpointing: Annotated[
        str,
        Opt("--activation-checkpointing", autocompletion=options.known("disabled", "block"), help="disabled or block."),
    ] = "disabled",
    method: Annotated[str, Opt("--method", autocompletion=options.METHODS, help="full, lora or qlora.")] = "full",
    seed: Annotated[int, Opt("--seed", help="Of the sampler.")] = 0,
    model_seed: Annotated[int, Opt("--model-seed", help="Of the model's first weights.")] = 0,
    output: Annotated[str | None, Opt("--output", help="Save the model or adapter in this new folder.")] = None,
    step_graph: Annotated[bool, Opt("--step-graph", help="CUDA: replay the step as one graph.")] = False,
    log_json: options.LogJson = False,
    debug: options.Debug = False,
) -> None:
    """Train a small decoder from scratch: checks that a machine trains, in seconds.

    Example: riftco train-tiny --steps 200 --backend cpu --attention flash
    """
    from ..train.tiny import TinyRun, train_tiny
    from .console import reporter

    run = TinyRun(steps, backend, attention, activation_checkpointing, method, seed, model_seed, output, step_graph)
    shown = reporter(log_json=log_json)
    result = train_tiny(run, shown)
    shown.note(f"held-out loss {result.before.loss:.3f} -> {result.after.loss:.3f} in {steps} steps")
