"""DecoderConfig from the metadata of a GGUF file, by the keys and the defaults that llama.cpp has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .config import DecoderConfig, divided, getter, unknown_architecture
from .errors import ModelError
from .rotary import Rope

# GGUF's name -> transformers'
GGUF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # no weights of a layer
_NO_ROPE_PERIOD = {"smollm3": 4}  # each so many layers the last one does not rotate; no key says so
_GEMMA_PERIOD = {"gemma2": 2, "gemma3": 6}  # each so many layers the last one sees everything
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # layers of the models whose scores are divided by sqrt(hidden / heads)


def read(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    arch = metadata.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ModelError(unknown_architecture(arch, GGUF_ARCHITECTURES))
    get = getter("the GGUF metadata", metadata, f"{arch}.")
    if get("expert_count", 0):
        raise ModelError(f"config: mixtures of experts are not supported; {arch}.expert_count is not 0")
    heads, hidden, longest = get("attention.head_count"), get("embedding_length"), get("context_length")
    head_dim = get("attention.key_length", None) or divided("embedding_length", hidden, heads)
    if get("attention.value_length", head_dim) != head_dim:
        raise ModelError("config: attention.value_length must equal attention.key_length")
    layers, gemma = get("block_count"), arch in _GEMMA_PERIOD
    window = get("attention.sliding_window", 4096 if arch == "gemma2" else None) or None
    rope = _rope(arch, get, head_dim, tensors, longest)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    name = GGUF_ARCHITECTURES[arch]
    if arch == "llama" and window is not None:
        name = "mistral"  # llama.cpp knows no difference; transformers' Llama has no window
    return DecoderConfig(
        architecture=name,
        vocab_size=get("vocab_size", None) or len(metadata.get("tokenizer.ggml.tokens", ())),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", None) or heads,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope=rope,
        rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        fused_projections=arch == "phi3",
        qk_norm=arch in ("qwen3", "gemma3"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        no_rope_layers=tuple(i for i in range(layers) if (i + 1) % _NO_ROPE_PERIOD.get(arch, layers + 1) == 0),
        sliding_window=window,
        sliding_layers=_sliding_layers(arch, get, layers, window),
        local_rope=Rope(rope.dim, float(get("rope.freq_base_swa", 1e4))) if arch == "gemma3" else None,
        query_pre_attn_scalar=_score_divisor(arch, layers, hidden, heads, head_dim) if gemma else None,
        attention_softcap=float(get("attn_logit_softcapping", 50.0)) if arch == "gemma2" else 0.0,
        final_softcap=float(get("final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0)) if gemma else 0.0,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=() if eos is None else (eos,),
    )


def _sliding_layers(arch: str, get: Callable[..., Any], layers: int, window: int | None) -> tuple[int, ...]:
    """Which layers have the window: Gemma's pattern, else all of them."""
    if window is None:
        return ()
    pattern = get("attention.sliding_window_pattern", _GEMMA_PERIOD.get(arch, 0))
    if isinstance(pattern, (list, tuple)):
        if len(pattern) < layers:
            raise ModelError(
                f"config: attention.sliding_window_pattern must have an entry for each of {layers} layers; "
                f"got {len(pattern)}"
            )
        return tuple(i for i in range(layers) if pattern[i])
    return tuple(i for i in range(layers) if not pattern or (i + 1) % pattern)


def _score_divisor(arch: str, layers: int, hidden: int, heads: int, head_dim: int) -> float:
    """No key holds Gemma's query_pre_attn_scalar: llama.cpp tells the 27B models by their number of layers."""
    return float(divided("embedding_length", hidden, heads) if layers == _GEMMA_27B[arch] else head_dim)


def _rope(arch: str, get: Callable[..., Any], head_dim: int, tensors: Mapping[str, Any], longest: int) -> Rope:
    dim, theta = get("rope.dimension_count", head_dim), float(get("rope.freq_base", 1e4))
    if dim != head_dim and arch != "phi3":
        raise ModelError(f"config: rope.dimension_count {dim} is not supported; accepted: the head size, {head_dim}")
    kind = get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelError(f"config: rope.scaling.type {kind!r} is not supported; accepted: none, linear, yarn, longrope")
    original = get("rope.scaling.original_context_length", longest)
    found = {name: [float(f) for f in tensors[name]] for name in DIVISORS if tensors.get(name) is not None}
    if "rope_freqs.weight" in found:
        if kind != "none":
            raise ModelError(f"config: rope_freqs.weight together with rope.scaling.type {kind!r} is not supported")
        factors = found["rope_freqs.weight"]
        same = {"short_factor": factors, "long_factor": factors, "factor": 1.0, "attention_factor": 1.0}
        return Rope(dim, theta, "longrope", {**same, "original_max_position_embeddings": longest})
    if found:
        if len(found) != 2 or kind not in ("none", "longrope"):
            raise ModelError(
                "config: rope_factors_short.weight and rope_factors_long.weight belong together, beside no other "
                f"rope.scaling.type; got {', '.join(found)} and {kind!r}"
            )
        both = {"short_factor": found[DIVISORS[1]], "long_factor": found[DIVISORS[2]], "factor": longest / original}
        attention = get("rope.scaling.attn_factor", None)
        if attention is not None:
            both["attention_factor"] = float(attention)
        return Rope(dim, theta, "longrope", {**both, "original_max_position_embeddings": original})
    if kind == "none":
        return Rope(dim, theta)
    scaling: dict[str, Any] = {"factor": float(get("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (beta := get(f"rope.scaling.{key}", None)) is not None:
                scaling[name] = float(beta)
        attention = get("rope.scaling.yarn_attn_factor", get("rope.scaling.attn_factor", 1.0))
        if attention != 1:  # llama.cpp multiplies YaRN's own by it
            scaling["attention_factor"] = float(attention) * (0.1 * math.log(scaling["factor"]) + 1)
    return Rope(dim, theta, kind, scaling)
