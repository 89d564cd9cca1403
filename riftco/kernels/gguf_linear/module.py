"""torch.nn.Linear and torch.nn.Embedding whose frozen weight is held in a GGUF block format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._calls import sole_call
from .formats import FORMATS, format_of
from .op import dequantize_gguf, gguf_linear
from .weight import GGUFWeight


class GGUFLinear(nn.Module):
    """y = x W^T + bias with a frozen W in packed blocks. Starts as zeros: load a state_dict, or use `from_weight`.

    `weight` is a GGUFWeight, not a Parameter: it follows the module between devices and no cast touches it. State keys:
    weight (uint8 [out_features, bytes of a row]), weight.ggml_type (int32, GGML's number of the format) and bias. A
    state_dict of another format loads; the format is then that of the state.

    Args:
        in_features, out_features: K, a multiple of the format's block, and N.
        bias: whether there is a bias [N].
        format: GGML's name, such as "Q4_K".
        device, dtype: of the bias.

    Raises:
        ValueError: a format that cannot be read back for a gradient, or a K that it cannot hold.
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        format: str = "Q8_0",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        row = format_of(format).row_bytes(in_features)
        packed = torch.zeros(out_features, row, dtype=torch.uint8, device=device)
        self.weight = GGUFWeight(packed, format, (out_features, in_features))
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )

    @classmethod
    def from_weight(cls, weight: GGUFWeight, bias: nn.Parameter | None = None) -> GGUFLinear:
        """A layer around a weight and a bias, which are shared, not copied."""
        made = cls(weight.shape[1], weight.shape[0], format=weight.format, device="meta")
        made.weight = weight
        made.bias = bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        return gguf_linear(x, self.weight, self.bias)

    def saves_without_result(self) -> bool:
        """As `_recompute.last_product` asks."""
        return sole_call(self, GGUFLinear)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.weight.format}"
        )

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.weight = self.weight.map(fn)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        weight, number = _state(self.weight, prefix).items()
        destination |= dict((weight,))
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= dict((number,))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        own = (f"{prefix}weight", f"{prefix}weight.ggml_type")
        others = {k: v for k, v in state_dict.items() if k not in own}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing, unexpected, errors)
        self.weight = _loaded(self.weight, state_dict, prefix, local_metadata, missing, errors)


class GGUFEmbedding(nn.Module):
    """Rows of a frozen W in packed blocks, decoded where they are asked for: ids [...] -> [..., embedding_dim].

    `weight` is a GGUFWeight, which no cast touches; the results' dtype is that which the module was last cast to.
    State keys as GGUFLinear's. A packed weight trains nothing; an adapter beside it does.
    """

    _like: Tensor

    def __init__(self, weight: GGUFWeight, dtype: torch.dtype | None = None):
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.weight = weight
        like = torch.empty(0, dtype=dtype or torch.get_default_dtype(), device=weight.device)
        self.register_buffer("_like", like, persistent=False)  # what a cast or a move of the module reaches

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.rows(input.reshape(-1))
        return dequantize_gguf(rows, self._like.dtype).view(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.weight.format}"

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.weight = self.weight.map(fn)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= _state(self.weight, prefix)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        self.weight = _loaded(self.weight, state_dict, prefix, local_metadata, missing, errors)


def _state(weight: GGUFWeight, prefix: str) -> dict[str, Tensor]:
    number = torch.tensor(weight.info.ggml_type, dtype=torch.int32)
    return {f"{prefix}weight": weight.packed, f"{prefix}weight.ggml_type": number}


def _loaded(
    held: GGUFWeight, state: Mapping[str, Tensor], prefix: str, local_metadata: Mapping[str, Any], missing: list[str],
    errors: list[str],
) -> GGUFWeight:  # fmt: skip
    """The weight in `state`, of any format; what is held where there is none or it does not fit."""
    own = (f"{prefix}weight", f"{prefix}weight.ggml_type")
    if lacking := [k for k in own if k not in state]:
        missing.extend(lacking)
        return held
    packed, number = state[own[0]], int(state[own[1]])
    name = next((f.name for f in FORMATS.values() if f.ggml_type == number), f"GGML type {number}")
    try:
        weight = GGUFWeight(packed, name, held.shape)
    except ValueError as refused:
        errors.append(f"{own[0]}: {refused}")
        return held
    if local_metadata.get("assign_to_params_buffers", False):
        return weight
    return weight.map(lambda t: t.to(held.device, copy=True))
