"""What quantize, merge and export do: a model and an adapter in one form in, another form out, whole or not at all."""

from __future__ import annotations

import pathlib
import shutil

import torch

from ..adapters import base_weights_of, load_adapter
from ..adapters.gguf_lora import save_gguf_lora
from ..adapters.merge import Merged, merge_adapter
from ..models import Decoder, bnb, load_model, load_tokenizer
from ..models.gguf import GGUFFile
from ..models.gguf_vocabulary import tokenizer_metadata
from ..models.load import WEIGHTS, open_source
from ..models.safetensors_folder import SafetensorsFolder
from ..models.save import fresh_folder, write_hf
from ..models.save_gguf import KINDS, save_gguf
from .config import ConfigError

Source = GGUFFile | SafetensorsFolder

FORMATS = ("hf", "gguf", "gguf-lora")


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def quantize(model: str, output: str, kind: str, *, tokenizer: bool = True) -> list[str]:
    """A model's weights in fewer bits: "nf4" a folder as transformers + bitsandbytes read it, else a GGUF file."""
    accepted = ("nf4", *(k.lower() for k in KINDS if k.startswith("Q")))
    if kind.lower() not in accepted:
        raise ConfigError(f"--type must be one of {', '.join(accepted)} (llama-quantize has the K types); got {kind!r}")
    _refuse_used(output, folder=kind.lower() == "nf4")
    source = open_source(model)
    if kind.lower() == "nf4":
        loaded, _ = load_model(model, weights="nf4", dtype=_dtype("auto", source), with_tokenizer=False)
        return _folder(loaded, source, output, loaded.dtype, tokenizer, quantised=True)
    return _gguf(_exact(source), source, output, kind.upper(), tokenizer)


def merge(
    model: str, adapter: str, output: str, *, dtype: str = "auto", weights: str = "auto", tokenizer: bool = True
) -> list[str]:
    """The model with the adapter in its weights, as a Hugging Face folder; says how large the delta was."""
    _refuse_used(output, folder=True)
    source = open_source(model)
    wanted = _dtype(dtype, source)
    loaded, merged = _merged(source, adapter, weights, wanted)
    return [*merged.lines(), *_folder(loaded, source, output, wanted, tokenizer)]


def export(
    model: str,
    output: str,
    form: str,
    *,
    adapter: str | None = None,
    dtype: str = "auto",
    weights: str = "auto",
    tokenizer: bool = True,
) -> list[str]:
    """An adapter as a LoRA file of llama.cpp; or a model, with the adapter merged where one is named, as a Hugging
    Face folder or a GGUF file."""
    if form not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}; got {form!r}")
    _refuse_used(output, folder=form == "hf")
    source = open_source(model)
    if form == "gguf-lora":
        return _adapter(source, output, adapter, dtype)
    wanted, lines = _dtype(dtype, source), []
    if adapter is None:
        loaded = _exact(source)
    else:
        loaded, merged = _merged(source, adapter, weights, wanted)
        lines = merged.lines()
    if form == "hf":
        return lines + _folder(loaded, source, output, wanted, tokenizer)
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    return lines + _gguf(loaded, source, output, kinds[wanted], tokenizer)


def _adapter(source: Source, output: str, adapter: str | None, dtype: str) -> list[str]:
    if adapter is None:
        raise ConfigError("--format gguf-lora needs --adapter; name the adapter's folder")
    kinds = {"auto": "F32", "fp32": "F32", "fp16": "F16"}
    if dtype not in kinds:
        raise ConfigError(f"--dtype of a LoRA file must be one of {', '.join(kinds)}; got {dtype!r}")
    loaded = _exact(source)
    load_adapter(loaded, adapter)
    save_gguf_lora(loaded, output, dtype=kinds[dtype])
    return [f"written to {output}; use it with: llama-cli -m BASE.gguf --lora {output}"]


def _refuse_used(output: str, *, folder: bool) -> None:
    """Before anything is read: the output must be new (a folder may be there, empty)."""
    where = pathlib.Path(output)
    if where.exists() and (not folder or not where.is_dir() or any(where.iterdir())):
        raise ConfigError(f"--output {output} is already there{' and not empty' if folder else ''}; name a new one")


def _stored(source: Source) -> torch.dtype:
    """The dtype that holds the source's weights exactly: its own, or float32 for packed GGUF."""
    if isinstance(source, GGUFFile):
        kinds = {1: torch.float16, 32: torch.bfloat16}  # of general.file_type: all matrices in this one
        return kinds.get(source.metadata.get("general.file_type", 0), torch.float32)
    return source.tensor("model.embed_tokens.weight").dtype


def _dtype(name: str, source: Source) -> torch.dtype:
    if name == "auto":
        stored = _stored(source)
        packed = isinstance(source, GGUFFile) and stored == torch.float32 and source.metadata.get("general.file_type")
        return torch.bfloat16 if packed else stored
    if name not in WEIGHTS:
        raise ConfigError(f"--dtype must be one of auto, {', '.join(WEIGHTS)}; got {name!r}")
    return WEIGHTS[name]


def _exact(source: Source) -> Decoder:
    """The model on the CPU with nothing rounded; 4-bit checkpoints stay packed."""
    names = {dtype: name for name, dtype in WEIGHTS.items()}
    weights = "auto" if bnb.quantised(source.shapes) else names[_stored(source)]
    return load_model(source.path, weights=weights, with_tokenizer=False)[0]


def _merged(source: Source, adapter: str, weights: str, wanted: torch.dtype) -> tuple[Decoder, Merged]:
    """The base as the adapter was trained over it, unless `weights` says otherwise, with the adapter in it."""
    if weights == "auto":
        weights = base_weights_of(adapter) or "auto"
    if weights == "auto":
        loaded = _exact(source)
    else:
        dtype = torch.float32 if weights in ("nf4", "packed") else None
        loaded, _ = load_model(source.path, weights=weights, dtype=dtype, with_tokenizer=False)
    load_adapter(loaded, adapter)
    return loaded, merge_adapter(loaded, dtype=wanted)


def _folder(
    loaded: Decoder, source: Source, output: str, dtype: torch.dtype, tokenizer: bool, quantised: bool = False
) -> list[str]:
    with fresh_folder(output) as folder:
        write_hf(loaded, folder, dtype=dtype, quantised=quantised)
        if tokenizer and isinstance(source, GGUFFile):
            if "tokenizer.ggml.tokens" in source.metadata:
                load_tokenizer(source.path, source=source).save(folder)
        elif tokenizer:
            for name in _TOKENIZER_FILES:
                if (source.path / name).is_file():
                    shutil.copyfile(source.path / name, folder / name)
    return [f"written to {output}"]


def _gguf(loaded: Decoder, source: Source, output: str, kind: str, tokenizer: bool) -> list[str]:
    text = None
    if isinstance(source, GGUFFile):
        text = {k: v for k, v in source.metadata.items() if tokenizer and k.startswith("tokenizer.")}
    elif tokenizer:
        text = tokenizer_metadata(source, load_tokenizer(source.path, source=source))
    save_gguf(loaded, output, kind=kind, tokenizer=text)
    config, lines = loaded.config, [f"written to {output}"]
    if config.architecture == "mistral" and config.sliding_window is not None:
        lines.append(f"llama.cpp does not cut attention to this model's window of {config.sliding_window} tokens")
    return lines
