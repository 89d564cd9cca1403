"""A decoder as a GGUF v3 file for llama.cpp."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..nn import GGUFEmbedding, GGUFLinear, NF4Linear
from .config import DecoderConfig
from .config_gguf import GGUF_ARCHITECTURES
from .decoder import Decoder
from .errors import ModelError, package
from .gguf_names import Names, Stored, stream, writer
from .rotary import Rope

# what the gguf package's quantiser writes; K-quants need llama.cpp's own
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
FREE = ("architecture", "bos_token_id", "eos_token_ids", "rope", "local_rope", "max_position_embeddings")


def save_gguf(
    model: Decoder, path: str | Path, *, kind: str = "F16", tokenizer: Mapping[str, Any] | None = None
) -> None:
    """Write `model` as a GGUF file, a tensor at a time; it appears whole or not at all.

    Args:
        model: a decoder without adapters (merge them first); 4-bit and packed layers are decoded on the way.
        path: of a new file.
        kind: the type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1. Vectors are F32; a matrix whose
            rows do not fit the blocks is F16.
        tokenizer: keys "tokenizer." of the metadata, as `tokenizer_metadata` makes them; without, llama.cpp cannot
            read text.

    Raises:
        ModelError: adapters, a file that is there, what of the config a GGUF file cannot say.
    """
    gguf = package("gguf")
    if kind not in KINDS:
        raise ModelError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    names, config = Names(model.config), model.config
    metadata, vectors = describe(config, names.architecture)
    weights = _weights(model)
    known = {names.gguf(n): None for n in weights} | {n: v for n, v in vectors.items()}
    _check(config, {"general.architecture": names.architecture, **metadata}, known)
    divisors = [Stored(n, (len(v),), "F32", functools.partial(torch.tensor, v)) for n, v in vectors.items()]
    with writer(path, names.architecture) as out:
        out.add_file_type(gguf.LlamaFileType[_FILE_TYPES[kind]])
        out.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in (metadata | dict(tokenizer or {})).items():
            _add(out, key, value)
        stream(out, [*divisors, *(_stored(model, names, name, kind) for name in weights)])


def _stored(model: Decoder, names: Names, name: str, kind: str) -> Stored:
    weight = getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
    offset = model.config.norm_offset if name.endswith("norm.weight") else 0.0

    def make() -> Tensor:
        dense = weight if isinstance(weight, Tensor) else weight.decoded(0, weight.shape[0], torch.float32)
        values = names.ordered(name, dense.detach().to("cpu", torch.float32))
        return values + offset if offset else values

    shape = tuple(weight.shape)
    return Stored(names.gguf(name), shape, _kind_of(shape, kind), make)


_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"} | {
    k: f"MOSTLY_{k}" for k in KINDS if k.startswith("Q")
}


def _kind_of(shape: tuple[int, ...], kind: str) -> str:
    if len(shape) < 2:
        return "F32"
    return "F16" if kind.startswith("Q") and shape[-1] % 32 else kind


def _weights(model: Decoder) -> list[str]:
    """Names of a plain decoder's parameters; refuses one that carries adapters."""
    with torch.device("meta"):
        plain = Decoder(model.config)
    for path, module in plain.named_modules():
        found = model.get_submodule(path)
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) and not isinstance(
            found, (torch.nn.Linear, torch.nn.Embedding, NF4Linear, GGUFLinear, GGUFEmbedding)
        ):
            raise ModelError(f"save_gguf: {path} is a {type(found).__name__}; merge the adapter first")
    return [n for n, _ in plain.named_parameters()]


