"""A torch.nn.Linear whose frozen weight is held in a GGUF block format."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .formats import FORMATS, format_of
from .op import gguf_linear
from .weight import GGUFWeight


class GGUFLinear(nn.Module):
    """y = x W^T + bias with a frozen W in packed blocks. Starts as zeros: load a state_dict, or use `from_weight`.

    `weight` is a GGUFWeight, not a Parameter: it follows the module between devices and no cast touches it. State keys:
    weight (uint8 [out_features, bytes of a row]), weight.ggml_type (int32, GGML's number of the format) and bias. A
    state_dict of another format loads; the format is then that of the state.
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
        destination[f"{prefix}weight"] = self.weight.packed
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.ggml_type"] = torch.tensor(self.weight.info.ggml_type, dtype=torch.int32)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        own = (f"{prefix}weight", f"{prefix}weight.ggml_type")
        others = {k: v for k, v in state_dict.items() if k not in own}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing, unexpected, errors)
        if lacking := [k for k in own if k not in state_dict]:
            missing.extend(lacking)
            return
        packed, number = state_dict[own[0]], int(state_dict[own[1]])
        name = next((f.name for f in FORMATS.values() if f.ggml_type == number), f"GGML type {number}")
        try:
            weight = GGUFWeight(packed, name, (self.out_features, self.in_features))
        except ValueError as refused:
            errors.append(f"{own[0]}: {refused}")
            return
        if local_metadata.get("assign_to_params_buffers", False):
            self.weight = weight
        else:
            device = self.weight.device
            self.weight = weight.map(lambda t: t.to(device, copy=True))
