"""Learning rates over a run's horizon."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each step, 1 to `steps`.

    Args:
        lr: the highest rate.
        steps: the horizon.
        kind: "constant"; "linear" or "cosine" down towards `final` * lr, which the step after the last would have:
            every step learns; "wsd" (warm-up, stable, decay) stays and falls linearly over the last `decay` of the
            horizon.
        warmup: steps of linear rise to lr; the first one trains at lr / warmup; with none, at lr.
        final: fraction of lr where a decay ends.
        decay: fraction of the horizon in which "wsd" decays.
    """

    lr: float
    steps: int
    kind: str = "constant"
    warmup: int = 0
    final: float = 0.0
    decay: float = 0.2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"schedule must be one of {', '.join(KINDS)}; got {self.kind!r}")
        if not (0 < self.lr < math.inf):
            raise ValueError(f"lr must be above 0 and finite; got {self.lr}")
        if not 1 <= self.steps < 2**31:
            raise ValueError(f"steps must be 1 or more and below 2^31; got {self.steps}")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"warmup must be between 0 and the number of steps, {self.steps}; got {self.warmup}")
        if not 0 <= self.final <= 1 or not 0 < self.decay <= 1:
            raise ValueError(f"final must be in [0, 1] and decay in (0, 1]; got {self.final} and {self.decay}")

    def at(self, step: int) -> float:
        """The rate of `step`, counted from 1."""
        if not 1 <= step <= self.steps:
            raise OverflowError(f"step {step} is outside the schedule's horizon of {self.steps} steps")
        if step <= self.warmup:
            return self.lr * step / self.warmup
        start = max(self.warmup, 1)  # the last step at the full rate
        if self.kind == "wsd":
            start = max(start, int(self.steps * (1 - self.decay)))
        if self.kind == "constant" or step <= start:
            return self.lr
        done = (step - start) / (self.steps + 1 - start)
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.lr * (self.final + (1 - self.final) * left)
