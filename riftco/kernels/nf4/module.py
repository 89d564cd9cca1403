"""A torch.nn.Linear whose frozen weight is held in NF4; reads and writes bitsandbytes' state_dict."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._calls import sole_call
from .op import nf4_linear
from .quantize import NESTED_BLOCK, dynamic_map, quantize_nf4
from .weight import STATE_KEYS, NestedAbsmax, NF4Weight

ZERO_CODES = 0x77  # two codes of the value 0


class NF4Linear(nn.Module):
    """y = x W^T + bias with a frozen 4-bit W. Starts as zeros: load a state_dict, or use `from_linear`.

    `weight` is an NF4Weight, not a Parameter: it follows the module between devices, no cast touches it, and its
    state_dict keys are bitsandbytes' (weight, weight.absmax, weight.quant_map, weight.nested_absmax,
    weight.nested_quant_map, weight.quant_state.bitsandbytes__nf4). A bitsandbytes.nn.Linear4bit (nf4) state_dict
    loads without requantising; block size and double quantisation are then those of the file.

    Args:
        in_features, out_features: K and N.
        bias: whether there is a bias [N].
        block_size: weights that share one absmax.
        double_quant: whether the absmax are themselves held in 8 bits.
        device, dtype: of the bias, and the dtype that bitsandbytes' files name; default PyTorch's.
    """

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        block_size: int = 64,
        double_quant: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        dtype = dtype or torch.get_default_dtype()
        numel = in_features * out_features
        blocks = -(-numel // block_size)
        nested = None
        if double_quant:
            peak = torch.zeros(-(-blocks // NESTED_BLOCK), device=device)
            nested = NestedAbsmax(peak, dynamic_map().to(peak.device), 0.0, NESTED_BLOCK)
        absmax = torch.zeros(blocks, dtype=torch.uint8 if double_quant else torch.float32, device=device)
        codes = torch.full(((numel + 1) // 2, 1), ZERO_CODES, dtype=torch.uint8, device=device)
        self.weight = NF4Weight(codes, absmax, (out_features, in_features), block_size, dtype, nested)
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, block_size: int = 64, double_quant: bool = True) -> NF4Linear:
        """Quantise a Linear's weight; its bias is shared, not copied."""
        made = cls(linear.in_features, linear.out_features, device="meta")
        made.weight = quantize_nf4(linear.weight, block_size=block_size, double_quant=double_quant)
        made.bias = linear.bias
        return made.train(linear.training)

    @classmethod
    def from_bnb(cls, layer: nn.Linear) -> NF4Linear:
        """Take over a quantised bitsandbytes.nn.Linear4bit (nf4): nothing is requantised, the bias is shared."""
        state = layer.state_dict()
        made = cls(layer.in_features, layer.out_features, device="meta")
        parts = {k.removeprefix("weight."): v for k, v in state.items() if k.startswith("weight.")}
        made.weight = NF4Weight.from_state(state["weight"], parts)
        made.bias = layer.bias
        return made.train(layer.training)

    def to_bnb(self) -> nn.Linear:
        """The same layer as a bitsandbytes.nn.Linear4bit: its codes and scales, not requantised; the bias is shared."""
        import bitsandbytes as bnb

        like: dict = dict(compute_dtype=self.weight.dtype, compress_statistics=self.weight.nested is not None)
        made = bnb.nn.Linear4bit(
            self.in_features, self.out_features, bias=False, quant_type="nf4", device="meta", **like
        )
        made.weight = bnb.nn.Params4bit.from_prequantized(
            self.weight.codes, self.weight.state(), device=self.weight.device, module=made
        )
        made.register_parameter("bias", self.bias)  # type: ignore[arg-type]
        return made.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        return nf4_linear(x, self.weight, self.bias)

    def saves_without_result(self) -> bool:
        """As `_recompute.last_product` asks."""
        return sole_call(self, NF4Linear)

    def extra_repr(self) -> str:
        w = self.weight
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"block_size={w.block_size}, double_quant={w.nested is not None}"
        )

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.weight = self.weight.map(fn)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.weight.codes
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.weight.state().items():
            destination[f"{prefix}weight.{name}"] = value

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        root = f"{prefix}weight"
        found = {k: state_dict[f"{root}.{k}"] for k in STATE_KEYS if f"{root}.{k}" in state_dict}
        others = {k: v for k, v in state_dict.items() if k != root and k not in {f"{root}.{f}" for f in found}}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing, unexpected, errors)
        if root not in state_dict:
            missing.append(root)
            return
        if state_dict[root].is_floating_point() and not found:
            errors.append(f"{root} is {state_dict[root].dtype}, not NF4; quantise it with NF4Linear.from_linear")
            return
        try:
            weight = NF4Weight.from_state(state_dict[root], found)
        except ValueError as refused:
            errors.append(f"{root}: {refused}")
            return
        if tuple(weight.shape) != (self.out_features, self.in_features):
            errors.append(
                f"size mismatch for {root}: {tuple(weight.shape)} in the state, "
                f"{(self.out_features, self.in_features)} in the module"
            )
        elif local_metadata.get("assign_to_params_buffers", False):
            self.weight = weight
        else:
            device = self.weight.device
            self.weight = weight.map(lambda t: t.to(device, copy=True))
