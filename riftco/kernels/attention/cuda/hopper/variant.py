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
    TURNS: (
        int  # the warpgroups hand the tensor cores over 1: once S is done, 2: once both products are issued, 0: never
    )
    STAGED: bool  # O leaves through a buffer of its own, so that the next Q is loaded meanwhile
    GROUP: int  # heads whose tiles are worked on together

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
    64: Tiles(BN=128, STAGES=2, WG=2, REGISTERS=240, TURNS=1, STAGED=True, GROUP=16),
    128: Tiles(BN=128, STAGES=2, WG=2, REGISTERS=240, TURNS=1, STAGED=True, GROUP=16),
    256: Tiles(BN=64, STAGES=2, WG=2, REGISTERS=240, TURNS=0, STAGED=False, GROUP=16),
}
