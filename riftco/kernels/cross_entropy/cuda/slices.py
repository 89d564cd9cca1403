"""The launches of a call whose logits are made a slice of rows at a time: what all slices share is worked out once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..._launch import Again, on
from ..route import of_call, of_panels
from . import rows as kernels
from .held import held_rows, loss_rows
from .launch import LARGEST_INT, WHOLE, fixed, held_constants, numbers_of, once_constants, opaque, per_row
from .route import held, once

if TYPE_CHECKING:
    from . import hopper


class Slices:
    """`forward`, or with `gradient` `forward_backward_`, of the logits of some rows after the others'.

    Args:
        target, row_weight, d_loss: of all rows, [N]; d_loss as `forward_backward_` takes it.
        options, metrics: as `forward` takes them.
        out: where the rows' loss, top and log_total go, and with metrics log_prob, entropy and argmax; each [N].
    """

    def __init__(
        self, target: Tensor, row_weight: Tensor | None, class_weight: Tensor | None, d_loss: Tensor | None,
        options: tuple, metrics: bool, gradient: bool, out: list[Tensor],
    ):  # fmt: skip
        self.target, self.row_weight = target.contiguous(), None if row_weight is None else row_weight.contiguous()
        self.up, self.stride_up = per_row(d_loss)
        self.out, self.options, self.metrics, self.gradient = out, options, metrics, gradient
        self.classes = None if class_weight is None else class_weight.sum()
        self.class_weight = class_weight
        self.most, self.look = 0, (0, 0, False, False)

    def __call__(self, logits: Tensor, first: int) -> None:
        """logits [n, V] of the rows from `first` on."""
        (n, V), (step, stride) = logits.shape, logits.stride()
        if n == 0 or V == 0:
            return
        look = (step if n > 1 else 0, stride if V > 1 else 1, logits.data_ptr() % 16 == 0, first > LARGEST_INT)
        if n > self.most or look != self.look:
            self._look(logits, look)
        if self.ring is not None and n >= self.ring.few(ahead=True):
            from . import hopper

            hopper.forward_backward(logits, (n, 0, step), logits, (0, step), self._ringed(first), self.ring)
            return
        g = () if self.alone else (logits if self.gradient else None,)  # not kept: slices' memory is let go
        with on(logits):
            self.launch(n, logits, *g, *self.tensors, first, *self.scalars)

    def in_panels(self, panels: list[Tensor], together: int) -> None:
        """The first rows' logits and their gradient, cut along V: contiguous panels [n, w] of neighbouring classes, of
        one width that chunks of held.py fill, but for the last. The first `together` of them lie one behind the other,
        and so do the rest."""
        V, (n, width), last = sum(p.shape[1] for p in panels), panels[0].shape, len(panels) - 1
        chosen, numbers = held(V, width), numbers_of(self.options)
        assert self.gradient and chosen is not None
        ring = of_panels(panels[0], V)
        if ring is not None:
            from . import hopper

            hopper.in_panels(panels, together, self._ringed(0), ring)
            return
        words = width // 2
        lay = ((n - 1) * words, together, last, (width - panels[last].shape[1]) // 8)
        with on(panels[0]):
            held_rows[(n,)](
                panels[0], panels[0], panels[min(together, last)], self.target, self.row_weight, self.up, *self.out,
                0, 1, width, 0, width, 0, self.stride_up, V, numbers[0], numbers[2], *numbers[-2:], *lay, SPAN=words,
                HAS_UP=self.up is not None, HAS_ROW_WEIGHT=self.row_weight is not None,
                **held_constants(panels[0], chosen),
            )  # fmt: skip

    def _ringed(self, first: int) -> hopper.Rows:
        from . import hopper

        ignore_index, _, z_loss, _, scale = self.options
        return hopper.Rows(
            self.target, self.row_weight, self.up, self.stride_up, self.out, (ignore_index, z_loss, scale), first
        )

    def _look(self, logits: Tensor, look: tuple[int, int, bool, bool]) -> None:
        n, V = logits.shape
        step, stride, aligned, _ = look
        _, smoothing, _, softcap, _ = self.options
        self.most, self.look = n, look
        self.fixed = fixed(
            V, stride, logits.dtype.itemsize, aligned and stride == 1 and step % 16 == 0, self.row_weight is not None,
            self.classes is not None, smoothing > 0, softcap > 0, self.metrics,
        )  # fmt: skip
        found = of_call(logits, n, (n, 0, step), self.fixed.in_use, ahead=True)
        self.ring = found.ring if self.gradient else None
        weighted, numbers = self.row_weight is not None, numbers_of(self.options)
        self.alone = self.fixed.held is not None and not self.gradient
        if self.alone:
            self.tensors = (self.target, self.row_weight, *self.out)
            self.scalars = (1, step, 0, V, numbers[0], numbers[2], numbers[-2])
            self.launch = Again(loss_rows, HAS_ROW_WEIGHT=weighted, **once_constants(logits, once(V, n)))
            return
        if self.fixed.held is not None:
            self.tensors = (None, self.target, self.row_weight, self.up, *self.out)
            self.scalars = (1, step, 0, step, 0, self.stride_up, V, numbers[0], numbers[2], *numbers[-2:], *WHOLE)
            self.launch = Again(
                held_rows, SPAN=0, HAS_UP=self.up is not None, HAS_ROW_WEIGHT=weighted,
                **held_constants(logits, self.fixed.held),
            )  # fmt: skip
            return
        nothing = [None] * (6 - len(self.out))
        self.tensors = (
            self.target, self.row_weight, self.class_weight, self.classes, self.up, *self.out, *nothing,
        )  # fmt: skip
        self.scalars = (1, step, 0, stride, step, 0, stride, self.stride_up, V, *numbers)
        self.launch = Again(
            kernels.forward_rows, GRAD=self.gradient, HAS_UP=self.up is not None, METRICS=self.metrics,
            OPAQUE=opaque(logits), KEEP=self.fixed.keep, **self.fixed.constants,
        )  # fmt: skip
