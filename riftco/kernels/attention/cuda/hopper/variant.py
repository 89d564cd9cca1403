"""The compile-time choices of a forward kernel, and the tables of measured ones."""

from dataclasses import dataclass

ROWS = 64  # query rows of a warpgroup: the M of wgmma


@dataclass(frozen=True)
class Tiles:
    """BN keys a block, STAGES of K and of V, WG consumer warpgroups of ROWS rows with REGISTERS a thread."""

    BN: int
    STAGES: int
    WG: int
    REGISTERS: int
    TURNS: bool  # the warpgroups hand the tensor cores on once S is done
    STAGED: bool  # O leaves through a buffer of its own, so that the next Q is loaded meanwhile

    @property
    def BM(self) -> int:
        return self.WG * ROWS


@dataclass(frozen=True)
class Variant:
    """A head dim D in tiles, with or without each option."""

    D: int
    tiles: Tiles
    LEFT: bool
    RIGHT: bool
    PACKED: bool
    K_LENS: bool
    SINKS: bool
    CAP: bool


# padded head dim -> tiles
TILES = {
    64: Tiles(BN=128, STAGES=4, WG=2, REGISTERS=240, TURNS=True, STAGED=True),
    128: Tiles(BN=128, STAGES=2, WG=2, REGISTERS=240, TURNS=False, STAGED=True),
    256: Tiles(BN=64, STAGES=2, WG=2, REGISTERS=240, TURNS=False, STAGED=False),
}
IN_CACHE = 16 << 20  # bytes of keys and values that are worked on together; twice that where tiles differ in length


def group(heads: int, kv_group: int, keys: int, D: int, uneven: bool) -> int:
    """Query heads whose tiles are worked on together, so that their keys and values stay in L2.

    Under a causal mask (`uneven`) the longest tiles of a group come first, and few heads would leave programs idle at
    its end.
    """
    fit = (IN_CACHE << uneven) // max(keys * D * 4, 1) * kv_group
    return min(heads, max(fit, 8 if uneven else 1, kv_group))
