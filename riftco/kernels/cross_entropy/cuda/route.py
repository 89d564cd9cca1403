"""Which tiles a row of logits gets. Pure: no device is asked."""

from typing import NamedTuple

KEEP_FROM = 65536  # classes from which a second walk finds too little of the row in the L2 cache of an H200

DEEP_FROM = 40000  # classes from which a thread has 32 bytes on their way at once


class Plan(NamedTuple):
    """Tiles [T, R, E] of rows.py, and how many of them at the row's end stay in registers between the two walks."""

    warps: int
    R: int
    E: int
    keep: int

    @property
    def T(self) -> int:
        return 32 * self.warps


# classes up to which a row of 16-bit logits gets so many warps; measured on an H200, loss and gradient in one launch
WARPS = ((256, 1), (2048, 2), (8192, 4), (16384, 8), (KEEP_FROM - 1, 16))


def plan(V: int, itemsize: int, aligned: bool, metrics: bool, plain: bool) -> Plan:
    """V classes of `itemsize` bytes; aligned: rows can be read 16 bytes at a time; plain: no option but weights and
    z_loss, and V a multiple of 16.

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
    R = 2 if V > DEEP_FROM and not metrics else 1  # with metrics, registers would spill
    keep = 2 if plain and not metrics and itemsize == 2 and KEEP_FROM <= V else 1
    return Plan(warps, R, elements, keep)


class Held(NamedTuple):
    """How held.py takes a row: its chunks of T times 16 bytes, how many of the last are held, how many others come at
    once, and the most registers of a thread."""

    warps: int
    chunks: int
    held: int
    R: int
    registers: int

    @property
    def T(self) -> int:
        return 32 * self.warps


HELD_FROM, MOST = 16385, 1 << 30  # classes; offsets of more would not fit 32 bits
# classes up to which a row of 16-bit logits gets so many (warps, chunks at once, registers); measured on an H200 at
# 32000, 49152, 65024, 128256 and 256000: four programs of 16 warps on a multiprocessor, three and two, as the rows in
# flight must leave room in the L2 cache, then one of 32
SHAPES = ((24576, 16, 2, 32), (32768, 16, 3, 32), (49152, 16, 3, 40), (65536, 16, 4, 64), (MOST, 32, 4, 64))


FEW_ROWS = 1024


def once(V: int, N: int) -> Held:
    """How N rows that `held` takes are read for their loss alone: once, so that the L2 cache needs no room for them.

    Measured on an H200 at 16400 to 262144 classes: eight programs of 8 warps on a multiprocessor with two chunks on
    their way, 4300 to 4600 GB/s; of 128 or 200 rows four of 16 warps.
    """
    warps, R = 16 if N < FEW_ROWS else 8, 2
    chunks = -(-V // (256 * warps))
    return Held(warps, chunks, chunks % R or R, R, 32)


def held(V: int, panel: int = 0) -> Held | None:
    """For loss and gradient of V classes, a multiple of 16, of 16 bits, in rows that can be read 16 bytes at a time,
    without options but row weights and z_loss. At least one chunk is held, the last, which V may end within.

    panel: where rows lie in panels, the classes of one, a multiple of a chunk's 256 a warp: what comes at once is of
    one panel."""
    if not HELD_FROM <= V <= MOST:
        return None
    _, warps, R, registers = next(shape for shape in SHAPES if shape[0] >= V)
    chunks = -(-V // (256 * warps))
    if panel:
        R, registers = next(r for r in (4, 3, 2, 1) if panel // (256 * warps) % r == 0), 64
        return Held(warps, chunks, max(n for n in range(1, min(chunks, 4) + 1) if (chunks - n) % R == 0), R, registers)
    return Held(warps, chunks, chunks % R or R, R, registers)
