"""The rows that are computed: those without a label or with weight 0 are dropped before any matmul."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._launch import one_stride
from ..cross_entropy import spec
from .plan import Plan
from .problem import Problem

Where = slice | Tensor  # addresses the rows of a slice among all rows
Places = Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor]]  # as cross_entropy's spec.places


class Rows:
    """Which rows of x are computed; `over` goes through them in slices.

    n_labelled is an upper bound on the rows that carry loss, -1 for "compute all", None for "count them": that waits
    for an accelerator once, and is not done while a CUDA graph is captured or on XLA. `counted` is spec.places where
    that is known; `places` finds it in one launch.
    """

    def __init__(
        self, p: Problem, host_counts: bool, places: Places | None = None, counted: Tensor | None = None
    ):  # fmt: skip
        self.p, self.x = p, p.x
        self.total = p.rows.numel()
        self.flat = p.x.view(self.total, p.C) if one_stride(p.x) else None
        self.index: Tensor | None = None
        self.first, self.count, self.all_live = 0, self.total, False
        self.short: Tensor | None = None  # on a device that is not waited for: n_labelled left labelled rows out
        self._select(p.n_labelled, host_counts, places, counted)

    @functools.cached_property
    def live(self) -> Tensor:
        """Of every row, whether it carries loss."""
        return self.p.live().reshape(-1)

    @functools.cached_property
    def dead(self) -> Tensor:
        return self.live.logical_not()

    def _select(
        self, n_labelled: int | None, host_counts: bool, places: Places | None, counted: Tensor | None
    ) -> None:  # fmt: skip
        x, total = self.x, self.total
        waits = x.device.type == "xla" or (x.is_cuda and torch.cuda.is_current_stream_capturing())
        if total == 0 or n_labelled == -1 or (n_labelled is None and waits):
            return
        if n_labelled is None or host_counts:
            counted = self._places(places) if counted is None else counted
            count, first, last = counted.tolist()  # the one wait
            if n_labelled is not None and count > n_labelled:
                raise ValueError(
                    f"linear_cross_entropy: n_labelled={n_labelled}, but {count} rows carry a label and a weight"
                )
            self.count, self.all_live = count, True
            if last - first + 1 == count:  # neighbours: a view, not a copy
                self.first = first
            elif count:
                self.index = self._labelled_first()[:count]
        elif n_labelled < total:
            # what is left of n_labelled behind the labelled rows are rows that give 0
            self.count, self.index = n_labelled, self._labelled_first()[:n_labelled]
            self.short = self.live.sum() > n_labelled

    def _places(self, places: Places | None) -> Tensor:
        p = self.p
        if places is None or p.label_weight is not None:
            return spec.places_of(self.live)
        return places(p.target, p.row_weight, p.ignore_index)[1]

    def _labelled_first(self) -> Tensor:
        """Row numbers, labelled ones first, each group in order."""
        return self.dead.byte().sort(stable=True).indices

    @property
    def everything(self) -> bool:
        """Whether every row is computed, so that outputs need no zeros."""
        return self.count == self.total and self.index is None

    @property
    def views(self) -> bool:
        """Whether a slice's rows of x are a view of it, not a copy."""
        return self.index is None and self.flat is not None and self.all_live

    @property
    def where(self) -> Where:
        """All computed rows."""
        return slice(self.first, self.first + self.count) if self.index is None else self.index

    def of(self, t: Tensor) -> Tensor:
        """The computed rows of t [rows, ...]: t itself, or a view of it, where they lie together."""
        return t if self.everything else t[self.where]

    def whole(self) -> tuple[Where, Tensor]:
        """(where, x [count, C]) of all computed rows: a view of x where they lie together."""
        return self.where, self._rows_of_x(self.where)

    def over(self, plan: Plan, begin: int = 0) -> Iterator[tuple[Where, Tensor]]:
        """(where, x [n, C]) of each slice of the computed rows from `begin` on."""
        for lo in range(begin, self.count, plan.rows):
            yield self.piece(lo, min(lo + plan.rows, self.count))

    def piece(self, lo: int, hi: int) -> tuple[Where, Tensor]:
        """(where, x [hi - lo, C]) of some of the computed rows."""
        where = slice(self.first + lo, self.first + hi) if self.index is None else self.index[lo:hi]
        return where, self._rows_of_x(where)

    def _rows_of_x(self, where: Where) -> Tensor:
        if self.flat is not None:
            x = self.flat[where]
        else:
            rows = torch.arange(where.start, where.stop, device=self.x.device) if isinstance(where, slice) else where
            x = self.x[torch.unravel_index(rows, self.x.shape[:-1])]
        return x if self.all_live else x.masked_fill(self.dead[where].unsqueeze(-1), 0.0)  # 0 * NaN would reach dW

    def zeros_or_empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An output with a row for every row of x: rows that are dropped keep 0."""
        make = self.x.new_empty if self.everything else self.x.new_zeros
        return make((self.total, *shape), dtype=dtype)


def put(out: Tensor, where: Where, value: Tensor) -> None:
    if isinstance(where, slice):
        out[where] = value
    else:
        out.index_copy_(0, where, value)
