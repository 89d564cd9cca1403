"""Which of attention's Metal kernels serve a call, or why none. Torch-only and pure: tests and explain() read it."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

WIDTHS = (64, 128, 256)  # head dims for which tiles are compiled; those between are padded with zeros
LONGEST_ROW = 512  # bytes of a tile's row: with longer ones no tile fits 32 KiB of threadgroup memory
NO_SHADER = {  # options that the shaders do not know
    "bias": "a bias has no shader: its strides, dtypes and gradient are composed of PyTorch's operations",
    "dropout": "dropout has no shader: its Philox mask is composed of PyTorch's operations",
}


@dataclass(frozen=True)
class Route:
    """`name`: "tiled" (simdgroup matrices), "rows" (a row a threadgroup) or "composed"; `width` of a tile, else 0."""

    name: str
    why: str
    width: int = 0


def route(
    dtype: torch.dtype, D: int, Dv: int, *, options: frozenset[str] = frozenset(), matrices: bool | None = None
) -> Route:
    """The kernels of a call, forward or backward.

    "tiled": D == Dv up to 256 where a row has at most 512 bytes, on GPUs with simdgroup matrices.
    "rows": every other head dim, and GPUs without: a threadgroup a row, products summed across a simdgroup.
    "composed": riftco/kernels/attention/composed.py, for the options in NO_SHADER.

    Args:
        options: names of the options in use that a kernel must know: "bias", "dropout".
        matrices: the GPU has simdgroup matrices; None: as `simdgroup_matrices` says.
    """
    for name, why in NO_SHADER.items():
        if name in options:
            return Route("composed", why)
    width = next((w for w in WIDTHS if max(D, Dv) <= w), 0)
    if Dv != D:
        return Route("rows", f"head dims {D} and {Dv} differ")
    if not width or width * dtype.itemsize > LONGEST_ROW:
        return Route("rows", f"head dim {D} of {dtype}: no tile fits 32 KiB of threadgroup memory")
    if not (simdgroup_matrices() if matrices is None else matrices):
        return Route("rows", "this Mac's GPU has no simdgroup matrices")
    return Route("tiled", f"head dim {D} of {dtype} fits tiles of {width}", width)


def simdgroup_matrices() -> bool:
    """GPUs of Apple silicon Macs have them (family Apple7 on), those of Intel Macs do not; the emulator has."""
    return platform.system() != "Darwin" or platform.machine() == "arm64"


def used(bias: object, dropout_p: float) -> frozenset[str]:
    """The options of a call that `route` asks for."""
    return frozenset({"bias"} if bias is not None else ()) | frozenset({"dropout"} if dropout_p else ())


def routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    """(which calls, route, why), for explain()."""
    rows = [(f"head dim {D}", route(dtype, D, D)) for D in (*WIDTHS, 512)]
    rows += [(f"with {name}", route(dtype, 64, 64, options=frozenset({name}))) for name in NO_SHADER]
    return [(calls, found.name, found.why) for calls, found in rows]
