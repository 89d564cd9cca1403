"""Where the sequences of a packed row lie: one immutable object, replaced as a whole when anything of it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .errors import DataError

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Geometry:
    """Sequences laid end to end.

    Attributes:
        positions: int32 [total], counted from 0 in each sequence.
        cu_seqlens: int32 [sequences + 1], where each begins and the last one ends.
        max_seqlen: the longest one.
    """

    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Geometry:
        """Sequences of these lengths, in this order."""
        total = sum(lengths)
        if total > INT32_MAX:
            raise OverflowError(f"a batch of {total} tokens does not fit the 32-bit offsets of packed sequences")
        if not lengths or min(lengths) < 1:
            raise DataError(f"a packed row needs sequences of one token or more; got lengths {list(lengths)[:8]}")
        cu = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=cu[1:])
        starts = np.repeat(cu[:-1], lengths)
        positions = np.arange(total, dtype=np.int32) - starts
        return cls(torch.from_numpy(positions), torch.from_numpy(cu), max(lengths))

    @classmethod
    def of_members(cls, members: np.ndarray) -> Geometry:
        """From the sequence that each token belongs to, [total] or [total, m] where -1 fills up.

        Raises:
            DataError: a token of several sequences (a shared prefix), of none, or a sequence in several pieces.
        """
        table = members.reshape(len(members), -1)
        several = np.flatnonzero((table >= 0).sum(1) != 1)
        if len(several):
            at = int(several[0])
            raise DataError(
                f"token {at} belongs to the sequences {[int(s) for s in table[at] if s >= 0]}; a packed token belongs "
                "to exactly one: write shared prefixes out once for each sequence"
            )
        of = table.max(1)
        bounds = np.flatnonzero(np.diff(of)) + 1
        starts = np.concatenate([[0], bounds])
        names, counts = np.unique(of[starts], return_counts=True)
        if (counts > 1).any():
            raise DataError(f"sequence {int(names[counts > 1][0])} lies in several pieces; a packed one is contiguous")
        return cls.of(np.diff(np.concatenate([starts, [len(of)]])).tolist())

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def to(self, device: torch.device | str) -> Geometry:
        return Geometry(
            self.positions.to(device, non_blocking=True),
            self.cu_seqlens.to(device, non_blocking=True),
            self.max_seqlen,
        )
