"""From a file or folder to a decoder on its device, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from .. import tpu
from ..nn import GGUFEmbedding, GGUFLinear, NF4Linear
from . import bnb, tokenizer
from .config import DecoderConfig
from .decoder import Decoder
from .digest import base_digest
from .errors import ModelError
from .gguf import GGUFFile, is_gguf
from .safetensors_folder import SafetensorsFolder
from .tokenizer import Tokenizer

WEIGHTS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.gguf)")  # an owner's model, as other programs download it
ACCEPTED = "a .gguf file, or a folder with config.json and safetensors"


class Source(Protocol):
    """Where tensors come from: GGUFFile or SafetensorsFolder."""

    path: Path
    config: DecoderConfig

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def tensor(self, name: str) -> Tensor: ...


def open_source(path: str | Path) -> GGUFFile | SafetensorsFolder:
    """Read the header of the model at `path`; no weights yet."""
    path = Path(path).expanduser()
    if path.is_dir():
        if (path / "config.json").exists():
            return SafetensorsFolder(path)
        inside = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; name the file itself: {path / inside[0]}" if inside else ""
        raise ModelError(f"{path}: no config.json in this folder{hint}; accepted: {ACCEPTED}")
    if not path.exists():
        named = HUB_NAME.fullmatch(str(path)) and not path.parent.exists()
        fetched = f": hf download {path} --local-dir FOLDER" if named else ""
        raise ModelError(f"{path}: no such file or folder; accepted: {ACCEPTED} (riftco downloads nothing{fetched})")
    if not is_gguf(path):
        raise ModelError(f"{path}: not a GGUF file; accepted: {ACCEPTED}")
    return GGUFFile(path)


def load_model(
    path: str | Path,
    *,
    weights: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    activation_checkpointing: str = "disabled",
    cache_dir: str | Path | None = None,
    with_tokenizer: bool = True,
) -> tuple[Decoder, Tokenizer | None]:
    """A decoder and its tokenizer from a GGUF file or a Hugging Face folder.

    Args:
        path: the .gguf file, or the folder with config.json and (sharded) safetensors.
        weights: "fp32", "bf16" or "fp16"; "nf4" quantises every linear layer inside the blocks (embedding, head and
            norms stay); "packed" keeps what a GGUF file stores in blocks as it is, embedding and head too; "auto" is
            fp32 on a CPU and bf16 elsewhere, and nf4 for a bitsandbytes 4-bit checkpoint, whose blocks are taken as
            they are.
        device: where to. Tensors travel one at a time: the peak is the result plus one layer.
        dtype: of what "nf4" or "packed" leaves unquantised, and of activations; default float32 on a CPU, bfloat16
            elsewhere.
        activation_checkpointing: as in Decoder.
        cache_dir: folder in which a tokenizer that was converted from GGUF metadata is kept for the next time.
        with_tokenizer: False leaves the tokenizer out (None).

    Returns:
        (model, tokenizer); parameters require gradients as new ones do, the model is in training mode.

    Raises:
        ModelError: anything that cannot be read or does not fit, naming the file, the tensor or the option.
    """
    if weights not in ("auto", "nf4", "packed", *WEIGHTS):
        raise ModelError(f"weights must be one of auto, {', '.join(WEIGHTS)}, nf4, packed; got {weights!r}")
    source, device = open_source(path), torch.device(device)
    as_stored = weights == "auto" and bool(bnb.quantised(source.shapes))
    if as_stored:
        weights = "nf4"
    if dtype is not None and weights not in ("nf4", "packed"):
        raise ModelError(f"dtype belongs to weights='nf4' or 'packed'; got weights={weights!r}")
    if weights == "packed" and not isinstance(source, GGUFFile):
        raise ModelError(
            f"{source.path}: weights='packed' is for GGUF files; accepted for a folder: auto, fp32, bf16, fp16, nf4"
        )
    if weights != "nf4" and bnb.quantised(source.shapes):
        raise ModelError(f"{source.path}: holds 4-bit weights; accepted for it: auto, nf4; got {weights!r}")
    text = load_tokenizer(path, cache_dir=cache_dir, source=source) if with_tokenizer else None
    if text is not None and text.vocabulary_size > source.config.vocab_size:
        raise ModelError(
            f"{source.path}: its tokenizer has {text.vocabulary_size} tokens, its embedding {source.config.vocab_size}"
        )
    dtype = WEIGHTS.get(weights) or dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    place = tpu.made_on(device)
    if weights == "packed" and place != device:
        raise ModelError("weights='packed': GGUF's blocks have no kernel for tpu; use nf4 or bf16")
    model = build(
        source,
        dtype,
        place,
        nf4=weights == "nf4" and not as_stored,  # what a 4-bit checkpoint left dense stays so
        packed=weights == "packed",
        activation_checkpointing=activation_checkpointing,
    )
    return model if place == device else model.to(device), text


def load_tokenizer(
    path: str | Path, *, cache_dir: str | Path | None = None, source: GGUFFile | SafetensorsFolder | None = None
) -> Tokenizer:
    """The tokenizer and chat template of the model at `path`, a .gguf file or a Hugging Face folder.

    Args:
        path: as load_model's.
        cache_dir: where a tokenizer converted from GGUF is kept, and found again; None: nowhere.
        source: the opened model, where it is open already.

    Raises:
        ModelError: no such model, or one without a tokenizer or with one that cannot be read.
    """
    source = source or open_source(path)
    if isinstance(source, SafetensorsFolder):
        return tokenizer.from_folder(source.path, source.config.eos_token_ids)
    folder = None if cache_dir is None else Path(cache_dir)
    return tokenizer.from_gguf(source.path, source.metadata, base_digest(source.path), folder)


def build(
    source: Source,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    nf4: bool = False,
    packed: bool = False,
    activation_checkpointing: str = "disabled",
) -> Decoder:
    """A Decoder whose every tensor comes from `source`; each tensor of `source` is used or named in an error.

    `packed` asks the source, a GGUFFile, for weights in their blocks.
    """
    with torch.device("meta"):
        model = Decoder(source.config, activation_checkpointing=activation_checkpointing)
    quantised = bnb.quantised(source.shapes)
    _check_names(source, {name: tuple(p.shape) for name, p in model.named_parameters()}, quantised)
    keep = source if packed and isinstance(source, GGUFFile) else None
    device = torch.device(device)
    for path in [path for path, _ in model.named_modules()]:  # paths: a list of modules would keep what NF4 replaces
        if path == "lm_head" and source.config.tie_word_embeddings:
            _tie(model, source)
        elif keep is None or not _keep_packed(model, path, keep, dtype, device):
            _fill(model, path, source, dtype, device, nf4, quantised.get(path))
    return model


def _keep_packed(model: Decoder, path: str, source: GGUFFile, dtype: torch.dtype, device: torch.device) -> bool:
    """Replace the layer at `path` by one over the file's own blocks, where its weight is stored in such."""
    module = model.get_submodule(path)
    weight = source.packed(f"{path}.weight") if isinstance(module, (nn.Linear, nn.Embedding)) else None
    if weight is None:
        return False
    if isinstance(module, nn.Embedding):
        model.set_submodule(path, GGUFEmbedding(weight.to(device), dtype))
        return True
    bias = None
    if module.bias is not None:
        bias = nn.Parameter(source.tensor(f"{path}.bias").to(device, dtype))
    model.set_submodule(path, GGUFLinear.from_weight(weight.to(device), bias))
    return True


