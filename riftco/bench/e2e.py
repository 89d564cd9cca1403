"""One LoRA or QLoRA training step of a Llama-shaped model with random weights: tokens/s and peak memory, beside peers.

`python bench/e2e.py --size 8b --method qlora --batch 2 --seq 4096 [--checkpointing]`. Before anything is timed, a tiny
model is compared with transformers, and each competitor's first loss with ln V, what random weights must give.

"riftco graph" is a step of `riftco finetune --step-graph`, on CUDA: the trainer's, from the data to the metric.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import timing
from .machine import machine_columns, reason_of
from .rows import append, file_of

LLAMA = dict(model_type="llama", rope_theta=500000.0, max_position_embeddings=131072, rms_norm_eps=1e-5)
SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        model_type="llama", hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, rope_theta=10000.0, max_position_embeddings=512, rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "smollm2-135m": dict(
        model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, rope_theta=100000.0, max_position_embeddings=8192, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "1b": dict(
        **LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True,
    ),
    "8b": dict(
        **LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
    ),
}  # fmt: skip
RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WARM_UP = 2  # the second step of a graph records it
LOSS_TOLERANCE = 0.05  # of what the loss fell by, between a graph's step and the eager one
MOST_STEPS = 10_000
COLUMNS = (
    "size", "layers", "method", "batch", "seq", "checkpointing", "competitor", "status", "why", "tokens_s", "median_ms",
    "p10_ms", "p90_ms", "steps", "peak_gib", "weights_gib", "first_loss", "last_loss", "dtype", "device", "machine",
    "date", "commit", "torch", "triton", "threads",
)  # fmt: skip
LossOf = Callable[[Tensor], Tensor]


class Wrong(Exception):
    """A competitor whose numbers cannot be right is not timed."""


def random_model(make: Callable[[], Any], dtype: torch.dtype, device: str) -> Any:
    """Built on the device in its dtype: the float32 copy of a large model would not fit beside it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make()
    finally:
        torch.set_default_dtype(before)


def block_linears(model: torch.nn.Module) -> list[str]:
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n]


def riftco_model(shape: dict, method: str, checkpointing: bool, dtype: torch.dtype, device: str):
    """(model, its loss of ids [B, T]) through riftco's public classes."""
    from riftco.adapters import LoraSpec, apply_lora
    from riftco.models import Decoder, DecoderConfig
    from riftco.models.load import quantize_blocks

    config = DecoderConfig.from_hf(shape)
    kind = "block" if checkpointing else "disabled"
    model = random_model(lambda: Decoder(config, activation_checkpointing=kind), dtype, device)
    if method == "qlora":
        quantize_blocks(model)
    apply_lora(model, LoraSpec(rank=RANK, alpha=ALPHA, target_modules=TARGETS), seed=0)
    model.train()

    def loss_of(ids: Tensor) -> Tensor:
        return model.loss(ids, _next_tokens(ids), n_labelled=ids.numel())

    return model, loss_of


def _next_tokens(ids: Tensor) -> Tensor:
    target = torch.full_like(ids, -100)
    target[:, :-1] = ids[:, 1:]
    return target


def transformers_model(shape: dict, method: str, checkpointing: bool, dtype: torch.dtype, device: str):
    """The same with transformers, PEFT and, for QLoRA, bitsandbytes."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**{k: v for k, v in shape.items() if k != "model_type"})
    model = random_model(
        lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa"), dtype, device
    )
    if method == "qlora":
        import bitsandbytes

        for name in block_linears(model):
            linear = model.get_submodule(name)
            packed = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=dtype,
                quant_type="nf4",
                device="meta",
            )
            packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, packed.to(device))
        model.is_loaded_in_4bit = True
    spec = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(model, spec)
    model.train()
    model.enable_input_require_grads()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def liger_model(shape: dict, method: str, checkpointing: bool, dtype: torch.dtype, device: str):
    """transformers with Liger's patches; they stay in this process, so this competitor comes last."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True
    )
    return transformers_model(shape, method, checkpointing, dtype, device)


GRAPH = "riftco graph"
OURS = ("riftco", GRAPH)
COMPETITORS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    **{name: (riftco_model, ()) for name in OURS},
    "transformers": (transformers_model, ("transformers", "peft")),
    "transformers+Liger": (liger_model, ("transformers", "peft", "liger_kernel")),
}


