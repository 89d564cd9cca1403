"""What riftco.patch did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

BY = {
    "norm": "rms_norm",
    "mlp": "swiglu / geglu, its output recomputed in the backward",
    "rope": "rope",
    "attention": 'attention (attn_implementation="riftco")',
    "loss": "linear_cross_entropy on hidden states",
    "lora": "lora_linear",
    "nf4": "nn.NF4Linear",
}


@dataclass(frozen=True)
class Entry:
    """Modules of one class: swapped, or left alone and why."""

    part: str  # a key of BY
    cls: str
    count: int
    why_not: str | None = None


@dataclass(frozen=True)
class PatchReport:
    """What runs on riftco in a model, and what does not and why; print it."""

    family: str
    entries: tuple[Entry, ...] = field(default=())

    @property
    def swapped(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.why_not is None)

    @property
    def kept(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.why_not is not None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"riftco in a model of the family {self.family}:"
        for e in self.entries:
            says = f"riftco's {BY[e.part]}" if e.why_not is None else f"as before: {e.why_not}"
            yield f"  {e.part:<10}{e.count:>4} {e.cls:<24} {says}"
