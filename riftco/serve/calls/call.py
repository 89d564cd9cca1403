"""A tool that a model may call, and a call."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEEPEST = 100  # levels of a call's arguments; those of a model that repeats itself go on
MOST_MARKS = 32  # closing marks that may be part of one call's arguments: all are tried again as the call grows
LONE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which no UTF-8 has


@dataclass(frozen=True)
class Tool:
    """A function: its name, what it is for, and a JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def as_template(self) -> dict[str, Any]:
        """As chat templates take it; some read fields that requests may leave out."""
        parameters = {"type": "object", "properties": {}, **self.parameters}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Call:
    """A call that a model made; `arguments` is a JSON object."""

    name: str
    arguments: str


def call_of(found: Any, tools: Mapping[str, Tool]) -> Call | None:
    """The call that a JSON value is: {"name": .., "arguments" or "parameters": {..}} of a tool that was offered."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or found["name"] not in tools:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # written as a string of JSON
        try:
            arguments = json_of(arguments)
        except ValueError:
            return None
    return called(found["name"], arguments)


def called(name: str, arguments: Any) -> Call | None:
    """A call, where these are arguments that whoever gets it can read."""
    if not isinstance(arguments, dict) or _deeper(arguments, DEEPEST):
        return None
    return Call(name, LONE.sub("\ufffd", json.dumps(arguments, ensure_ascii=False)))


def _deeper(value: Any, than: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(than <= 0 or _deeper(part, than - 1) for part in inside)


def json_of(text: str) -> Any:
    """The value that a text is, of JSON alone.

    Raises:
        ValueError: it is none, has NaN or a number beyond all, or is nested too deeply to be read.
    """
    value, end = json_at(text, len(text) - len(text.lstrip()))
    if text[end:].strip():
        raise ValueError(f"more behind the value: {text[end : end + 20]!r}")
    return value


def json_at(text: str, start: int) -> tuple[Any, int]:
    """The value that begins there, and where it ends; raises as `json_of` does."""
    try:
        return _DECODER.raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no number")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