def missing(name: str, method: str, device: str) -> str:
    """Why a competitor cannot run here, or ""."""
    if name == GRAPH and (why := _capture().why_not(torch.device(device))):
        return why
    needs = COMPETITORS[name][1] + (("bitsandbytes",) if method == "qlora" and name not in OURS else ())
    absent = [m for m in needs if importlib.util.find_spec(m) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return "runs on cuda only" if "Liger" in name and device != "cuda" else ""


def disagreement() -> str:
    """How riftco's decoder differs from transformers' on a tiny model with the same weights; "" where it agrees."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from riftco.models import Decoder, DecoderConfig

    shape = SIZES["tiny"]
    with torch.random.fork_rng(devices=[]):  # all on the CPU
        torch.manual_seed(0)
        ours = Decoder(DecoderConfig.from_hf(shape))
        theirs = AutoModelForCausalLM.from_config(
            LlamaConfig(**{k: v for k, v in shape.items() if k != "model_type"}), attn_implementation="eager"
        )
        ids = torch.randint(0, shape["vocab_size"], (2, 64))
    theirs.load_state_dict(ours.state_dict())
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"]
    results = []
    for model, loss in ((ours, ours.loss(ids, _next_tokens(ids))), (theirs, theirs(input_ids=ids, labels=ids).loss)):
        parameters = dict(model.named_parameters())
        results.append((loss, *torch.autograd.grad(loss, [parameters[n] for n in names])))
    for name, a, b in zip(("loss", *names), *results):
        error = float((a - b).detach().abs().max() / b.detach().abs().max())
        if not error < 1e-4:
            return f"{name} is off by {error:.1e} from transformers'"
    return ""


def _capture() -> Any:
    from riftco.train.capture import CudaCapture

    return CudaCapture()


def eager_step(model: torch.nn.Module, loss_of: LossOf, ids: Tensor) -> Callable[[], Tensor]:
    """Forward, backward and torch's AdamW: as every competitor is timed that is not replayed."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, fused=ids.is_cuda)

    def step() -> Tensor:
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def graph_trainer(model, ids: Tensor, method: str):
    """The trainer of `riftco finetune --step-graph` on a token file that holds these rows alone, with its defaults."""
    from riftco.data import TokenArrays, TokenLoader
    from riftco.optim import Adam
    from riftco.train import Schedule, StepGraph, Trainer
    from riftco.train.config import FinetuneConfig

    config = FinetuneConfig(model="", data="", output="", method=method, lr=LEARNING_RATE, step_graph=True)
    optimizer = Adam(
        [p for p in model.parameters() if p.requires_grad],
        lr=config.rate,
        weight_decay=config.weight_decay,
        gradient_clip=config.gradient_clip,
        state=config.moments,
    )
    source = TokenLoader(TokenArrays(ids.cpu().numpy()), ids.numel(), config.seed)
    graph = StepGraph(model, optimizer, note=lambda text: None, capture=_capture())
    schedule = Schedule(config.rate, MOST_STEPS, "constant")
    return Trainer(model, optimizer, source, schedule, device=ids.device, step_graph=graph)


def step_ms(trainer, steps: int) -> tuple[list[float], float]:
    """(milliseconds of each step of a run, the last loss): from metric to metric, as each waits for its step."""
    at: list[float] = []
    sinks, trainer.sinks = trainer.sinks, (lambda metric: at.append(time.perf_counter()),)
    try:
        start = time.perf_counter()
        loss = trainer.run(steps).metrics[-1].loss
    finally:
        trainer.sinks = sinks
    return [1e3 * (after - before) for before, after in itertools.pairwise([start, *at])], loss


def measure(
    name: str, options, shape: dict, dtype: torch.dtype, device: str, eager: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The row of one competitor, which a graph's must equal in its losses where `eager` is the row of its like.

    Raises Wrong, or whatever the competitor raises.
    """
    before = timing.allocated(device)
    torch.manual_seed(0)
    model, loss_of = COMPETITORS[name][0](shape, options.method, options.checkpointing, dtype, device)
    ids = torch.randint(0, shape["vocab_size"], (options.batch, options.seq), device=device)
    weights = timing.allocated(device) - before if device == "cuda" else _bytes_of(model)
    trainer = graph_trainer(model, ids, options.method) if name == GRAPH else None
    step = eager_step(model, loss_of, ids) if trainer is None else lambda: trainer.run(1).metrics[0].loss

    first = float(step())
    expected = math.log(shape["vocab_size"])
    if not abs(first - expected) < 0.1 * expected:
        raise Wrong(f"the first loss is {first:.3f}; random weights must give about ln V = {expected:.3f}")
    for _ in range(WARM_UP - 1):
        step()
    peak = timing.peak_bytes(step, device)
    if trainer is not None:  # which holds what a step made without one takes and gives back
        graph = trainer.step_graph
        if not graph.replayed:
            raise Wrong(graph.summary())
        peak += graph.pool_bytes + sum(p.nbytes for p in model.parameters() if p.requires_grad)
        samples, last = step_ms(trainer, options.steps)
        if graph.drops:
            raise Wrong(f"the graph was dropped while its steps were timed: {', '.join(graph.drops)}")
    else:
        samples = []
        for _ in range(options.steps):
            timing.wait(device)
            start = time.perf_counter()
            loss = step()
            timing.wait(device)
            samples.append(1e3 * (time.perf_counter() - start))
        last = float(loss)
    if not last < first:
        raise Wrong(f"the loss went from {first:.4f} to {last:.4f} on one repeated batch")
    if eager is not None:
        for which, loss in (("first_loss", first), ("last_loss", last)):
            if not abs(loss - eager[which]) < LOSS_TOLERANCE * (eager["first_loss"] - eager["last_loss"]):
                raise Wrong(f"its {which.replace('_', ' ')} is {loss:.4f}, the eager one {eager[which]:.4f}")
    t = timing.summary(samples)
    return {
        "status": "ok", "tokens_s": 1e3 * ids.numel() / t.median_ms, "median_ms": t.median_ms, "p10_ms": t.p10_ms,
        "p90_ms": t.p90_ms, "steps": t.launches, "peak_gib": (peak + weights) / 2**30, "weights_gib": weights / 2**30,
        "first_loss": first, "last_loss": last,
    }  # fmt: skip


def _bytes_of(model: torch.nn.Module) -> int:
    """Bytes of parameters, buffers and 4-bit weights, as the state_dict lists them."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    return sum(storages.values())


def run(options, write: Callable[[dict], None]) -> int:
    """All competitors; returns the exit status."""
    device = options.device
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    shape = dict(SIZES[options.size])
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    common = {
        "size": options.size, "layers": shape["num_hidden_layers"], "method": options.method, "batch": options.batch,
        "seq": options.seq, "checkpointing": options.checkpointing, "dtype": str(dtype).removeprefix("torch."),
        "device": device, **machine_columns(device),
    }  # fmt: skip
    print(", ".join(f"{k} {v}" for k, v in common.items()))
    if importlib.util.find_spec("transformers") is None:
        print("not compared with transformers: not installed")
    elif difference := disagreement():
        print(f"RED, nothing is timed: {difference}")
        write({**common, "competitor": "riftco", "status": "red", "why": difference})
        return 1
    status, eager = 0, None
    for name in COMPETITORS:
        if options.peers is not None and name != "riftco" and name not in options.peers:
            continue
        reason = missing(name, options.method, device)
        if name == GRAPH and not reason and eager is None:
            reason = "there are no eager losses to compare with"
        if reason:
            row: dict[str, Any] = {"status": "missing", "why": reason}
        else:
            try:
                row = measure(name, options, shape, dtype, device, eager if name == GRAPH else None)
            except Wrong as wrong:
                row = {"status": "wrong", "why": str(wrong)}
            except Exception as failed:  # out of memory, for one; reported with its reason
                row = {"status": "failed", "why": reason_of(failed)}
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        print(show(name, row), flush=True)
        write({**common, "competitor": name, **row})
        eager = row if name == "riftco" and row["status"] == "ok" else eager
        status |= int(name in OURS and row["status"] not in ("ok", "missing"))
    return status


def show(name: str, row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return f"  {name:20s} {row['status']:>10s}  {row['why']}"
    return (
        f"  {name:20s} {row['tokens_s']:10.1f} tokens/s  step {row['median_ms']:.1f} ms "
        f"({row['p10_ms']:.1f}-{row['p90_ms']:.1f})  peak {row['peak_gib']:.2f} GiB "
        f"(weights {row['weights_gib']:.2f})  loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
    )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="riftco bench e2e", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    p.add_argument("--size", choices=list(SIZES), default="smollm2-135m")
    p.add_argument("--layers", type=int, help="fewer layers than the size has")
    p.add_argument("--method", choices=["lora", "qlora"], default="qlora")
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--checkpointing", action="store_true", help="keep only each block's input")
    p.add_argument("--steps", type=int, default=5, help="timed steps")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16 on cuda, else float32"
    )
    p.add_argument("--peers", nargs="*", help="only these beside riftco")
    p.add_argument("--out", type=pathlib.Path, help="CSV file, appended to; default <folder>/<date>-e2e-<device>.csv")
    return p


def main(argv: list[str] | None = None, folder: str | pathlib.Path = "bench-results") -> int:
    """The command; returns the exit status, 1 where riftco is wrong or fails."""
    options = parser().parse_args(argv)
    out = file_of(options.out, folder, f"e2e-{options.device}")
    status = run(options, lambda row: append(out, COLUMNS, [row]))
    print(f"written to {out}")
    return status


if __name__ == "__main__":
    sys.exit(main())
