"""One config for every family: what a decoder is, whatever file said so."""

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
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
ACTIVATIONS = ("silu", "gelu_tanh")
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
REQUIRED = object()


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a decoder.

    Attributes:
        architecture: transformers' model_type: the family whose files this config is read from and written to. The
            decoder itself goes by the other attributes alone.
        attention_bias, output_bias, mlp_bias: biases of the q, k and v projections, of the o projection, of the MLP.
        fused_projections: q, k, v are one layer, `qkv_proj`, and gate, up are one, `gate_up_proj` (Phi-3).
        qk_norm: each head of q and k is normed before it is rotated.
        post_norms: what attention and the MLP return is normed before it is added (Gemma).
        norm_offset: added to the weights of all norms; 1 for Gemma.
        activation: of the gate: "silu" or "gelu_tanh".
        embedding_scale: multiplies the embeddings.
        rope: the rotation. Layers listed in `no_rope_layers` do not rotate q and k.
        sliding_window: how many tokens, itself among them, a token sees in the layers listed in `sliding_layers`.
        local_rope: the rotation of those layers, where it differs.
        query_pre_attn_scalar: scores are divided by its square root; head_dim unless given.
        attention_softcap, final_softcap: > 0 bend scores, or logits, into -cap..cap.
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
    fused_projections: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    activation: str = "silu"
    embedding_scale: float = 1.0
    no_rope_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    local_rope: Rope | None = None
    query_pre_attn_scalar: float | None = None
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
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
        for rope in (self.rope, self.local_rope or self.rope):
            if not 0 < rope.dim <= self.head_dim or rope.dim % 2 or self.head_dim % 2:
                raise ModelError(
                    f"config: head_dim must be even, and rotate in an even number of its dimensions; got {rope.dim} "
                    f"of {self.head_dim}"
                )
        if not 0 < self.rms_norm_eps < 1:
            raise ModelError(f"config: rms_norm_eps must be between 0 and 1; got {self.rms_norm_eps!r}")
        if self.activation not in ACTIVATIONS:
            raise ModelError(f"config: activation must be one of {', '.join(ACTIVATIONS)}; got {self.activation!r}")
        for name in ("no_rope_layers", "sliding_layers"):
            outside = [i for i in getattr(self, name) if not 0 <= i < self.num_layers]
            if outside:
                raise ModelError(f"config: {name} names layers {outside}; there are {self.num_layers}")
        window = self.sliding_window
        if window is None and self.sliding_layers:
            raise ModelError("config: layers with a sliding window need sliding_window")
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
            raise ModelError(f"config: sliding_window must be a positive integer; got {window!r}")
        for name in ("attention_softcap", "final_softcap", "query_pre_attn_scalar", "embedding_scale"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, (int, float)) or not 0 <= value < float("inf")):
                raise ModelError(f"config: {name} must be a number from 0 on; got {value!r}")

    def window_of(self, layer: int) -> int | None:
        """How many tokens a token of `layer` sees, itself among them; None where that is all of them."""
        window = self.sliding_window
        if window is None or layer not in self.sliding_layers or window >= self.max_position_embeddings:
            return None
        return window

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From the mapping in a Hugging Face folder's config.json (transformers 4 and 5 spellings)."""
        from . import config_hf

        return config_hf.read(config)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
        """From a GGUF file's metadata and its tensors by name, of which the rotation's divisors are read."""
        from . import config_gguf

        return config_gguf.read(metadata, tensors)

    def to_hf(self) -> dict[str, Any]:
        """The mapping of a config.json that transformers 4 and 5 read."""
        from . import config_hf

        return config_hf.write(self)

    def replace(self, **changes: Any) -> DecoderConfig:
        return dataclasses.replace(self, **changes)


def unknown_architecture(arch: object, accepted) -> str:
    return f"architecture {arch!r} is not supported; accepted: {', '.join(accepted)}"


def getter(where: str, mapping: Mapping[str, Any], prefix: str = "") -> Callable[..., Any]:
    """get(name, default): the value in `mapping`, where None counts as missing; without a default it is required."""

    def get(name: str, default: Any = REQUIRED) -> Any:
        value = mapping.get(prefix + name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ModelError(f"config: {where} lacks {prefix}{name}")
        return default

    return get


def divided(name: str, size: int, heads: int) -> int:
    """The head size where a file does not name it."""
    if not isinstance(size, int) or not isinstance(heads, int) or heads < 1 or size % heads:
        raise ModelError(f"config: {name} ({size!r}) must be a multiple of the number of heads ({heads!r})")
    return size // heads
