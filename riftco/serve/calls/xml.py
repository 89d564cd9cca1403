"""Calls as Qwen3-Coder writes them: arguments in tags, each as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .. import grammar
from .call import Call, Tool

PARAMETER = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))"
FUNCTION = re.compile(rf"<function=([^>\n]+)>((?:\s*{PARAMETER})*)\s*</function>", re.S)
OPEN, CLOSE, HEAD = "<tool_call>", "</tool_call>", "<function="


class Xml:
    """<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>; a model may leave the outer
    tag out."""

    special: tuple[str, ...] = ()
    many, between, mark = True, "", OPEN

    def begins(self, text: str, fresh: bool) -> tuple[int | None, int]:
        found = [at for mark in (OPEN, HEAD) if (at := text.find(mark)) >= 0]
        if found:
            return min(found), 0
        return None, max((n for m in (OPEN, HEAD) for n in range(1, len(m)) if text.endswith(m[:n])), default=0)

    def take(self, text: str, tools: Mapping[str, Tool], final: bool) -> tuple[Call | None, int] | None:
        end = CLOSE if text.startswith(OPEN) else "</function>"
        at = text.find(end)
        while at >= 0:
            size = at + len(end)
            body = text[:size].removeprefix(OPEN).removesuffix(CLOSE).strip()
            if whole := FUNCTION.fullmatch(body):
                return call_of(whole, tools), size
            at = text.find(end, size)  # the mark may be part of an argument
        if not final:
            if CLOSE in text and HEAD not in text:  # something else in the tag
                return None, text.index(CLOSE) + len(CLOSE)
            return None
        whole = FUNCTION.fullmatch(text.removeprefix(OPEN).strip())
        return (call_of(whole, tools) if whole else None), len(text)

    def rules(self, tools: Sequence[Tool], many: bool) -> str:
        lines = [
            'calls: call ("\\n" call)*' if many else "calls: call",
            f"call: {grammar.text(OPEN + chr(10))} ({' | '.join(f'call_{i}' for i in range(len(tools)))}) "
            f"{grammar.text(chr(10) + CLOSE)}",
        ]
        return "\n".join(lines + self._calls(tools))

    def rest(self, tools: Sequence[Tool]) -> str:
        either = " | ".join(f"call_{i}" for i in range(len(tools)))
        return "\n".join([f'start: "\\n" ({either}) "\\n" {grammar.text(CLOSE)}', *self._calls(tools)])

    def _calls(self, tools: Sequence[Tool]) -> list[str]:
        """A rule call_i for each tool."""
        lines = []
        for i, tool in enumerate(tools):
            parts, required = [], set(tool.parameters.get("required", ()))
            for j, (name, of) in enumerate(dict(tool.parameters.get("properties") or {}).items()):
                value = f"value_{i}_{j}"
                parts.append(f"{value}{'' if name in required else '?'}")
                lines.append(value_rule(value, name, of, tool.parameters))
            head = grammar.text(f"<function={tool.name}>\n")
            lines.append(f"call_{i}: {head} {' '.join(parts)} {grammar.text('</function>')}")
        return lines


def call_of(found: re.Match[str], tools: Mapping[str, Tool]) -> Call | None:
    tool = tools.get(found[1].strip())
    if tool is None:
        return None
    known = tool.parameters.get("properties") or {}
    made = {}
    for name, value in re.findall(PARAMETER, found[2] + "</function>", re.S):
        made[name.strip()] = value_of(value, known.get(name.strip()))
    return Call(tool.name, json.dumps(made, ensure_ascii=False))


def value_of(value: str, of: Any) -> Any:
    """An argument as its schema has it: text where it is a string, JSON otherwise, and text where it is no JSON."""
    kind = of.get("type") if isinstance(of, Mapping) else None
    if kind == "string" or (isinstance(of, Mapping) and _strings(of)):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _strings(of: Mapping[str, Any]) -> bool:
    choices = of.get("enum")
    return isinstance(choices, list) and bool(choices) and all(isinstance(v, str) for v in choices)


def value_rule(rule: str, name: str, of: Any, root: Mapping[str, Any]) -> str:
    """A parameter's tag with a value that its schema allows."""
    begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
    if isinstance(of, Mapping) and _strings(of):
        options = " | ".join(grammar.text(v) for v in of["enum"])
        return f"{rule}: {grammar.text(begin)} ({options}) {grammar.text(end)}"
    most = of.get("maxLength") if isinstance(of, Mapping) else None
    if isinstance(of, Mapping) and of.get("type") == "string" and (most is None or (type(most) is int and most >= 0)):
        count = "*" if most is None else f"{{0,{most}}}"
        return f"{rule}: {grammar.text(begin)} {rule}_text\n{rule}_text[suffix={grammar.text(end)}]: /(?s:.{count})/"
    definitions = {k: root[k] for k in ("$defs", "definitions") if k in root}
    allowed = {**(of if isinstance(of, Mapping) else {}), **definitions}
    return f"{rule}: {grammar.text(begin)} {grammar.schema(allowed)} {grammar.text(end)}"
