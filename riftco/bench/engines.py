"""Engines over random weights, made on their device: the shapes that serving and learning are measured on."""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..adapters import LoraSpec
from ..functional import attention_with_cache
from ..models import Decoder, DecoderConfig, KVCache
from ..models.load import quantize_blocks
from ..serve import Batch, Engine
from ..train.chunked import adjoint_bytes
from .e2e import SIZES, random_model
from .timing import wait

SHAPES: dict[str, dict[str, Any]] = SIZES | {
    "4b": dict(  # as Qwen3-4B
        model_type="qwen3", hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, rope_theta=1e6, max_position_embeddings=40960,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
    ),
    "27b": dict(  # as Gemma 3's text model of that size
        model_type="gemma3_text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=62,
        num_attention_heads=32, num_key_value_heads=16, head_dim=128, vocab_size=262208, sliding_window=1024,
        query_pre_attn_scalar=168, max_position_embeddings=131072, rms_norm_eps=1e-6, tie_word_embeddings=True,
    ),
}  # fmt: skip
METHODS = ("dense", "nf4")
ADAPTER, RANK, LR, SEED = "live", 16, 1e-3, 0


class Wrong(Exception):
    """What is not right is not timed."""


def parser(bench: str, description: str | None, cache: str = "") -> argparse.ArgumentParser:
    """The options that benches of random models share; with a cache's dtype by default, those of an engine too."""
    made = argparse.ArgumentParser(
        prog=f"riftco bench {bench}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--size", choices=SHAPES, default="tiny")
    made.add_argument("--layers", type=int, default=0, help="fewer layers than the size has")
    if cache:
        made.add_argument("--method", choices=METHODS, default="dense")
        made.add_argument("--cache", default=cache, help="float32, float16, bfloat16 or q8_0")
    made.add_argument("--device", default="auto", help="cpu; else a GPU where there is one")
    made.add_argument("--out", type=pathlib.Path, help=f"CSV; default <folder>/<date>-{bench}-<device>.csv")
    return made


def device_of(args: argparse.Namespace) -> str:
    return "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu"


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    return SHAPES[args.size] | ({"num_hidden_layers": args.layers} if args.layers else {})


def random_decoder(args: argparse.Namespace) -> Decoder:
    """Of random weights: float32 on a CPU, else bfloat16; "nf4" packs the linear layers of the blocks."""
    device = device_of(args)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(SEED)
    model = random_model(lambda: Decoder(DecoderConfig.from_hf(shape_of(args))), dtype, device)
    if args.method == "nf4":
        quantize_blocks(model)
    return model


def learning_engine(model: Decoder, **options) -> Engine:
    """An engine with an adapter that learns; options as Engine has them."""
    engine = Engine(model, **options)
    engine.create(ADAPTER, LoraSpec(rank=RANK, alpha=2.0 * RANK), seed=SEED)
    return engine


def random_tokens(engine: Engine, n: int, seed: int = SEED) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(engine.model.config.vocab_size, (n,), generator=generator).tolist()


def read(engine: Engine, slot: int, prompt: list[int]) -> None:
    """Serve a prompt on a slot from its start, chunk by chunk."""
    engine.cut(slot, 0)
    for start in range(0, len(prompt), engine.chunk):
        engine.decode(Batch.of(slot, start, prompt[start : start + engine.chunk], output="none"))


def held_bytes(engine: Engine, reply: int) -> int:
    """What a learn of so many tokens keeps from chunk to chunk."""
    return adjoint_bytes(engine.model, reply) if reply > engine.learner.chunk else 0


def graph_bytes(engine: Engine) -> int:
    """What recorded learns hold for themselves, which no allocation shows."""
    return 0 if engine.learner.step is None else engine.learner.step.pool_bytes


class Whole:
    """Attention of all of a reply's rows at once over a slot's cached prefix, with a graph over the reply."""

    def __init__(self, cache: KVCache, slot: int, prefix: int):
        self.cache = cache
        self.slots, self.positions = torch.tensor([[slot], [prefix]], device=cache.device).unbind()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        cache, place = self.cache.layer(layer)
        out = attention_with_cache(q[0], k[0], v[0], cache, place, self.slots, self.positions, **how)
        assert isinstance(out, Tensor)
        return out[None]


def plain_step(engine: Engine, prefix: int, tokens: list[int], reply: list[int]) -> float:
    """The loss of a reply behind the first rows of slot 0, by one forward and backward over all of it; gradients are
    left on the adapter's shadow."""
    model = engine.model
    ids, target = (torch.tensor(t, device=model.device) for t in (tokens, reply))
    positions = torch.arange(prefix, prefix + len(ids), device=model.device)
    with engine.bank.learning(engine.slots[0].key, ADAPTER):
        hidden = model.run(ids[None], positions, engine.window, None, Whole(engine.cache, 0, prefix))
        loss = model.head_loss(hidden[0], target)
        loss.backward()
    return float(loss.detach())


def milliseconds(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of what the whole call takes, host and device."""
    times = []
    for _ in range(repeats):
        wait(device)
        began = time.perf_counter()
        function()
        wait(device)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)
