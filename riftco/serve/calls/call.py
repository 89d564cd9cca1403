"""A tool that a model may call, and a call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    if not isinstance(found, dict) or found.get("name") not in tools:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # written as a string of JSON
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(found["name"], json.dumps(arguments, ensure_ascii=False))
