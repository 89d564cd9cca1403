"""Which CUDA kernel makes loss and gradient in one pass. Torch-only and pure: tests and explain() read it."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

LINE = 64  # logits in a line of the ring, 128 bytes
LEAST = 49153  # fewer classes: a program a row is faster


class Ring(NamedTuple):
    """How cuda/hopper.py runs: warps that sum and that write, registers of a summing thread, lines of a slot, slots,
    programs that divide a row among them, programs of a multiprocessor; the least rows of a call of its own.
    """

    summing: int
    writing: int
    registers: int
    lines: int
    slots: int
    parts: int
    programs: int
    least: int = 1

    def few(self, ahead: bool) -> int:
        """Fewer rows go another way. ahead: the host is ahead of the GPU, as between a head's products, which hides
        its longer way to a launch of the ring: then the GPU's time alone decides."""
        return self.least // 2 if ahead else self.least


class Route(NamedTuple):
    name: str
    why: str
    ring: Ring | None = None


# classes up to which a row gets a ring; measured on an H200 at 57344 and 65536; 128256 and 151936; 262144, 128 to 8192
# rows of them. A part fills at most 20 of the 26 slots, so that the next row is on its way while this one is written
RINGS = (
    (65536, Ring(4, 4, 96, 64, 13, 2, 2, least=1024)),
    (163840, Ring(8, 8, 96, 64, 26, 2, 1, least=512)),
    (327680, Ring(8, 8, 96, 64, 26, 4, 1, least=512)),
)


@functools.lru_cache(1024)
def route(
    N: int, V: int, dtype: torch.dtype, capability: tuple[int, int] | None, aligned: bool = True,
    options: frozenset[str] = frozenset(), ahead: bool = False,
) -> Route:  # fmt: skip
    """The kernel's name and why.

    "ring": on capability 9.0, rows of 16 bits, each logit read once into shared memory (cuda/hopper.py).
    "rows": any other call; a program a row, the row read again from the L2 cache (cuda/held.py, cuda/rows.py).

    Args:
        capability: the GPU's compute capability; None where there is none.
        aligned: see `in_bulk`.
        options: names of the options in use, of those that cost the ring's kernel registers: metrics, softcap,
            smoothing, weight.
        ahead: see `Ring.few`.
    """
    ring = next((ring for most, ring in RINGS if most >= V), RINGS[-1][1])
    reasons = (
        (capability is None, "what any GPU would run, as none is here"),
        (capability != (9, 0), f"capability is {capability}"),
        (dtype not in (torch.float16, torch.bfloat16), f"{dtype} is not of 16 bits"),
        (V % LINE != 0, f"{V} classes are no multiple of {LINE}"),
        (RINGS[-1][0] < V, f"{V} classes are more than {RINGS[-1][0]}"),
        (V < LEAST, f"a program a row is faster at {V} classes, fewer than {LEAST}"),
        (ring.few(ahead) > N, f"a program a row is faster for {N} rows, fewer than {ring.few(ahead)}"),
        (not aligned, "rows do not begin at multiples of 16 bytes, or not one behind the other"),
        (bool(options), f"not with {', '.join(sorted(options))}"),
    )
    refused = next((text for held, text in reasons if held), "")
    if refused:
        return Route("rows", refused)
    return Route("ring", f"capability 9.0, {dtype}, {V} classes", ring)


def of_call(
    x: Tensor, N: int, strides: tuple[int, int, int], options: frozenset[str], ahead: bool = False
) -> Route:  # fmt: skip
    """For x whose rows `as_rows` describes with (inner, outer stride, inner stride)."""
    if x.device.type != "cuda":
        return Route("rows", "no GPU")
    return route(N, x.shape[-1], x.dtype, capability_of(x.device), in_bulk(x, N, strides), options, ahead)


def of_panels(x: Tensor, V: int) -> Ring | None:
    """For plain rows of V classes in panels like x [N, width], which begin at multiples of 16 bytes. Two programs of a
    multiprocessor have no registers for where a chunk lies."""
    if x.device.type != "cuda":
        return None
    ring = route(x.shape[0], V, x.dtype, capability_of(x.device), ahead=True).ring
    return None if ring is None or ring.programs > 1 or x.shape[1] % (ring.lines * LINE) else ring


def in_bulk(x: Tensor, N: int, strides: tuple[int, int, int]) -> bool:
    """Whether rows begin at multiples of 16 bytes and their classes lie side by side; none lies over another, as those
    of an expanded tensor do, which a tensor map need not take."""
    (inner, outer, step), V = strides, x.shape[-1]
    apart = [s for s, there in ((outer, inner < N), (step, inner > 1)) if there]
    beside = x.stride(-1) == 1 or V == 1
    return beside and x.data_ptr() % 16 == 0 and all(s >= V and s * x.element_size() % 16 == 0 for s in apart)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def routes(dtype: torch.dtype) -> list[tuple[str, str, str]]:
    """(call, route, why) of common shapes on this machine's GPU, for explain()."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    found = [(N, V, route(N, V, dtype, capability)) for N, V in ((8192, 32000), (8192, 128256), (8192, 50257))]
    return [(f"{N} rows of {V} classes", one.name, one.why) for N, V, one in found]
