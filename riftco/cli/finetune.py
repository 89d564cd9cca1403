"""riftco finetune"""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from . import options
from .errors import STOPPED, command

Opt = typer.Option


@command
def finetune(
    model: Annotated[str | None, Opt("--model", help="A .gguf file, or a Hugging Face folder.")] = None,
    data: Annotated[str | None, Opt("--data", help="Chat JSONL, or tokens as .npy, .npz, .safetensors.")] = None,
    output: Annotated[str | None, Opt("--output", help="A new folder for the run; the adapter is in it.")] = None,
    eval: Annotated[str | None, Opt("--eval", help="Held-out JSONL, evaluated before and after.")] = None,
    eval_split: Annotated[float | None, Opt("--eval-split", help="Or: hold out this fraction of --data.")] = None,
    method: Annotated[
        str | None, Opt("--method", autocompletion=options.METHODS, help="qlora (default), lora or full.")
    ] = None,
    rank: Annotated[int | None, Opt("--rank", help="LoRA rank [16].")] = None,
    alpha: Annotated[float | None, Opt("--alpha", help="The adapter is scaled by alpha / rank [32].")] = None,
    dropout: Annotated[float | None, Opt("--dropout", help="Dropout of the adapter's input [0].")] = None,
    target_modules: Annotated[
        str | None,
        Opt(
            "--target-modules",
            help="all-linear (default), names joined by commas (embed_tokens and lm_head too), or an expression.",
        ),
    ] = None,
    exclude_modules: Annotated[
        str | None, Opt("--exclude-modules", help="Names or an expression that are left out.")
    ] = None,
    dora: Annotated[bool | None, Opt("--dora", help="Learn each output feature's length apart (DoRA).")] = None,
    rslora: Annotated[bool | None, Opt("--rslora", help="Scale by alpha / sqrt(rank).")] = None,
    rank_pattern: Annotated[
        str | None, Opt("--rank-pattern", help="Ranks that differ: q_proj=4,layers.0.mlp.up_proj=32.")
    ] = None,
    alpha_pattern: Annotated[str | None, Opt("--alpha-pattern", help="Alphas that differ, likewise.")] = None,
    modules_to_save: Annotated[
        str | None, Opt("--modules-to-save", help="Modules trained whole beside the adapter: lm_head,norm.")
    ] = None,
    train_tokens: Annotated[
        str | None, Opt("--train-tokens", help="Rows of the embedding to train: 5,7,100-110.")
    ] = None,
    bias: Annotated[
        str | None,
        Opt(
            "--bias",
            autocompletion=options.known("none", "all", "lora_only"),
            help="Biases to train: none (default), all or lora_only.",
        ),
    ] = None,
    lr: Annotated[float | None, Opt("--lr", help="Highest learning rate [2e-4; full: 2e-5].")] = None,
    schedule: Annotated[
        str | None,
        Opt(
            "--schedule",
            autocompletion=options.known("constant", "linear", "cosine", "wsd"),
            help="constant, linear (default), cosine or wsd.",
        ),
    ] = None,
    warmup: Annotated[int | None, Opt("--warmup", help="Steps of linear warm-up [5].")] = None,
    steps: Annotated[int | None, Opt("--steps", help="Optimizer steps; else --epochs.")] = None,
    epochs: Annotated[int | None, Opt("--epochs", help="Passes over the data [1].")] = None,
    batch_tokens: Annotated[int | None, Opt("--batch-tokens", help="Most tokens of a micro-batch [2048].")] = None,
    accumulate: Annotated[
        int | None, Opt("--accumulate", help="Micro-batches of one step, over all processes [one a process].")
    ] = None,
    parallel: Annotated[
        str | None,
        Opt(
            "--parallel",
            autocompletion=options.known("auto", "ddp", "fsdp"),
            help="torchrun's processes hold the weights each (ddp) or together (fsdp); auto: full fsdp, else ddp.",
        ),
    ] = None,
    chunk: Annotated[
        int | None, Opt("--chunk", help="Train longer examples in chunks of so many tokens, exactly: less memory.")
    ] = None,
    max_length: Annotated[int | None, Opt("--max-length", help="Longest example [the model's context].")] = None,
    truncate: Annotated[bool | None, Opt("--truncate", help="Cut longer examples instead of refusing them.")] = None,
    skip_bad: Annotated[bool | None, Opt("--skip-bad", help="Leave bad lines out and count them.")] = None,
    stream: Annotated[bool | None, Opt("--stream", help="Read --data as it is needed: for huge files.")] = None,
    auto_micro_batch: Annotated[
        bool | None, Opt("--auto-micro-batch", help="Out of memory: halve the micro-batches, same update.")
    ] = None,
    offload_activations: Annotated[
        bool | None,
        Opt("--offload-activations", help="CUDA: saved activations wait in host memory for the backward."),
    ] = None,
    offload_budget: Annotated[
        str | None, Opt("--offload-budget", help="Most host memory for them, such as 32GiB [no limit].")
    ] = None,
    step_graph: Annotated[
        bool | None, Opt("--step-graph", help="CUDA: replay steps of a geometry that comes again as one graph.")
    ] = None,
    duty_cycle: Annotated[
        float | None, Opt("--duty-cycle", help="Compute this fraction of the time, leave the rest to others [1].")
    ] = None,
    weight_decay: Annotated[float | None, Opt("--weight-decay", help="Decoupled weight decay [0].")] = None,
    gradient_clip: Annotated[float | None, Opt("--gradient-clip", help="Largest global gradient norm [1].")] = None,
    seed: Annotated[int | None, Opt("--seed", help="Of the order, the adapter and dropout [0].")] = None,
    device: Annotated[
        str | None,
        Opt(
            "--device",
            "--backend",
            autocompletion=options.DEVICES,
            help="auto (default), cpu, cuda, cuda:N, mps (or metal) or tpu.",
        ),
    ] = None,
    dtype: Annotated[
        str | None, Opt("--dtype", autocompletion=options.DTYPES, help="auto (default), fp32 or bf16.")
    ] = None,
    weights: Annotated[
        str | None,
        Opt(
            "--weights",
            autocompletion=options.known("auto", "nf4", "packed", "bf16", "fp32"),
            help="How the base is held: auto (default: qlora nf4, else --dtype), nf4, packed, bf16, fp32.",
        ),
    ] = None,
    activation_checkpointing: Annotated[
        str | None,
        Opt(
            "--activation-checkpointing",
            autocompletion=options.CHECKPOINTING,
            help="disabled (default), selective or block: ever less memory.",
        ),
    ] = None,
    attention: Annotated[
        str | None,
        Opt(
            "--attention",
            autocompletion=options.ATTENTIONS,
            help="flash (default), or materialized: quadratic memory, for comparison.",
        ),
    ] = None,
    optimizer_state: Annotated[
        str | None,
        Opt(
            "--optimizer-state",
            autocompletion=options.MOMENTS,
            help="How Adam keeps its moments: contiguous, paged (qlora's) or paged-8bit.",
        ),
    ] = None,
    save_every: Annotated[int | None, Opt("--save-every", help="Steps between checkpoints [100].")] = None,
    keep: Annotated[int | None, Opt("--keep", help="How many checkpoints to keep [2].")] = None,
    eval_every: Annotated[int | None, Opt("--eval-every", help="Steps between evaluations [only at the ends].")] = None,
    early_stopping: Annotated[
        int | None, Opt("--early-stopping", help="Stop after so many evaluations without a better loss [never].")
    ] = None,
    keep_best: Annotated[
        bool | None, Opt("--keep-best", help="The result is the weights of the lowest held-out loss.")
    ] = None,
    metrics: Annotated[str | None, Opt("--metrics", help="Append metrics to this JSONL file.")] = None,
    tensorboard: Annotated[str | None, Opt("--tensorboard", help="Write metrics for TensorBoard here.")] = None,
    wandb: Annotated[str | None, Opt("--wandb", help="Send metrics to this project of Weights & Biases.")] = None,
    resume: Annotated[bool, Opt("--resume", help="Go on with the run in --output.")] = False,
    log_json: options.LogJson = False,
    debug: options.Debug = False,
) -> None:
    """Fine-tune a model on chat JSONL and write a PEFT adapter (or, with --method full, a model).

    Example: riftco finetune --model model.gguf --data chat.jsonl --eval-split 0.1 --output run

    Ctrl-C finishes the micro-batch, saves a checkpoint and exits with code 130; --resume --output run goes on.
    Several GPUs: torchrun --nproc-per-node 2 -m riftco finetune ...
    """
    given: dict[str, Any] = {k: v for k, v in locals().items() if k not in ("resume", "log_json", "debug")}
    from ..train.finetune import prepare
    from ..train.ranks import Ranks
    from ..train.run import Reporter
    from .console import reporter

    with Ranks.join().until_done() as ranks:
        shown = reporter(log_json=log_json) if ranks.main else Reporter()
        run = prepare(given, resume=resume, reporter=shown, ranks=ranks)
        result = run.train()
    if result.stopped and result.step == result.total_steps:  # in the last evaluation: nothing is left to resume
        shown.note(f"all {result.step} steps are done, written to {result.weights}; stopped before their evaluation")
        raise typer.Exit(STOPPED)
    if result.stopped:
        shown.note(
            f"stopped at step {result.step} of {result.total_steps}; "
            f"go on with: riftco finetune --resume --output {result.output}"
        )
        raise typer.Exit(STOPPED)
    shown.note(f"{result.step} steps in {result.seconds:.0f} s; written to {result.weights}")
    made, base = shlex.quote(str(result.weights)), shlex.quote(run.config.model)
    tuned = f"--model {made}" if run.config.method == "full" else f"--model {base} --adapter {made}"
    shown.note(f"ask it something: riftco generate {tuned} --prompt '...'")
