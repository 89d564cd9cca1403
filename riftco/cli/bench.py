"""riftco bench: the measurements of riftco.bench, each with its own options; rows go to bench-results/."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import typer

from .errors import command

app = typer.Typer(help="Measure, mostly with random weights.", no_args_is_help=True, rich_markup_mode=None)
BENCHES = {
    "ops": ("run", "Every op beside its peers."),
    "e2e": ("e2e", "A training step beside transformers + PEFT + bitsandbytes."),
    "step-profile": ("step_profile", "Where a step's time goes on a GPU, kernel by kernel."),
    "step-graph": ("step_graph", "A training step, eager and recorded."),
    "many-gpus": ("many_gpus", "torchrun: tokens/s of several GPUs."),
    "learn-live": ("learn_live", "What neighbours notice of a learn."),
    "learn-memory": ("learn_memory", "A learn's memory and time over long windows."),
    "decode": ("decode", "Tokens/s of decoding, beside the bandwidth's limit."),
    "decode-cpu": ("decode_cpu", "Tokens/s of a real model on a CPU, compiled or not."),
    "serve-load": ("serve_load", "A server under many clients, or everything at once."),
    "load-memory": ("load_memory", "The peak of loading a sharded model as NF4."),
}
ALL = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _passed_on(module: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        status = importlib.import_module(f"..bench.{module}", __package__).main(context.args, folder="bench-results")
        if status:
            raise typer.Exit(status)

    return run


for _name, (_module, _help) in BENCHES.items():
    app.command(_name, help=_help, context_settings=ALL)(command(_passed_on(_module)))
