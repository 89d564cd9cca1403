"""Where a training step's memory goes: the tensors that are alive at its peak, who made them and who holds them."""

from .report import MemoryReport, Row
from .trace import MemoryTrace

__all__ = ["MemoryReport", "MemoryTrace", "Row"]
