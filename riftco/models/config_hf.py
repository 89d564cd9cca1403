"""DecoderConfig from and to the config.json of a Hugging Face folder.

What a config.json leaves out has the default that transformers gives the family, not one of ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .config import ARCHITECTURES, DecoderConfig, divided, getter, unknown_architecture
from .errors import ModelError
from .rotary import Rope

GEMMA = ("gemma2", "gemma3_text")
WINDOW_EVERYWHERE = ("mistral", "phi3")  # in every layer, if there is one
_HEAD_DIM = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}
_THETA = {"smollm3": 2e6, "gemma3_text": 1e6}
_WINDOW = {"mistral": 4096, "gemma2": 4096, "gemma3_text": 4096}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_LOCAL_THETA = 1e4  # of Gemma 3's sliding layers
# of Gemma 3's text model, where a config with images leaves them out
_GEMMA3_TEXT = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
_NULL_COUNTS = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")  # null there means none
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


def read(config: Mapping[str, Any]) -> DecoderConfig:
    if config.get("model_type") == "gemma3":
        config = _text_part(config)
    arch = config.get("model_type")
    if arch not in ARCHITECTURES:
        raise ModelError(unknown_architecture(arch, [*ARCHITECTURES, "gemma3"]))
    get = getter("config.json", config)
    heads, hidden, layers = get("num_attention_heads"), get("hidden_size"), get("num_hidden_layers")
    head_dim = get("head_dim", _HEAD_DIM.get(arch)) or divided("hidden_size", hidden, heads)
    _refuse_dropout(get)
    gemma = arch in GEMMA
    bias = arch not in ("mistral", "phi3") and bool(get("attention_bias", False))
    window, sliding = _windows(arch, config, get, layers)
    rope, local_rope = _ropes(arch, config, head_dim)
    eos = get("eos_token_id", None)
    return DecoderConfig(
        architecture=arch,
        vocab_size=get("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", None) or heads,
        head_dim=head_dim,
        max_position_embeddings=get("max_position_embeddings"),
        rope=rope,
        rms_norm_eps=float(get("rms_norm_eps", 1e-5 if arch == "phi3" else 1e-6)),
        tie_word_embeddings=bool(get("tie_word_embeddings", gemma or arch == "smollm3")),
        attention_bias=arch == "qwen2" or bias,
        output_bias=arch != "qwen2" and bias,
        mlp_bias=arch in ("llama", "smollm3") and bool(get("mlp_bias", False)),
        fused_projections=arch == "phi3",
        qk_norm=arch in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        activation=_activation(get, gemma),
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        no_rope_layers=_no_rope_layers(arch, get, layers),
        sliding_window=window,
        sliding_layers=sliding,
        local_rope=local_rope,
        query_pre_attn_scalar=float(get("query_pre_attn_scalar", 256)) if gemma else None,
        attention_softcap=_softcap(config, "attn_logit_softcapping", 50.0 if arch == "gemma2" else None, gemma),
        final_softcap=_softcap(config, "final_logit_softcapping", 30.0 if arch == "gemma2" else None, gemma),
        bos_token_id=get("bos_token_id", None),
        eos_token_ids=tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
    )


def write(c: DecoderConfig) -> dict[str, Any]:
    arch = c.architecture
    params = c.rope.to_hf()
    out: dict[str, Any] = {
        "model_type": arch,
        "architectures": [ARCHITECTURES[arch]],
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "sliding_window": c.sliding_window,
        "bos_token_id": c.bos_token_id,
        "pad_token_id": None,
        "eos_token_id": c.eos_token_ids[0] if len(c.eos_token_ids) == 1 else list(c.eos_token_ids) or None,
        "rope_parameters": params,
        "rope_theta": c.rope.theta,
        "rope_scaling": None if c.rope.kind == "default" else {k: v for k, v in params.items() if k != "rope_theta"},
    }
    for name in _SAME_NAME:
        out[name] = getattr(c, name)
    kinds = ["sliding_attention" if i in c.sliding_layers else "full_attention" for i in range(c.num_layers)]
    if arch not in WINDOW_EVERYWHERE and arch != "llama":
        out |= {"layer_types": kinds, "use_sliding_window": bool(c.sliding_layers)}
    if arch == "smollm3":
        out["no_rope_layers"] = [int(i not in c.no_rope_layers) for i in range(c.num_layers)]
    if arch == "phi3":
        out["partial_rotary_factor"] = params["partial_rotary_factor"] = c.rope.dim / c.head_dim
        out["original_max_position_embeddings"] = params.get(
            "original_max_position_embeddings", c.max_position_embeddings
        )
    activation = "gelu_pytorch_tanh" if c.activation == "gelu_tanh" else "silu"
    out["hidden_activation" if arch in GEMMA else "hidden_act"] = activation
    if arch in GEMMA:
        out |= {
            "query_pre_attn_scalar": _whole(c.query_pre_attn_scalar or c.head_dim),
            "attn_logit_softcapping": c.attention_softcap or None,
            "final_logit_softcapping": c.final_softcap or None,
        }
    if arch == "gemma3_text":
        local = c.local_rope or c.rope
        out |= {
            "rope_parameters": {"full_attention": params, "sliding_attention": local.to_hf()},
            "rope_local_base_freq": local.theta,
        }
    return out


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config of a Gemma 3 with images says of its text model, which leaves out what is as in transformers."""
    given = config.get("text_config")
    if not isinstance(given, Mapping):
        raise ModelError(f"config: text_config of gemma3 must be a JSON object; got {given!r}")
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id")}
    found = {k: v for k, v in {**ids, **given}.items() if v is not None or k in _NULL_COUNTS}
    return {**_GEMMA3_TEXT, **found, "model_type": "gemma3_text"}


