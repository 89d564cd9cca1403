"""NF4Weight: a frozen 4-bit weight, and bitsandbytes' names for its parts in a state_dict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .spec import TABLE

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
PACKED_KEY = "quant_state.bitsandbytes__nf4"
DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.float16, torch.bfloat16, torch.float64)}
STATE_KEYS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", PACKED_KEY)


@dataclass(frozen=True, eq=False)
class NestedAbsmax:
    """The second level of double quantisation: absmax = quant_map[code] * absmax_of_its_block + offset."""

    absmax: Tensor  # float32 [ceil(blocks / block_size)]
    quant_map: Tensor  # float32 [256]
    offset: float  # the mean of all absmax, a float32 value
    block_size: int = 256


@dataclass(frozen=True, eq=False)
class NF4Weight:
    """A weight in bitsandbytes' NF4 format. Never cast: `.to(dtype)` of a module leaves every part as it is.

    `scale` is the float32 absmax that kernels read: `absmax` itself, or, for double quantisation, its expansion, made
    once when the object is built (half a bit a weight). It is derived, so no state_dict carries it.

    Attributes:
        codes: uint8 [ceil(numel / 2), 1], the even element in the high nibble.
        absmax: [ceil(numel / block_size)], float32, or uint8 codes of the second level.
        shape: of the weight.
        block_size: neighbours along the flattened weight that share one absmax.
        dtype: of the weight before it was quantised; kept for the file.
        nested: the second level of double quantisation, or None.

    Raises:
        ValueError: parts that do not fit the shape.
    """

    codes: Tensor
    absmax: Tensor
    shape: tuple[int, ...]
    block_size: int = 64
    dtype: torch.dtype = torch.float32
    nested: NestedAbsmax | None = None
    scale: Tensor = field(init=False, repr=False)

    def __post_init__(self):
        numel = self.numel()
        blocks = -(-numel // self.block_size)
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"NF4Weight: block_size must be one of {BLOCK_SIZES}; got {self.block_size}")
        if self.codes.dtype != torch.uint8 or self.codes.numel() != -(-numel // 2):
            raise ValueError(
                f"NF4Weight: codes of a weight {tuple(self.shape)} must be uint8 with {-(-numel // 2)} values; "
                f"got {self.codes.dtype} {tuple(self.codes.shape)}"
            )
        wanted = torch.float32 if self.nested is None else torch.uint8
        if self.absmax.dtype != wanted or self.absmax.numel() != blocks:
            raise ValueError(
                f"NF4Weight: absmax of a weight {tuple(self.shape)} must be {wanted} with {blocks} values; "
                f"got {self.absmax.dtype} {tuple(self.absmax.shape)}"
            )
        n = self.nested
        if n is not None and (n.block_size < 1 or n.absmax.numel() != -(-blocks // n.block_size)):
            raise ValueError(
                f"NF4Weight: {blocks} absmax in blocks of {n.block_size} do not fit {n.absmax.numel()} nested_absmax"
            )
        object.__setattr__(self, "scale", self.absmax if self.nested is None else _expand(self.absmax, self.nested))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def kind(self) -> str:  # this and the next two: _frozen_weight.FrozenWeight
        return "nf4_linear"

    def operands(self) -> tuple[list[Tensor], list[int]]:
        return [self.codes, self.scale], [*self.shape, self.block_size]

    def decoded(self, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        """W[lo:hi], from the blocks that hold it: rows need not start where a block does."""
        K, block = self.shape[1], self.block_size
        first, last = lo * K // block, -(-hi * K // block)
        packed = self.codes.view(-1)[first * block // 2 : last * block // 2]
        count = min(last * block, self.numel()) - first * block
        values = torch.ops.riftco.nf4_dequantize(packed, self.scale[first:last], count, block, dtype)
        start = lo * K - first * block
        return values[start : start + (hi - lo) * K].view(hi - lo, K)

    def nbytes(self) -> int:
        """Bytes of the format itself, without the derived `scale`."""
        nested = (self.nested.absmax.nbytes + self.nested.quant_map.nbytes) if self.nested else 0
        return self.codes.nbytes + self.absmax.nbytes + nested

    def to(self, device: torch.device | str) -> NF4Weight:
        return self.map(lambda t: t.to(device))

    def map(self, fn: Callable[[Tensor], Tensor]) -> NF4Weight:
        """The same weight with `fn` applied to each part, shown to it as bytes: a move moves, a cast has no hold."""

        def part(t: Tensor) -> Tensor:
            place = fn(torch.empty(0, dtype=torch.uint8, device=t.device)).device
            if "xla" in (t.device.type, place.type):  # torch_xla cannot see one dtype as another
                return t.to(place)
            return fn(t.reshape(-1).view(torch.uint8)).view(t.dtype).view(t.shape)

        n = self.nested
        nested = None if n is None else NestedAbsmax(part(n.absmax), part(n.quant_map), n.offset, n.block_size)
        return NF4Weight(part(self.codes), part(self.absmax), self.shape, self.block_size, self.dtype, nested)

    def state(self) -> dict[str, Tensor]:
        """The parts beside the codes, by bitsandbytes' names (below ``weight.``)."""
        info: dict = {
            "quant_type": "nf4",
            "blocksize": self.block_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
        }
        state = {"absmax": self.absmax, "quant_map": TABLE.to(self.device, copy=True)}
        if self.nested is not None:
            info |= {
                "nested_blocksize": self.nested.block_size,
                "nested_dtype": "float32",
                "nested_offset": self.nested.offset,
            }
            state |= {"nested_absmax": self.nested.absmax, "nested_quant_map": self.nested.quant_map}
        state[PACKED_KEY] = torch.tensor(list(json.dumps(info).encode()), dtype=torch.uint8)
        return state

    @classmethod
    def from_state(cls, codes: Tensor, state: Mapping[str, Tensor]) -> NF4Weight:
        """bitsandbytes' codes (any storage dtype) and the parts by `state()`'s names -> the weight, not requantised."""
        missing = [k for k in ("absmax", "quant_map", PACKED_KEY) if k not in state]
        if missing:
            raise ValueError(f"NF4Weight: the state lacks {', '.join(missing)}")
        info = _info(state[PACKED_KEY])
        if not torch.equal(state["quant_map"].cpu(), TABLE):
            raise ValueError("NF4Weight: quant_map is not the NF4 table")
        nested = None
        if "nested_offset" in info:
            lacking = [k for k in ("nested_absmax", "nested_quant_map") if k not in state]
            if lacking:
                raise ValueError(f"NF4Weight: the state lacks {', '.join(lacking)}")
            nested = NestedAbsmax(
                state["nested_absmax"], state["nested_quant_map"], info["nested_offset"], info["nested_blocksize"]
            )
        packed = codes.reshape(-1).view(torch.uint8).view(-1, 1)
        dtype = DTYPES[info["dtype"]]
        return cls(packed, state["absmax"], tuple(info["shape"]), info["blocksize"], dtype, nested)


def _info(packed: Tensor) -> dict:
    """The JSON object of a quant_state, with what reading it needs."""
    info = json.loads(bytes(packed.tolist()))
    if not isinstance(info, dict):
        raise ValueError(f"NF4Weight: {PACKED_KEY} must hold a JSON object; got {type(info).__name__}")
    needed = ["quant_type", "dtype", "shape", "blocksize"] + ["nested_blocksize"] * ("nested_offset" in info)
    if missing := [k for k in needed if k not in info]:
        raise ValueError(f"NF4Weight: {PACKED_KEY} lacks {', '.join(missing)}")
    for key, accepted in (("quant_type", ("nf4",)), ("dtype", tuple(DTYPES))):
        if info[key] not in accepted:
            raise ValueError(f"NF4Weight: {key} must be {' or '.join(map(repr, accepted))}; got {info[key]!r}")
    return info


def _expand(codes: Tensor, nested: NestedAbsmax) -> Tensor:
    """uint8 absmax codes -> float32 absmax: product and sum rounded one after the other, as bitsandbytes does."""
    scale = nested.absmax.unsqueeze(-1).expand(-1, nested.block_size).reshape(-1)[: codes.numel()]
    return nested.quant_map[codes.int()].mul_(scale).add_(nested.offset)
