"""Reading GGUF v3 files: metadata, and tensors under Hugging Face names, packed or dequantised, one at a time."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..functional import GGUFWeight
from .config import DecoderConfig
from .config_gguf import DIVISORS
from .errors import ModelError, package

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# which of them can be kept as they are, as weights that a gradient passes through
DENSE = ("F32", "F16", "BF16")
PACKED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
PERMUTED = (
    "llama",
    "mistral",
    "smollm3",
)  # their q and k rows pair neighbouring dimensions; the decoder rotates halves
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# where an architecture means something else by a name, or has one of its own
_OWN = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gemma2": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_OWN["gemma3"] = _OWN["gemma2"]
_BROKEN = (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError, struct.error)


class GGUFFile:
    """A model source: `config`, the `shapes` of its tensors by Hugging Face name, and `tensor(name)`."""

    def __init__(self, path: Path):
        self.path = path
        tensors = _open(path)
        self.metadata: dict[str, Any] = {}
        self._tensors = {t.name: t for t in tensors.tensors}
        try:
            self.metadata = {name: field.contents() for name, field in tensors.fields.items()}
        except _BROKEN as why:
            raise ModelError(f"{path}: not a readable GGUF file ({_brief(why)})") from why
        unsupported = sorted({t.tensor_type.name for t in self._tensors.values()} - set(TYPES))
        if unsupported:
            first = next(t for t in self._tensors.values() if t.tensor_type.name == unsupported[0])
            raise ModelError(
                f"{path}: tensor {first.name} has type {unsupported[0]}, which is not supported; "
                f"accepted: {', '.join(TYPES)}"
            )
        known: dict[str, Any] = dict.fromkeys(self._tensors)
        for name in DIVISORS:
            if name in self._tensors:
                known[name] = torch.from_numpy(np.array(self._tensors[name].data, dtype=np.float32))
        self.config = DecoderConfig.from_gguf(self.metadata, known)
        self._arch = str(self.metadata["general.architecture"])
        self._names = {hf_name(name, self._arch): name for name in self._tensors if name not in DIVISORS}
        self.shapes = {
            hf: tuple(int(n) for n in reversed(self._tensors[name].shape)) for hf, name in self._names.items()
        }

    def tensor(self, name: str) -> Tensor:
        """The tensor in float32 on the CPU, rows in Hugging Face's order."""
        gguf = package("gguf")

        stored = self._tensors[self._names[name]]
        values = np.array(gguf.dequantize(stored.data, stored.tensor_type), dtype=np.float32, copy=None)
        out = torch.from_numpy(values if values.flags.writeable else values.copy()).view(self.shapes[name])
        if self.config.norm_offset and name.endswith("norm.weight"):
            return out - self.config.norm_offset  # llama.cpp stores what the norm multiplies by
        heads = self._permuted_heads(name)
        return out if heads is None else unpermute(out, heads)

    def type_of(self, name: str) -> str:
        """GGML's name of how the tensor is stored."""
        return self._tensors[self._names[name]].tensor_type.name

    @property
    def kinds(self) -> list[str]:
        """GGML's names of the blocks that matrices are stored in; none: the file is not quantised."""
        matrices = (self.type_of(name) for name, shape in self.shapes.items() if len(shape) == 2)
        return sorted({*matrices} - {*DENSE})

    @property
    def packable(self) -> bool:
        """Whether there are blocks, and all of them can stay as they are."""
        return bool(self.kinds) and {*self.kinds} <= {*PACKED}

    def packed(self, name: str) -> GGUFWeight | None:
        """A matrix in its blocks, on the CPU, rows in Hugging Face's order; None where it is stored unpacked.

        Raises:
            ModelError: blocks that cannot stay packed.
        """
        stored = self._tensors[self._names[name]]
        kind = self.type_of(name)
        if kind in DENSE or len(self.shapes[name]) != 2:
            return None
        if kind not in PACKED:
            raise ModelError(
                f"tensor {name} of {self.path} has type {kind}, which cannot stay packed; accepted to stay packed: "
                f"{', '.join(PACKED)}; load it as nf4, bf16, fp16 or fp32"
            )
        weight = GGUFWeight.from_reader(stored)
        heads = self._permuted_heads(name)
        return weight if heads is None else weight.rows(unpermute(torch.arange(weight.shape[0]), heads))

    def _permuted_heads(self, name: str) -> int | None:
        if self._arch not in PERMUTED or ".self_attn." not in name:
            return None
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else None


def hf_name(name: str, arch: str = "llama") -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay, for the loader to refuse."""
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block:
        inner = _OWN.get(arch, {}).get(block[2]) or _BLOCK.get(block[2])
        if inner is not None:
            return f"model.layers.{block[1]}.{inner}.{leaf}"
    return name


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Within each head, rows (0, 1), (2, 3), ... of the file are rows (0, D/2), (1, D/2 + 1), ... of the decoder."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _open(path: Path):
    """gguf.GGUFReader, after the header says that reading can end."""
    gguf = package("gguf")

    with path.open("rb") as file:
        head = file.read(24)
    if head[:4] != b"GGUF" or len(head) < 24:
        raise ModelError(f"{path}: not a GGUF file")
    version, tensors, keys = struct.unpack("<IQQ", head[4:])
    if version != 3:
        raise ModelError(f"{path}: GGUF version {version} is not supported; accepted: 3")
    size = path.stat().st_size
    if tensors * 24 + keys * 13 > size:  # the least that so many entries take
        raise ModelError(f"{path}: not a readable GGUF file (its header promises more than its {size} bytes)")

    base: Any = gguf.GGUFReader

    class Reader(base):
        """Every read checked against the file's end (and free of memmap's slow slicing: 4 times faster on a
        vocabulary of 49,152)."""

        def _get(self, offset, dtype, count=1, override_order=None):
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    try:
        return Reader(path)
    except _BROKEN as why:
        raise ModelError(f"{path}: not a readable GGUF file, perhaps cut short ({_brief(why)})") from why


def _brief(why: BaseException) -> str:
    return (str(why).splitlines() or [type(why).__name__])[0][:120]
