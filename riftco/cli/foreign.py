"""Options under the names that PEFT, TRL, transformers, unsloth, llama.cpp and vLLM give them: told by ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from .errors import BAD_INPUT

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # of the click that this typer is made on
ALWAYS_PACKED = "documents are always packed, and none sees another"
ALWAYS_REPLIES = "loss is always on the assistant's replies, or the completion, alone"
# a name elsewhere -> what it is here: the first whose option the command has, or that names none
NAMES: dict[str, Sequence[str]] = {
    "learning-rate": ("--lr",),
    **dict.fromkeys(("r", "lora-r", "lora-rank"), ("--rank",)),
    "lora-alpha": ("--alpha",),
    "lora-dropout": ("--dropout",),
    "lora-target-modules": ("--target-modules",),
    "lora-modules-to-save": ("--modules-to-save",),
    "trainable-token-indices": ("--train-tokens",),
    "use-rslora": ("--rslora",),
    "use-dora": ("--dora",),
    **dict.fromkeys(("num-train-epochs", "num-epochs"), ("--epochs",)),
    "max-steps": ("--steps",),
    **dict.fromkeys(("per-device-train-batch-size", "micro-batch-size"), ("--batch-tokens, which counts tokens",)),
    "batch-size": ("--batch-tokens, which counts tokens", "--chunk"),
    "ubatch-size": ("--chunk",),
    "per-device-eval-batch-size": ("evaluations take --batch-tokens, which counts tokens",),
    "gradient-accumulation-steps": ("--accumulate",),
    **dict.fromkeys(("max-seq-length", "max-seq-len", "cutoff-len", "model-max-length"), ("--max-length",)),
    "lr-scheduler-type": ("--schedule",),
    "warmup-steps": ("--warmup",),
    "warmup-ratio": ("--warmup, which counts steps",),
    "max-grad-norm": ("--gradient-clip",),
    **dict.fromkeys(("optim", "optimizer"), ("--optimizer-state; the optimizer is AdamW",)),
    "load-in-4bit": ("--method qlora", "--weights nf4"),
    "use-peft": ("--method lora",),
    **dict.fromkeys(("bf16", "fp16"), ("--dtype", "--weights")),
    "gradient-checkpointing": ("--activation-checkpointing block",),
    "attn-implementation": ("--attention",),
    **dict.fromkeys(("packing", "padding-free"), (ALWAYS_PACKED,)),
    **dict.fromkeys(("assistant-only-loss", "completion-only-loss", "train-on-inputs"), (ALWAYS_REPLIES,)),
    **dict.fromkeys(("dataset", "dataset-name", "dataset-path", "data-path", "train-file", "train-data"), ("--data",)),
    **dict.fromkeys(("eval-dataset", "validation-file", "eval-file"), ("--eval",)),
    **dict.fromkeys(("val-set-size", "test-size"), ("--eval-split",)),
    "eval-steps": ("--eval-every",),
    "save-steps": ("--save-every",),
    "save-total-limit": ("--keep",),
    "load-best-model-at-end": ("--keep-best",),
    "early-stopping-patience": ("--early-stopping",),
    "resume-from-checkpoint": ("--resume",),
    "report-to": ("--wandb, or --tensorboard",),
    "logging-dir": ("--tensorboard",),
    "logging-steps": ("every step is told",),
    **dict.fromkeys(("output-dir", "outfile", "save-path"), ("--output",)),
    "outtype": ("--type", "--dtype; fewer bits are riftco quantize's"),
    **dict.fromkeys(("model-name-or-path", "model-name", "model-path", "model-id", "base-model"), ("--model",)),
    **dict.fromkeys(("adapter-name-or-path", "adapter-path", "peft-model", "lora-path", "lora"), ("--adapter",)),
    "lora-modules": ("--adapter",),
    **dict.fromkeys(("ctx-size", "n-ctx", "max-model-len", "context-length"), ("--window",)),
    **dict.fromkeys(("parallel", "n-parallel", "max-num-seqs"), ("--slots",)),
    **dict.fromkeys(("cache-type-k", "cache-type-v", "kv-cache-dtype"), ("--cache",)),
    **dict.fromkeys(("draft-max", "num-speculative-tokens"), ("--speculate",)),
    **dict.fromkeys(("max-tokens", "n-predict"), ("--max-new-tokens",)),
    "temp": ("--temperature",),
    **dict.fromkeys(("n-gpu-layers", "gpu-layers"), ("--device; a model lies on one device, whole",)),
    "quantization": ("--weights", "--type"),
    "dtype": ("--weights",),
    "system-prompt": ("--system",),
}


class Command(TyperCommand):
    """A command that knows other programs' names of what it has."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as why:  # not of every word that looks like one: a prompt may
            name = getattr(why, "option_name", "")
            own = {option for parameter in self.params for option in parameter.opts + parameter.secondary_opts}
            if name not in own and (hint := told(name, own)):
                typer.echo(f"riftco: {name}: {hint}", err=True)
                raise typer.Exit(BAD_INPUT) from None
            raise


def told(name: str, own: set[str]) -> str:
    """What to give in place of an option of another name, to a command that has `own`; empty where nobody knows."""
    plain = name.removeprefix("--").replace("_", "-")
    if f"--{plain}" in own:
        return f"here it is --{plain}"
    for hint in NAMES.get(plain, ()):
        option = hint.split()[0].rstrip(",;")
        if option in own:
            return f"here it is {hint}"
        if not option.startswith("--"):
            return hint
    return ""