def _whole(value: float) -> int | float:
    """An integer where it is one: transformers' Gemma wants no other."""
    return int(value) if value == int(value) else value


def _refuse_dropout(get: Callable[..., Any]) -> None:
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        value = get(name, 0.0)
        if value != 0:
            raise ModelError(f"config: {name} {value!r} is not supported; accepted: 0")
    if get("use_bidirectional_attention", False):
        raise ModelError("config: use_bidirectional_attention is not supported; accepted: causal attention")


def _activation(get: Callable[..., Any], gemma: bool) -> str:
    name = "hidden_activation" if gemma else "hidden_act"
    value = get(name, "gelu_pytorch_tanh" if gemma else "silu")
    if value not in _ACTIVATIONS:
        raise ModelError(f"config: {name} {value!r} is not supported; accepted: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _softcap(config: Mapping[str, Any], name: str, default: float | None, used: bool) -> float:
    """A key that is null means none; one that is missing means the family's default."""
    value = config.get(name, default) if used else None
    return float(value) if isinstance(value, (int, float)) else value or 0.0


def _ropes(arch: str, config: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope | None]:
    """The rotation, and that of the sliding layers where it differs."""
    theta = _THETA.get(arch, 1e4)
    if arch != "gemma3_text":
        return Rope.from_hf(config, head_dim, theta, partial=arch == "phi3"), None
    given = config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config: rope parameters must be a JSON object; got {given!r}")
    full = given.get("full_attention") or config.get("rope_scaling") or {}
    local = dict(given.get("sliding_attention") or {})
    local.setdefault("rope_theta", config.get("rope_local_base_freq") or _LOCAL_THETA)
    return Rope.from_hf(config, head_dim, theta, full), Rope.from_hf(config, head_dim, theta, local)


def _windows(
    arch: str, config: Mapping[str, Any], get: Callable[..., Any], layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """(the window, the layers that have it)."""
    window = config.get("sliding_window", _WINDOW.get(arch))
    if arch == "llama" or (arch in ("qwen2", "qwen3", "smollm3") and not get("use_sliding_window", False)):
        window = None
    kinds = get("layer_types", None)
    unknown = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(
            f"config: layer_types {unknown} are not supported; accepted: full_attention, sliding_attention"
        )
    if window is None:
        if "sliding_attention" in (kinds or ()):
            raise ModelError("config: layer_types names sliding_attention, but there is no sliding_window")
        return None, ()
    if arch in WINDOW_EVERYWHERE:
        if "full_attention" in (kinds or ()):
            raise ModelError(f"config: layer_types of {arch} cannot be full_attention beside a sliding_window")
        return window, tuple(range(layers))
    if kinds is None:
        kinds = _default_kinds(arch, get, layers)
    if len(kinds) < layers:
        raise ModelError(f"config: layer_types must have an entry for each of {layers} layers; got {len(kinds)}")
    return window, tuple(i for i in range(layers) if kinds[i] == "sliding_attention")


def _default_kinds(arch: str, get: Callable[..., Any], layers: int) -> list[str]:
    if arch in GEMMA:
        period = 2 if arch == "gemma2" else get("sliding_window_pattern", 6)
        slides = [(i + 1) % period != 0 for i in range(layers)]
    elif arch == "smollm3":
        slides = [i in _no_rope_layers(arch, get, layers) for i in range(layers)]
    else:
        slides = [i >= get("max_window_layers", 28) for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in slides]


def _no_rope_layers(arch: str, get: Callable[..., Any], layers: int) -> tuple[int, ...]:
    if arch != "smollm3":
        return ()
    interval = get("no_rope_layer_interval", 4)
    rotates = get("no_rope_layers", None) or [(i + 1) % interval != 0 for i in range(layers)]
    if len(rotates) < layers:
        raise ModelError(f"config: no_rope_layers must have an entry for each of {layers} layers; got {len(rotates)}")
    return tuple(i for i in range(layers) if not rotates[i])
