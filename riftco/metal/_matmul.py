"""What csrc/metal/matmul.h asks of a launch: a threadgroup makes one tile of the product."""

TILE, TILE_THREADS = 32, 128


def tiles(rows: int, columns: int) -> int:
    """Threadgroups of a product [rows, columns]."""
    return -(-rows // TILE) * -(-columns // TILE)
