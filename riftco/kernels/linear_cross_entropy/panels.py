"""The first slice of a head that learns: its logits lie in panels of classes, some of them in dW's own memory.

That memory is idle until the first slice's gradient is known, and the product that makes some classes' dW is the last
to read their logits' gradient. So the first slice takes all of it beside slice_bytes: dW's rows are written, from the
first class on, over panels that are done with. Rows that fit this way are summed inside one product. Where all do, dW
is written once, in its own dtype, and what a wider sum of slices would have taken holds logits, too.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .head import Head, Sum, accumulate, add_product
from .plan import TILE, Filled, Plan, plan
from .problem import Problem
from .rows import Rows, Where, put

if TYPE_CHECKING:
    from .slices import Losses

LINE = 256  # bytes: panels within dW begin at multiples of it
FILLING = 132 * 128 * 256  # elements of results, a tile for each processor of an H200: cuBLAS divides no sums of those
WORTH = 0.8  # of the slices without panels, whose products and pass are a little faster
WIDEST = 24576  # classes of a panel, from which on its products take at most 1 % longer than those of all classes


class Sizes(NamedTuple):
    """What a call's memory is made of, in bytes.

    V, step: classes, and what a panel's width is a multiple of. logit: of one. narrow, wide: of a class of dW, as it is
    returned and as slices are summed. row: of a row of the first slice beside its logits. sums: of a row of d_x while
    it is summed. most: beside dW.
    """

    V: int
    step: int
    logit: int
    narrow: int
    wide: int
    row: int
    sums: int
    most: int


class Panels(NamedTuple):
    """rows: of the first slice; width: classes of a panel; inside: how many panels lie in dW's memory, at its end;
    sums: rows whose d_x is summed at once."""

    rows: int
    width: int
    inside: int
    sums: int


def fit(rows: int, width: int, s: Sizes, class_bytes: int, most: int) -> Panels | None:
    """With as many panels in dW's memory as may lie there, if the others take no more than `most` bytes."""
    panel, end, count = rows * width * s.logit, s.V * class_bytes // LINE * LINE, -(-s.V // width)

    def apart(inside: int) -> bool:
        """Panel i is read while dW's rows up to its own last class have been or are being written."""
        return all(min((i + 1) * width, s.V) * class_bytes <= end - (inside - i) * panel for i in range(inside))

    inside = next(n for n in range(min(count - 1, end // panel), -1, -1) if apart(n))
    if rows * s.V >= 2**32:  # words that 32 bits count
        return None
    least = min(rows, max(TILE, 4 * FILLING // max(1, s.sums) // TILE * TILE))
    left = most - rows * (s.row + (s.V - inside * width) * s.logit)
    return None if left < least * s.sums else Panels(rows, width, inside, _sums(rows, least, left, s.sums))


def _sums(rows: int, least: int, left: int, row: int) -> int:
    """As many rows as may be summed at once, in rounds of tiles."""
    return rows if left >= rows * row else left // (least * row) * least


def widths(s: Sizes) -> list[int]:
    """Widest first: few panels of equal width."""
    steps = -(-s.V // s.step)
    return sorted({min(-(-steps // n), WIDEST // s.step or 1) * s.step for n in range(2, steps + 1)}, reverse=True)


def _largest(count: int, width: int, s: Sizes) -> Panels | None:
    low, high, found = 1, count // TILE, None
    while low <= high:
        tiles = (low + high) // 2
        if (made := fit(tiles * TILE, width, s, s.wide, s.most)) is None:
            high = tiles - 1
        else:
            low, found = tiles + 1, made
    return found


@functools.lru_cache(1024)
def first(count: int, s: Sizes, row_bytes: int, filled: Filled | None) -> tuple[Panels, Plan] | None:
    """The first slice and those of the rows it leaves; None where slices of `plan` alone are as few."""
    for width in widths(s):
        if (made := fit(count, width, s, s.narrow, s.most + (s.wide - s.narrow) * s.V)) is not None:
            return made, plan(0, row_bytes, s.most)
    best: tuple[float, int, Panels, Plan] | None = None
    for width in widths(s):
        if (made := _largest(count - 1, width, s)) is None:
            continue
        for rows in sorted({made.rows, *(filled.whole_rounds(made.rows) if filled else ())}):
            rest = plan(count - rows, row_bytes, s.most, filled=filled)
            cost = rest.slices if filled is None else filled.cost(rows, rows) + filled.cost(count - rows, rest.rows)
            one = fit(rows, width, s, s.wide, s.most)
            if one is not None and (best is None or (cost, -width) < best[:2]):
                best = cost, -width, one, rest
    return None if best is None or best[2].rows <= best[3].rows else best[2:]


def backward(
    p: Problem,
    rows: Rows,
    head: Head,
    losses: "Losses",
    made: Panels,
    d_w: Sum,
    d_x: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """The first made.rows rows; nothing is in d_w yet."""
    where, x = rows.piece(0, made.rows)
    blocks = [slice(lo, min(lo + made.width, p.V)) for lo in range(0, p.V, made.width)]
    panels = _cut(d_w.total, x, made, blocks)
    for z, block in zip(panels, blocks):
        head.logits_of(x, None, block, z)
    losses.in_panels(panels, made.inside or len(panels))
    if d_x is not None:
        _d_x(p, panels, blocks, where, made.sums, d_x)
    for g, block in zip(panels, blocks):
        if d_bias is not None:
            d_bias[block] = g.sum(0, dtype=d_bias.dtype)
        accumulate(d_w.total[block], g, x, False)
    d_w.begun = True


def _d_x(p: Problem, panels: list[Tensor], blocks: list[slice], where: Where, some: int, out: Tensor) -> None:
    """Summed over panels in float32, `some` rows at a time."""
    sums = out.new_empty(some, p.C, dtype=p.acc)
    for lo in range(0, panels[0].shape[0], some):
        here = panels[0][lo : lo + some].shape[0]
        for g, block in zip(panels, blocks):
            add_product(sums[:here], g[lo : lo + here].t(), p.weight[block], block.start > 0)
        at = slice(where.start + lo, where.start + lo + here) if isinstance(where, slice) else where[lo : lo + here]
        put(out, at, sums[:here] if isinstance(at, slice) else sums[:here].to(out.dtype))


def _cut(total: Tensor, x: Tensor, made: Panels, blocks: list[slice]) -> list[Tensor]:
    size = made.rows * made.width
    own = total.view(-1).view(x.dtype)
    line = LINE // x.element_size()
    own = own[: own.numel() // line * line][-made.inside * size :] if made.inside else own[:0]
    rest = x.new_empty(made.rows * (blocks[-1].stop - made.inside * made.width))
    pieces = [*(own.split(size) if made.inside else ()), *rest.split(size)]
    return [t.view(made.rows, b.stop - b.start) for t, b in zip(pieces, blocks)]
