"""Which tiles a row of logits gets. Pure: no device is asked."""

from typing import NamedTuple

KEEP_FROM = 65536  # classes from which a second walk finds too little of the row in the L2 cache of an H200

DEEP_FROM = 40000  # classes from which a thread has 32 bytes on their way at once


class Plan(NamedTuple):
    """Tiles [T, R, E] of rows.py, how many of them at the row's end stay in registers between the two walks, and the
    most registers of a thread where they are limited."""

    warps: int
    R: int
    E: int
    keep: int
    registers: int | None = None

    @property
    def T(self) -> int:
        return 32 * self.warps


# classes up to which a row of 16-bit logits gets so many warps; measured on an H200, loss and gradient in one launch
WARPS = ((256, 1), (2048, 2), (8192, 4), (16384, 8), (KEEP_FROM - 1, 16))
# the same of plain rows of which nothing is kept: (classes, R, registers). Few enough registers for four programs of 16
# warps on a multiprocessor, or for two where the rows of four outgrow the L2 cache
LEAN_FROM, LEAN_WARPS, LEAN = 16385, 16, ((40960, 2, 32), (KEEP_FROM - 1, 4, 64))


def plan(V: int, itemsize: int, aligned: bool, metrics: bool, plain: bool, both: bool = False) -> Plan:
    """V classes of `itemsize` bytes; aligned: rows can be read 16 bytes at a time; plain: no option but weights and
    z_loss, and V a multiple of 16; both: loss and gradient in one launch.

    With 32 warps a row has a multiprocessor for itself: 16 bytes a thread at once do not cover the memory's latency
    (16 KiB on their way, 25 wanted), 32 bytes do; two rows of 16 warps want them too once they outgrow the L2 cache.
    32K elements of a long row stay in registers where nothing else needs those: less is left to L2, and the second
    walk has work while its first loads are on their way. Rows that begin anywhere are read an element a lane, side by
    side: of 16 bytes a lane each element would be a load of its own that touches 16 sectors.
    """
    warps = next((w for most, w in WARPS if most >= V), 32)
    elements = 16 // itemsize
    if not aligned:
        return Plan(min(warps, 16), elements, 1, 1)
    if plain and both and not metrics and itemsize == 2 and LEAN_FROM <= V < KEEP_FROM:
        R, registers = next((R, registers) for most, R, registers in LEAN if most >= V)
        return Plan(LEAN_WARPS, R, elements, 0, registers)
    R = 2 if V > DEEP_FROM and not metrics else 1  # with metrics, registers would spill
    keep = 2 if plain and not metrics and itemsize == 2 and KEEP_FROM <= V else 1
    return Plan(warps, R, elements, keep)
