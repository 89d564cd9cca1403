"""Text out of a decoder: greedy, or sampled with temperature and top-p, over a K/V cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import tpu
from .compiled import compiled_decoder
from .decoder import Decoder, too_long
from .errors import ModelError
from .kv_cache import KVCache
from .tokenizer import Text, Tokenizer


def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    template: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yield the reply piece by piece, as whole characters.

    Args:
        model: the decoder; it is in evaluation mode while this runs.
        tokenizer: its tokenizer.
        prompt: plain text to continue, or OpenAI-style messages to answer through the chat template.
        max_new_tokens: at most this many; generation also ends at the tokenizer's `stop_ids`, which are not shown.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and sampled.
        top_p: sample among the likeliest tokens that together hold this probability.
        seed: of the sampling; None takes a fresh one.
        template: options of the chat template, such as `enable_thinking`.

    Raises:
        ModelError: an option out of range, or a prompt that with its reply does not fit the model's context.
    """
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=True)
    else:
        ids = tokenizer.encode(tokenizer.render_chat(prompt, add_generation_prompt=True, **(template or {})))
    tokens = generate_tokens(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        stop_ids=tokenizer.stop_ids,
        seed=seed,
    )
    return _as_text(tokenizer, tokens)


def generate_tokens(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop_ids: Collection[int] = (),
    seed: int | None = None,
) -> Iterator[int]:
    """Yield new token ids; options as in `generate`, checked at once. A stop id ends it and is not yielded."""
    if not prompt_ids:
        raise ModelError("the prompt is empty; accepted: at least one token")
    if model.device.type == tpu.DEVICE_TYPE:
        raise ModelError("generation is not made for tpu; load the model on cpu to generate")
    if max_new_tokens < 1:
        raise ModelError(f"max_new_tokens must be at least 1; got {max_new_tokens}")
    if not temperature >= 0:
        raise ModelError(f"temperature must not be negative; got {temperature}")
    if not 0 < top_p <= 1:
        raise ModelError(f"top_p must be above 0 and at most 1; got {top_p}")
    total = len(prompt_ids) + max_new_tokens
    if total > model.config.max_position_embeddings:
        raise ModelError(
            f"{too_long(total, model.config)} (prompt {len(prompt_ids)}, new {max_new_tokens}); "
            "shorten the prompt or max_new_tokens"
        )
    return _run(model, list(prompt_ids), max_new_tokens, temperature, top_p, frozenset(stop_ids), seed)


def _run(model, prompt_ids, max_new_tokens, temperature, top_p, stop_ids, seed) -> Iterator[int]:
    device, training = model.device, model.training
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    cache = KVCache(model.config, 1, len(prompt_ids) + max_new_tokens, dtype=model.dtype, device=device)
    step, last = torch.tensor([prompt_ids], device=device), torch.zeros(1, dtype=torch.int64)
    model.eval()
    try:
        compiled = compiled_decoder(model, cache) if device.type == "cpu" and max_new_tokens > 1 else None
        for _ in range(max_new_tokens):
            with torch.no_grad():
                if compiled is None or step.shape[1] > 1:
                    logits = model.logits(model.hidden(step, kv_cache=cache)[:, -1])
                else:
                    logits = compiled.logits(step[0], cache.begin([(0, 1)]), last)
                step = sample(logits, temperature, top_p, generator).unsqueeze(-1)
            token = int(step)
            if token in stop_ids:
                return
            yield token
    finally:
        model.train(training)


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None = None) -> Tensor:
    """One token id per row of logits [B, V]."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float()
    # below the largest, and no colder than float32 can divide by: nothing overflows on the way to 0
    probs = ((logits - logits.amax(-1, keepdim=True)) / max(temperature, 1e-30)).softmax(-1)
    if top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses top_p still counts
        probs = torch.zeros_like(probs).scatter(-1, index, ordered.masked_fill(outside, 0.0))
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


def _as_text(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    text = Text(tokenizer)
    for token in tokens:
        if piece := text.add(token):
            yield piece
    if rest := text.rest():
        yield rest
