"""What a decoder's tensors are called in llama.cpp's files and how their rows lie; and files that appear whole."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .config import DecoderConfig
from .errors import ModelError, package

# transformers' name of an architecture -> llama.cpp's
WRITTEN = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
}
PAIRED = ("llama", "smollm3")  # of llama.cpp's: q and k rotate neighbouring rows, where the decoder rotates halves


class Names:
    """Tensor names and row orders of one model."""

    def __init__(self, config: DecoderConfig):
        gguf = package("gguf")
        if config.architecture not in WRITTEN:
            raise ModelError(f"architecture {config.architecture!r} has no GGUF form; accepted: {', '.join(WRITTEN)}")
        self.config, self.architecture = config, WRITTEN[config.architecture]
        kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._map = gguf.get_tensor_name_map(kind, config.num_layers)

    def gguf(self, name: str) -> str:
        """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ModelError(f"{name} has no name in a GGUF file of {self.architecture}")
        return found

    def ordered(self, name: str, rows: Tensor) -> Tensor:
        """The rows of `name` (or what is added to them) in the file's order."""
        if self.architecture not in PAIRED:
            return rows
        module = name.rpartition(".")[0].rpartition(".")[2] if name.endswith((".weight", ".bias")) else name
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(module)
        if heads is None:
            return rows
        return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@contextlib.contextmanager
def writer(path: str | os.PathLike, architecture: str) -> Iterator[Any]:
    """A gguf.GGUFWriter, to be given its metadata and then to `stream`; the file takes its name once all of it is on
    the disk. A file that is there is refused."""
    gguf, path = package("gguf"), Path(path)
    if path.exists():
        raise ModelError(f"{path}: already there; name a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    out = gguf.GGUFWriter(fresh, architecture)
    try:
        yield out
        out.close()
        with open(fresh, "rb") as f:
            os.fsync(f.fileno())
        os.chmod(fresh, 0o644)
        os.replace(fresh, path)
    finally:
        out.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)


class Stored(NamedTuple):
    """A tensor of a file: its name, shape, GGML's name of its type, and what makes it, float32 on the CPU."""

    name: str
    shape: tuple[int, ...]
    kind: str
    make: Callable[[], Tensor]


def stream(out: Any, tensors: Sequence[Stored]) -> None:
    """Write a GGUFWriter's metadata and then the tensors, made one at a time: one alone is in memory."""
    gguf = package("gguf")
    for t in tensors:
        number = gguf.GGMLQuantizationType[t.kind]
        rows = gguf.quant_shape_to_byte_shape(t.shape, number)
        out.add_tensor_info(t.name, rows, np.dtype(np.uint8), math.prod(rows), raw_dtype=number)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for t in tensors:
        values = t.make().contiguous().numpy()
        out.write_tensor_data(gguf.quantize(values, gguf.GGMLQuantizationType[t.kind]))
