"""Rows of results in a CSV file."""

from __future__ import annotations

import csv
import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any


def file_of(out: pathlib.Path | None, folder: str | pathlib.Path, name: str) -> pathlib.Path:
    """Where rows go: `out`, else today's file of that name in the folder."""
    return out or pathlib.Path(folder) / f"{datetime.date.today()}-{name}.csv"


def append(path: pathlib.Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a file, at once: what comes after them may fail. A new file begins with the columns' names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def line(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Some of a row's columns, to be read."""
    return "  ".join(f"{k} {row[k]:.4g}" if isinstance(row[k], float) else f"{k} {row[k]}" for k in names)
