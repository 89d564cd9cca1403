"""`riftco doctor`: what this machine has and what of it works (machine.py), proved by running it (report.py)."""

from .report import Report, examine

__all__ = ["Report", "examine"]
