"""Which tiles a row of logits gets. Pure: no device is asked."""

from typing import NamedTuple

KEEP_FROM = 65536  # classes from which a second walk finds too little of the row in the L2 cache of an H200


class Plan(NamedTuple):
    """Tiles [T, R, E] of rows.py, and how many repeats stay in registers between the two walks."""

    warps: int
    R: int
    E: int
    keep: int

    @property
    def T(self) -> int:
        return 32 * self.warps


# classes up to which a row of 16-bit logits gets so many warps; measured on an H200, loss and gradient in one launch
WARPS = ((256, 1), (2048, 2), (8192, 4), (16384, 8), (40000, 16))


def plan(V: int, itemsize: int, unit_stride: bool, plain: bool) -> Plan:
    """V classes of `itemsize` bytes; unit_stride: they lie side by side; plain: no option but row weights and z_loss.

    32K elements of a long row stay in registers where nothing else needs those: the first walk then leaves less to L2.
    """
    E = 16 // itemsize
    warps = next((w for most, w in WARPS if most >= V), 32)
    keep = 4 if plain and unit_stride and itemsize == 2 and KEEP_FROM <= V else 0
    return Plan(warps, 1, E, keep)