def _tie(model: Decoder, source: Source) -> None:
    """The head is the embedding's weight, packed or not."""
    embedding = model.model.embed_tokens
    if isinstance(embedding, GGUFEmbedding):
        model.lm_head = GGUFLinear.from_weight(embedding.weight)
    else:
        model.lm_head.weight = embedding.weight
        _check_tied_copy(source, embedding.weight)


def _fill(
    model: Decoder,
    path: str,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    nf4: bool,
    packed: list[str] | None,
) -> None:
    """Give the module at `path` its own tensors; a linear layer of a block becomes NF4 where that is asked for, or
    where its weight is stored so, under the names `packed`."""
    module = model.get_submodule(path)
    if packed and isinstance(module, nn.Linear):
        made = bnb.read(path, module, packed, source.tensor, device)
        made.register_parameter("bias", module.bias)
        model.set_submodule(path, made)
        module = made
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        full = f"{path}.{name}"
        setattr(module, name, nn.Parameter(_floating(full, source.tensor(full)).to(device, dtype)))
    if nf4 and isinstance(module, nn.Linear) and path.startswith("model.layers."):
        model.set_submodule(path, NF4Linear.from_linear(module))


def quantize_blocks(model: Decoder) -> None:
    """Turn the linear layers of the blocks into NF4Linear, in place: as `load_model(weights="nf4")` has them."""
    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, nn.Linear):
            model.model.layers.set_submodule(name, NF4Linear.from_linear(layer))


def _check_names(source: Source, needed: Mapping[str, tuple[int, ...]], packed: Mapping[str, list[str]]) -> None:
    """Before any weight is read: the file has what the model needs, in its shapes, and nothing else.

    The tensors of a packed weight replace it; their shapes are checked as they are read.
    """
    wanted = {n: s for n, s in needed.items() if n.removesuffix(".weight") not in packed}
    for path, names in packed.items():
        if f"{path}.weight" in needed:
            wanted |= {n: source.shapes.get(n, ()) for n in (f"{path}.weight", *names)}
    missing = [n for n in wanted if n not in source.shapes]
    if missing:
        raise ModelError(f"{_and_more(missing)} missing from {source.path}")
    unused = [n for n in source.shapes if n not in wanted]
    if source.config.tie_word_embeddings:
        unused = [n for n in unused if n != "lm_head.weight"]
    if unused:
        raise ModelError(f"{_and_more(unused)} in {source.path}, but this model has no use for it")
    for name, shape in wanted.items():
        if source.shapes[name] != shape:
            raise ModelError(
                f"tensor {name} of {source.path} has shape {list(source.shapes[name])}; "
                f"its config makes it {list(shape)}"
            )


def _check_tied_copy(source: Source, embedding: Tensor) -> None:
    """A file that ties head and embedding and still stores both must store the same."""
    if "lm_head.weight" not in source.shapes:
        return
    head = source.tensor("lm_head.weight")
    if head.shape != embedding.shape or not torch.equal(head.to(embedding.device, embedding.dtype), embedding):
        raise ModelError("tensor lm_head.weight differs from model.embed_tokens.weight, which the config ties it to")


def _floating(name: str, t: Tensor) -> Tensor:
    if not t.is_floating_point() or t.dtype.itemsize < 2:
        raise ModelError(f"tensor {name} has dtype {t.dtype}; accepted: float32, bfloat16, float16")
    return t


def _and_more(names: list[str]) -> str:
    return f"tensor {names[0]} is" if len(names) == 1 else f"tensors {names[0]} and {len(names) - 1} more are"
