"""An adapter as llama.cpp's LoRA file: what `llama-cli --lora` reads."""

from __future__ import annotations

import functools
import os
from collections import Counter

from torch import Tensor

from .. import nn
from ..models import Decoder
from ..models.gguf_names import Names, Stored, stream, writer
from .lora import adapted
from .plan import RECORD, Record
from .spec import AdapterError

DTYPES = ("F32", "F16")


def save_gguf_lora(model: Decoder, path: str | os.PathLike, *, dtype: str = "F32") -> None:
    """Write the adapter of `model` as a LoRA GGUF; the file appears whole or not at all.

    llama.cpp scales every layer by adapter.lora.alpha / rank: what a layer's own scale differs from that by
    (alpha_pattern, rsLoRA) is in its B.

    Args:
        model: a decoder that carries a LoRA.
        path: of a new file.
        dtype: "F32" or "F16".

    Raises:
        AdapterError: what llama.cpp has no form for - DoRA, modules trained whole, trained rows, an embedding or head
            of a model that ties them - by name; merge such an adapter instead.
        ModelError: an architecture that has no GGUF form, or a file that is there.
    """
    if dtype not in DTYPES:
        raise AdapterError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    layers = adapted(model)
    _refuse(model, layers)
    alpha = Counter(float(layer.alpha) for layer in layers.values()).most_common(1)[0][0]
    names = Names(model.config)
    with writer(path, names.architecture) as out:
        out.add_type("adapter")
        out.add_string("adapter.type", "lora")
        out.add_float32("adapter.lora.alpha", alpha)
        stored = []
        for name, layer in layers.items():
            a, b = _factors(names, name, layer)
            b = b * (layer.scale * layer.rank / alpha)
            full = names.gguf(f"{name}.weight")
            for part, value in (("lora_a", a.cpu()), ("lora_b", b.cpu())):
                stored.append(Stored(f"{full}.{part}", tuple(value.shape), dtype, functools.partial(_same, value)))
        stream(out, stored)


def _same(value: Tensor) -> Tensor:
    return value


def _factors(names: Names, name: str, layer: nn.LoRALinear | nn.LoRAEmbedding) -> tuple[Tensor, Tensor]:
    """A [R, in] and B [out, R] in float32; an embedding's A is [V, R], rows to look up."""
    if isinstance(layer, nn.LoRAEmbedding):
        return layer.lora_embedding_A.detach().float().t(), layer.lora_embedding_B.detach().float()
    a, b = layer.lora_A.weight.detach().float(), layer.lora_B.weight.detach().float()
    return a, names.ordered(f"{name}.weight", b)


def _refuse(model: Decoder, layers: dict[str, nn.LoRALinear | nn.LoRAEmbedding]) -> None:
    record: Record = getattr(model, RECORD, Record())
    why = None
    if any(isinstance(m, (nn.TrainableTokens, nn.TokensHead)) for m in model.modules()):
        why = "trained rows of the embedding"
    elif record.trained:
        why = f"{record.trained[0]}, which was trained whole"
    elif dora := [n for n, layer in layers.items() if layer.use_dora]:
        why = f"DoRA, which {dora[0]} has"
    elif model.config.tie_word_embeddings and (
        own := [n for n, layer in layers.items() if isinstance(layer, nn.LoRAEmbedding) or n == "lm_head"]
    ):
        why = f"an adapter on {own[0]} of a model that ties embedding and head"
    elif not layers:
        raise AdapterError("the model carries no LoRA; load one first")
    elif not any(layer.alpha for layer in layers.values()):
        why = "an alpha of 0"
    if why:
        raise AdapterError(f"a LoRA file of llama.cpp cannot hold {why}; merge the adapter into the model instead")
