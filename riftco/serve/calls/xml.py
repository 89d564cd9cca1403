"""Calls as Qwen3-Coder writes them: arguments in tags, each as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .. import grammar
from .call import MOST_MARKS, Call, Tool, called, json_of

FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
# of a value: what looks like it elsewhere is part of the value
END = re.compile(r"\n?</parameter>\s*(?:(?=<parameter=[^>\n]+>)|(?=</function>\Z))")
OPEN, CLOSE, HEAD = "<tool_call>", "</tool_call>", "<function="


class Xml:
    """<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>; a model may leave the outer
    tag out."""

    special: tuple[str, ...] = ()
    tokens: tuple[str, ...] = (OPEN, CLOSE)
    many, between, mark = True, "", OPEN

    def __init__(self, ids: Mapping[str, int] = MappingProxyType({})):
        self.ids = ids

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
            if (whole := function_of(body)) is not None:
                return call_of(whole, tools), size
            at = text.find(end, size)  # the mark may be part of an argument
        if text.count(end) > MOST_MARKS:
            return None, text.index(end) + len(end)
        close = text.find(CLOSE)
        if close >= 0 and HEAD not in text[:close]:  # something else in the tag
            return None, close + len(CLOSE)
        if not final:
            return None
        whole = function_of(text.removeprefix(OPEN).strip())
        return (None if whole is None else call_of(whole, tools)), len(text)

    def rules(self, tools: Sequence[Tool], many: bool) -> str:
        lines = [
            'calls: call ("\\n" call)*' if many else "calls: call",
            f'call: {grammar.mark(OPEN, self.ids)} "\\n" ({" | ".join(f"call_{i}" for i in range(len(tools)))}) "\\n" '
            f"{grammar.mark(CLOSE, self.ids)}",
        ]
        return "\n".join(lines + self._calls(tools))

    def rest(self, tools: Sequence[Tool]) -> str:
        either = " | ".join(f"call_{i}" for i in range(len(tools)))
        return "\n".join([f'start: "\\n" ({either}) "\\n" {grammar.mark(CLOSE, self.ids)}', *self._calls(tools)])

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


Function = tuple[str, list[tuple[str, str]]]  # name, and its parameters' names and values


def function_of(text: str) -> Function | None:
    """The one function that a text is; found in one pass, whatever the text is."""
    head = FUNCTION.match(text)
    if head is None or not text.endswith("</function>"):
        return None
    at, made = head.end(), []
    while not text.startswith("</function>", at) or len(text) > at + len("</function>"):
        begin = PARAMETER.match(text, at)
        end = None if begin is None else END.search(text, begin.end())
        if begin is None or end is None:
            return None
        made.append((begin[1].strip(), text[begin.end() : end.start()]))
        at = end.end()
    return head[1].strip(), made


def call_of(found: Function, tools: Mapping[str, Tool]) -> Call | None:
    name, given = found
    tool = tools.get(name)
    if tool is None:
        return None
    known = tool.parameters.get("properties") or {}
    return called(name, {of: value_of(value, known.get(of)) for of, value in given})


def value_of(value: str, of: Any) -> Any:
    """An argument as its schema has it: text where it is a string, JSON otherwise, and text where it is no JSON."""
    kind = of.get("type") if isinstance(of, Mapping) else None
    if kind == "string" or (isinstance(of, Mapping) and _strings(of)):
        return value
    try:
        return json_of(value)
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
