"""One config for the whole family: what a decoder is, whatever file said so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ModelError
from .rotary import Rope

# architecture -> the transformers class that a saved folder names
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
GGUF_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)
_SAME_NAME = (  # here and in config.json
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)
_REQUIRED = object()


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a decoder of the Llama family.

    `attention_bias` is the bias of the q, k and v projections, `output_bias` that of the o projection.
    Layers listed in `no_rope_layers` do not rotate q and k.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: Rope
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    no_rope_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(unknown_architecture(self.architecture, ARCHITECTURES))
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ModelError(f"config: {name} must be a positive integer; got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config: num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.rope.dim != self.head_dim or self.head_dim % 2:
            raise ModelError(
                f"config: head_dim must be even and equal to rope.dim ({self.rope.dim}); got {self.head_dim}"
            )
        if not 0 < self.rms_norm_eps < 1:
            raise ModelError(f"config: rms_norm_eps must be between 0 and 1; got {self.rms_norm_eps!r}")
        outside = [i for i in self.no_rope_layers if not 0 <= i < self.num_layers]
        if outside:
            raise ModelError(f"config: no_rope_layers names layers {outside}; there are {self.num_layers}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From the mapping in a Hugging Face folder's config.json (transformers 4 and 5 spellings)."""
        arch = config.get("model_type")
        if arch not in ARCHITECTURES:
            raise ModelError(unknown_architecture(arch, ARCHITECTURES))
        get = _getter("config.json", config)
        heads, hidden, layers = get("num_attention_heads"), get("hidden_size"), get("num_hidden_layers")
        head_dim = get("head_dim", None) or (128 if arch == "qwen3" else _divide("hidden_size", hidden, heads))
        longest = get("max_position_embeddings")
        _only(get("hidden_act", "silu"), "hidden_act", ("silu", "swish"))
        _only(get("attention_dropout", 0.0), "attention_dropout", (0, None))
        _refuse_window(_hf_window(arch, get), longest)
        bias = bool(get("attention_bias", False))
        eos = get("eos_token_id", None)
        return cls(
            architecture=arch,
            vocab_size=get("vocab_size"),
            hidden_size=hidden,
            intermediate_size=get("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=get("num_key_value_heads", None) or heads,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rope=Rope.from_hf(config, head_dim, default_theta=2e6 if arch == "smollm3" else 1e4),
            rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(get("tie_word_embeddings", arch == "smollm3")),
            attention_bias=arch == "qwen2" or bias,
            output_bias=arch != "qwen2" and bias,
            mlp_bias=bool(get("mlp_bias", False)),
            qk_norm=arch == "qwen3",
            no_rope_layers=_hf_no_rope_layers(arch, get, layers),
            bos_token_id=get("bos_token_id", None),
            eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
        """From a GGUF file's metadata and its tensor names (`rope_freqs.weight` holds the rotation's divisors)."""
        arch = metadata.get("general.architecture")
        if arch not in GGUF_ARCHITECTURES:
            raise ModelError(unknown_architecture(arch, GGUF_ARCHITECTURES))
        get = _getter("the GGUF metadata", metadata, f"{arch}.")
        if get("expert_count", 0):
            raise ModelError(f"config: mixtures of experts are not supported; {arch}.expert_count is not 0")
        heads, hidden, longest = get("attention.head_count"), get("embedding_length"), get("context_length")
        head_dim = get("attention.key_length", None) or _divide("embedding_length", hidden, heads)
        if get("attention.value_length", head_dim) != head_dim:
            raise ModelError("config: attention.value_length must equal attention.key_length")
        _refuse_window(get("attention.sliding_window", None), longest)
        vocab = get("vocab_size", None) or len(metadata.get("tokenizer.ggml.tokens", ()))
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        return cls(
            architecture=arch,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=get("feed_forward_length"),
            num_layers=get("block_count"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", None) or heads,
            head_dim=head_dim,
            max_position_embeddings=longest,
            rope=Rope.from_gguf(get, head_dim, tensors.get("rope_freqs.weight"), longest),
            rms_norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm=arch == "qwen3",
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_ids=() if eos is None else (eos,),
        )

    def to_hf(self) -> dict[str, Any]:
        """The mapping of a config.json that transformers 4 and 5 read."""
        out: dict[str, Any] = {
            "model_type": self.architecture,
            "architectures": [ARCHITECTURES[self.architecture]],
            "hidden_act": "silu",
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "sliding_window": None,
            "use_sliding_window": False,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": None,
            "eos_token_id": self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None,
            **self.rope.to_hf(),
        }
        for name in _SAME_NAME:
            out[name] = getattr(self, name)
        if self.architecture == "smollm3":
            out["no_rope_layers"] = [int(i not in self.no_rope_layers) for i in range(self.num_layers)]
        return out

    def replace(self, **changes: Any) -> DecoderConfig:
        return dataclasses.replace(self, **changes)


def unknown_architecture(arch: object, accepted) -> str:
    return f"architecture {arch!r} is not supported; accepted: {', '.join(accepted)}"


def _getter(where: str, mapping: Mapping[str, Any], prefix: str = "") -> Callable[..., Any]:
    def get(name: str, default: Any = _REQUIRED) -> Any:
        value = mapping.get(prefix + name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ModelError(f"config: {where} lacks {prefix}{name}")
        return default

    return get


def _divide(name: str, size: int, heads: int) -> int:
    if not isinstance(size, int) or not isinstance(heads, int) or heads < 1 or size % heads:
        raise ModelError(f"config: {name} ({size!r}) must be a multiple of the number of heads ({heads!r})")
    return size // heads


def _only(value: Any, name: str, accepted: tuple) -> None:
    if value not in accepted:
        raise ModelError(f"config: {name} {value!r} is not supported; accepted: {accepted[0]!r}")


def _hf_window(arch: str, get: Callable[..., Any]) -> int | None:
    """The sliding window that some layer uses, or None."""
    window = get("sliding_window", None)
    if arch != "mistral" and not get("use_sliding_window", False):
        window = None
    if window is None or (arch in ("qwen2", "qwen3") and get("max_window_layers", 28) >= get("num_hidden_layers")):
        window = None
    kinds = set(get("layer_types", ())) - {"full_attention"}
    if kinds and window is None:
        raise ModelError(f"config: layer_types {sorted(kinds)} are not supported; accepted: full_attention")
    return window


def _refuse_window(window: int | None, longest: int) -> None:
    if window is not None and window < longest:
        raise ModelError(
            f"config: a sliding window ({window} of {longest} positions) is not supported; accepted: none, or one that "
            "covers the whole context"
        )


def _hf_no_rope_layers(arch: str, get: Callable[..., Any], layers: int) -> tuple[int, ...]:
    if arch != "smollm3":
        return ()
    interval = get("no_rope_layer_interval", 4)
    rotates = get("no_rope_layers", None) or [(i + 1) % interval != 0 for i in range(layers)]
    if len(rotates) < layers:
        raise ModelError(f"config: no_rope_layers must have an entry for each of {layers} layers; got {len(rotates)}")
    return tuple(i for i in range(layers) if not rotates[i])
