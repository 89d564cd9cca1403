"""Which kernels serve a head shape, and with which tiles. Torch-only and pure: tests and explain() read it."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

ROW_PRODUCTS = 8192  # elements that a program of the rows route multiplies at once: 64 registers a thread
LEAST_SHARED = 99 << 10  # bytes of shared memory a block that every GPU since Ampere has
HOPPER_SHARED = 227 << 10


@dataclass(frozen=True)
class Tiles:
    """Query rows M, keys N, warps and pipeline stages of each kernel."""

    fwd: tuple[int, int, int, int]
    dkdv: tuple[int, int, int, int]
    dq: tuple[int, int, int, int]


@dataclass(frozen=True)
class Route:
    name: str
    why: str
    D: int  # head dims padded to what a matrix unit takes
    Dv: int
    tiles: Tiles


# (shared memory, bytes of an element, padded head dim) -> tiles; the largest that a GPU has room for. Hopper's are the
# fastest measured on one; the least are those of their size that spill few registers on Ampere
TILES = {
    (LEAST_SHARED, 2, 64): Tiles((128, 64, 4, 2), (32, 128, 8, 2), (64, 64, 4, 2)),
    (LEAST_SHARED, 2, 128): Tiles((128, 64, 8, 2), (32, 64, 8, 2), (64, 32, 4, 2)),
    (LEAST_SHARED, 2, 256): Tiles((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    (LEAST_SHARED, 2, 512): Tiles((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (HOPPER_SHARED, 2, 64): Tiles((128, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 3)),
    (HOPPER_SHARED, 2, 128): Tiles((128, 128, 8, 3), (32, 64, 4, 3), (128, 64, 8, 3)),
    (HOPPER_SHARED, 2, 256): Tiles((128, 64, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2)),
    (LEAST_SHARED, 4, 64): Tiles((32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 4, 1)),
    (LEAST_SHARED, 4, 128): Tiles((16, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
    (LEAST_SHARED, 4, 256): Tiles((16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}


# Kernels for capability 9.0 alone (cuda/hopper/): the head dims that they compute with, options that they know, and the
# rows of an average document below which tiles that hold one document each would be mostly empty.
HOPPER_WIDTHS: dict[str, tuple[int, ...]] = {"forward": (64, 128, 256), "backward": (64, 128, 256)}
HOPPER_OPTIONS = {
    "forward": frozenset({"window", "sinks", "k_lens", "softcap"}),
    "backward": frozenset({"window", "sinks", "k_lens", "kv_grad_start", "softcap"}),
}
HOPPER_DOCUMENT = 256


NEED_ROOM = frozenset({"bias", "dropout"})  # options that put tiles of their own beside the largest ones


def route(
    dtype: torch.dtype, D: int, Dv: int, *, backward: bool = False, capability: tuple[int, int] | None = None,
    shared: int = LEAST_SHARED, document: int | None = None, aligned: bool = True,
    options: frozenset[str] = frozenset(),
) -> Route:  # fmt: skip
    """The kernels' name, head dims padded to a power of two, tiles, and why.

    "hopper": capability 9.0, 16 bits, D == Dv, and all else that `_why_not_hopper` asks for.
    "tiled": D == Dv, a multiple of 8 up to 256: whole 16-byte loads and matrix units.
    "padded": other head dims up to 512 (float32: 256), D != Dv included: the same kernels, each operand padded on its
    own, with the tiles of the larger of the two.
    "rows": above that, where no tile of 16 rows fits shared memory: the same kernels with one row a program and
    products summed outside the matrix unit. Slow, for any head dim.

    Args:
        backward: the forward and the backward of a call may take different routes.
        capability: the GPU's compute capability; None asks for a portable route.
        shared: bytes of shared memory that a block may have.
        document: average rows of a packed document; None where inputs are not packed.
        aligned: TMA descriptors can be made of every operand, see `aligned`.
        options: names of the options in use that a kernel must know: bias, dropout, softcap, ...
    """
    short = document if document is not None and document < HOPPER_DOCUMENT else None
    widths = HOPPER_WIDTHS["backward" if backward else "forward"]
    return _route(dtype, D, Dv, backward, capability, shared, short, aligned, options, widths)


@functools.lru_cache(1024)  # asked for every layer of every step
def _route(
    dtype: torch.dtype, D: int, Dv: int, backward: bool, capability: tuple[int, int] | None, shared: int,
    short: int | None, aligned: bool, options: frozenset[str], widths: tuple[int, ...],
) -> Route:  # fmt: skip
    """`route`; short: rows of an average document where they are few; widths: what the kernels for Hopper take."""
    pad, pad_v = (max(16, 1 << (d - 1).bit_length()) for d in (D, max(Dv, 1)))
    shared = LEAST_SHARED if options & NEED_ROOM else max(shared, LEAST_SHARED)
    rooms = sorted({room for room, *_ in TILES if room <= shared}, reverse=True)
    found = (TILES.get((room, dtype.itemsize, max(64, pad, pad_v))) for room in rooms)
    tiles = next((t for t in found if t is not None), None)
    refused = _why_not_hopper(dtype, D, Dv, backward, capability, short, aligned, options, widths)
    if tiles is None:
        block = max(1, ROW_PRODUCTS // max(pad, pad_v))
        one = (1, block, 4, 1)
        why = f"head dims {D} and {Dv} leave no room for a tile of 16 rows of {dtype}"
        return Route("rows", why, pad, pad_v, Tiles(one, (block, 1, 4, 1), one))
    if not refused:
        return Route("hopper", f"capability 9.0, {dtype}, head dim {D}", pad, pad_v, tiles)
    suffix = f"; not hopper: {refused}" if capability == (9, 0) else ""
    if Dv == D and D % 8 == 0 and D <= 256:
        return Route("tiled", f"head dim {D} is a multiple of 8 up to 256{suffix}", pad, pad_v, tiles)
    why = f"head dims {D} and {Dv} differ" if Dv != D else f"head dim {D} is no multiple of 8 up to 256"
    return Route("padded", why + suffix, pad, pad_v, tiles)


def _why_not_hopper(dtype, D, Dv, backward, capability, short, aligned, options, widths) -> str:
    """Empty where the kernels for Hopper serve a call."""
    unknown = sorted(options - HOPPER_OPTIONS["backward" if backward else "forward"])
    widest = max(widths, default=0)
    reasons = (
        (capability != (9, 0), f"capability is {capability}"),
        (dtype.itemsize != 2, f"{dtype} is not of 16 bits"),
        (Dv != D, f"head dims {D} and {Dv} differ"),
        (D % 8 != 0 or widest < D, f"its kernels take multiples of 8 up to {widest}"),
        (bool(unknown), f"its kernels do not know {', '.join(unknown)}"),
        (not aligned, "TMA needs contiguous head dims, other strides of multiples of 16 bytes, aligned starts"),
        (short is not None, f"documents of {short} rows leave its tiles empty"),
    )
    return next((text for refuses, text in reasons if refuses), "")


def route_of(
    q: Tensor, k: Tensor, v: Tensor, *, backward: bool = False, portable: bool = False, cu_q: Tensor | None = None,
    options: frozenset[str] = frozenset(),
) -> Route:  # fmt: skip
    """`route` of a call; `portable` asks for a route of every GPU.

    How d_out lies does not matter: the Hopper backward copies one that no descriptor takes, as sum() sends back.
    """
    return route(
        q.dtype, q.shape[-1], v.shape[-1], backward=backward,
        capability=None if portable or q.device.type != "cuda" else _capability(q.device),
        shared=shared_memory(q.device), document=None if cu_q is None else q.shape[0] // (len(cu_q) - 1),
        aligned=all(descriptors_take(t) for t in (q, k, v)), options=options,
    )  # fmt: skip


def forward_routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    """(head dim, route, why) of plain calls on this machine's GPU, for explain()."""
    return _routes(dtype, backward=False)


def backward_routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    return _routes(dtype, backward=True)


def _routes(dtype: torch.dtype, backward: bool) -> list[tuple[str, str, str]]:
    here = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if here else None
    shared = shared_memory(torch.device("cuda", torch.cuda.current_device())) if here else LEAST_SHARED
    rows = []
    for D in (64, 128, 256, 512):
        found = route(dtype, D, D, backward=backward, capability=capability, shared=shared)
        why = found.why if here else f"{found.why}; what any GPU would run, as none is here"
        rows.append((f"head dim {D}", found.name, why))
    return rows


def descriptors_take(t: Tensor) -> bool:
    """Can a TMA descriptor be made of t [.., rows, heads, head dim]?"""
    *strides, last = t.stride()
    size = t.element_size()
    for stride, n in zip(strides, t.shape):
        if n > 1 and (stride < 0 or stride * size % 16):
            return False
    return last == 1 and t.data_ptr() % 16 == 0


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a block's tiles may fill; the least where Triton's interpreter runs on a CPU, and on GPUs for which no
    larger tiles were compiled: how many bytes the same tiles take differs between generations."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return LEAST_SHARED
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
