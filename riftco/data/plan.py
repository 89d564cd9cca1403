"""What one optimizer step executes and learns, worked out once from its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .batch import Batch


@dataclass(frozen=True)
class RowPlan:
    """The rows of a step.

    Attributes:
        spans: of each micro-batch, the (start, end) runs of rows that carry a label.
        labelled: of each micro-batch, how many rows do; the loss is normalised over their sum.
        physical: of each micro-batch, the tokens that are executed, labelled or not.
        padding: micro-batches that the accumulation period lacks because the data ended: they count for nothing.
    """

    spans: tuple[tuple[tuple[int, int], ...], ...]
    labelled: tuple[int, ...]
    physical: tuple[int, ...]
    padding: int

    @classmethod
    def of(cls, batches: Sequence[Batch], accumulate: int) -> RowPlan:
        """Of micro-batches on the CPU, before they travel."""
        return cls(
            spans=tuple(b.spans for b in batches),
            labelled=tuple(b.n_labelled for b in batches),
            physical=tuple(b.physical_tokens for b in batches),
            padding=accumulate - len(batches),
        )

    @property
    def labelled_tokens(self) -> int:
        return sum(self.labelled)

    @property
    def physical_tokens(self) -> int:
        return sum(self.physical)

    @property
    def denominator(self) -> int:
        """What every micro-batch's summed loss is divided by."""
        return max(self.labelled_tokens, 1)