def describe(config: DecoderConfig, architecture: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The metadata of a model's shape, and the tensors that are none of its weights (the rotation's divisors)."""
    made: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "vocab_size": config.vocab_size,
        "rope.dimension_count": config.rope.dim,
        "rope.freq_base": float(config.rope.theta),
    }
    if config.sliding_window is not None:
        made["attention.sliding_window"] = config.sliding_window
        made |= _pattern(config)
    if config.attention_softcap:
        made["attn_logit_softcapping"] = float(config.attention_softcap)
    if config.final_softcap:
        made["final_logit_softcapping"] = float(config.final_softcap)
    if config.local_rope is not None:
        made["rope.freq_base_swa"] = float(config.local_rope.theta)
    vectors: dict[str, list[float]] = {}
    scaling, kind = config.rope.scaling, config.rope.kind
    if kind == "llama3":
        plain = 1.0 / config.rope.theta ** (torch.arange(0, config.rope.dim, 2).double() / config.rope.dim)
        frequencies, _ = config.rope.frequencies()
        vectors["rope_freqs.weight"] = (plain / frequencies.double()).tolist()
    elif kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        vectors["rope_factors_long.weight"] = list(scaling["long_factor"])
        vectors["rope_factors_short.weight"] = list(scaling["short_factor"])
        made["rope.scaling.original_context_length"] = int(original)
        made["rope.scaling.attn_factor"] = float(config.rope.frequencies()[1])
    elif kind in ("linear", "yarn"):
        made["rope.scaling.type"], made["rope.scaling.factor"] = kind, float(scaling["factor"])
        if kind == "yarn":
            made["rope.scaling.original_context_length"] = int(scaling["original_max_position_embeddings"])
    keyed = {f"{architecture}.{k}": v for k, v in made.items()}
    if config.bos_token_id is not None:
        keyed["tokenizer.ggml.bos_token_id"] = config.bos_token_id
    if config.eos_token_ids:
        keyed["tokenizer.ggml.eos_token_id"] = config.eos_token_ids[0]
    return keyed, vectors


def _pattern(config: DecoderConfig) -> dict[str, int]:
    """Every so many layers one sees everything: said where llama.cpp would take another number."""
    layers = range(config.num_layers)
    for period in range(2, config.num_layers + 1):
        if config.sliding_layers == tuple(i for i in layers if (i + 1) % period):
            return {"attention.sliding_window_pattern": period}
    return {}


def _check(config: DecoderConfig, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Refuse a config that would come back as another: a GGUF file has no place for all that a config can say."""
    if metadata["general.architecture"] not in GGUF_ARCHITECTURES:  # written, but not read
        every_fourth = tuple(i for i in range(config.num_layers) if (i + 1) % 4 == 0)  # what llama.cpp takes
        if config.no_rope_layers != every_fourth:
            raise _unsaid(config, "no_rope_layers", config.no_rope_layers, every_fourth)
        return
    divisors = {n: None if v is None else torch.tensor(v) for n, v in tensors.items()}
    back = DecoderConfig.from_gguf(metadata, divisors)
    for name, value in vars(config).items():
        if name not in FREE and not _same(value, getattr(back, name)):
            raise _unsaid(config, name, value, getattr(back, name))
    for name in ("rope", "local_rope"):
        mine, theirs = getattr(config, name), getattr(back, name)
        if (mine is None) != (theirs is None) or (mine is not None and not _turns_alike(mine, theirs)):
            raise _unsaid(config, name, mine, theirs)


def _unsaid(config: DecoderConfig, name: str, value: Any, back: Any) -> ModelError:
    where = f"a GGUF file of {config.architecture}"
    return ModelError(f"config: {name} {value!r} cannot be said in {where} (it would be read as {back!r})")


def _turns_alike(mine: Rope, theirs: Rope) -> bool:
    for long in (False, True):
        (f, factor), (g, other) = mine.frequencies(long), theirs.frequencies(long)
        if not torch.allclose(f, g, rtol=1e-5) or not math.isclose(factor, other, rel_tol=1e-5):
            return False
    return True


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) or isinstance(b, float):
        return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6)
    return a == b


def _add(out: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        out.add_bool(key, value)
    elif isinstance(value, int):
        out.add_uint32(key, value)
    elif isinstance(value, float):
        out.add_float32(key, value)
    elif isinstance(value, str):
        out.add_string(key, value)
    elif len(value):
        out.add_array(key, list(value))
