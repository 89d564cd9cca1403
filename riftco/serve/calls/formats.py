"""How models write calls: three formats, told apart by the chat template that asks for them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from ...models import Tokenizer
from .. import grammar
from ..batch import Refused
from . import xml
from .call import MOST_MARKS, Call, Tool, call_of, json_at, json_of

SPACE = r"/[ \t\n]{0,8}/"
Taken = tuple[Call | None, int] | None  # a call, or None for text, and how many characters it is; None: more must come


class Format(Protocol):
    """Attributes:
    special: special tokens of the vocabulary that are not shown where they begin no call.
    tokens: what calls are written with that may be special tokens of a vocabulary: text, as far as calls are read.
    many: whether a reply that is made to call may have several calls.
    between: characters that may stand between calls, beside white space.
    mark: what a call certainly begins with.
    ids: of `tokens` those that are tokens of their own in the vocabulary, mark -> id.
    """

    special: tuple[str, ...]
    tokens: tuple[str, ...]
    many: bool
    between: str
    mark: str
    ids: Mapping[str, int]

    def begins(self, text: str, fresh: bool) -> tuple[int | None, int]:
        """Where a call may begin; else how many characters at the end may become its beginning. `fresh`: no text of the
        reply comes before."""

    def take(self, text: str, tools: Mapping[str, Tool], final: bool) -> Taken:
        """What `text`, which begins as a call does, begins with; `final`: no more text comes."""

    def rules(self, tools: Sequence[Tool], many: bool) -> str:
        """Rules of a grammar, of which `calls` is one call or more."""

    def rest(self, tools: Sequence[Tool]) -> str:
        """A grammar of what follows the mark."""


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return max((n for m in marks for n in range(1, len(m)) if text.endswith(m[:n])), default=0)


class Hermes:
    """<tool_call>{"name": .., "arguments": {..}}</tool_call>, as Hermes and Qwen write it."""

    special: tuple[str, ...] = ()
    many, between = True, ""
    mark, close = "<tool_call>", "</tool_call>"
    tokens: tuple[str, ...] = (mark, close)
    open = mark

    def __init__(self, ids: Mapping[str, int] = MappingProxyType({})):
        self.ids = ids

    def begins(self, text: str, fresh: bool) -> tuple[int | None, int]:
        at = text.find(self.open)
        return (None, held_back(text, [self.open])) if at < 0 else (at, 0)

    def take(self, text: str, tools: Mapping[str, Tool], final: bool) -> Taken:
        start, end = len(self.open), text.find(self.close)
        while end >= 0:
            try:
                return call_of(json_of(text[start:end]), tools), end + len(self.close)
            except ValueError as why:
                if not str(why).startswith("Unterminated string"):  # else the mark is part of an argument
                    return None, end + len(self.close)
            end = text.find(self.close, end + 1)
        if text.count(self.close) > MOST_MARKS:
            return None, text.index(self.close) + len(self.close)
        if not final:
            return None
        try:  # the model ended its turn without the mark
            return call_of(json_of(text[start:]), tools), len(text)
        except ValueError:
            return None, len(text)

    def rules(self, tools: Sequence[Tool], many: bool) -> str:
        begin, end = (grammar.mark(m, self.ids) for m in (self.open, self.close))
        lines = [
            'calls: call ("\\n" call)*' if many else "calls: call",
            f'call: {begin} "\\n" ({" | ".join(f"call_{i}" for i in range(len(tools)))}) "\\n" {end}',
        ]
        return "\n".join(lines + json_calls(tools, "arguments"))

    def rest(self, tools: Sequence[Tool]) -> str:
        return "\n".join(
            [f"start: {either(tools)} {SPACE} {grammar.mark(self.close, self.ids)}", *json_calls(tools, "arguments")]
        )


class Llama:
    """{"name": .., "parameters": {..}} as the whole reply, as Llama 3 writes it, behind <|python_tag|> or not."""

    mark = "<|python_tag|>"  # without it nobody knows before the end whether JSON is a call
    special: tuple[str, ...] = (mark,)
    tokens = special
    many, between = False, ";"  # its template renders no more than one
    ids: Mapping[str, int] = MappingProxyType({})  # no rule has its mark

    def begins(self, text: str, fresh: bool) -> tuple[int | None, int]:
        if fresh and text.lstrip().startswith("{"):
            return len(text) - len(text.lstrip()), 0
        at = text.find(self.special[0])
        if at >= 0:
            return at, 0
        return None, held_back(text, self.special)

    def take(self, text: str, tools: Mapping[str, Tool], final: bool) -> Taken:
        body = text.removeprefix(self.special[0])
        start = len(body) - len(body.lstrip())
        try:
            found, end = json_at(body, start)
        except ValueError:
            return (None, len(text)) if final else None
        end += len(text) - len(body)
        return call_of(found, tools), end

    def rules(self, tools: Sequence[Tool], many: bool) -> str:
        choice = " | ".join(f"call_{i}" for i in range(len(tools)))
        return "\n".join([f"calls: {choice}", *json_calls(tools, "parameters")])

    def rest(self, tools: Sequence[Tool]) -> str:
        return "\n".join([f"start: {either(tools)}", *json_calls(tools, "parameters")])


def either(tools: Sequence[Tool]) -> str:
    """White space, and the rule of one of the tools' calls."""
    return f"{SPACE} ({' | '.join(f'call_{i}' for i in range(len(tools)))})"


def json_calls(tools: Sequence[Tool], arguments: str) -> list[str]:
    """A rule call_i for each tool: the object that names it. Its schema stands by itself, so that references hold."""
    made = []
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
        made.append(f"call_{i}: {grammar.text(head)} {grammar.schema(tool.parameters)} {grammar.text('}')}")
    return made


def format_of(tokenizer: Tokenizer) -> Format:
    """The format that a model's chat template asks for.

    Raises:
        Refused: the template takes no tools, or asks for calls in a format that is not known here.
    """
    template = tokenizer.template(tools=True)
    if "tools" not in template:
        raise Refused("this model's chat template takes no tools; send none, or serve a model that was made for them")
    if Hermes.open in template and "<function=" in template:
        return xml.Xml(tokenizer.tokens_of(xml.Xml.tokens))
    if Hermes.open in template and re.search(r'"arguments\\?"', template):
        return Hermes(tokenizer.tokens_of(Hermes.tokens))
    if Llama.special[0] in template or ("<|start_header_id|>" in template and '"parameters":' in template):
        return Llama()
    raise Refused(
        "this model's chat template asks for calls in a format that is not known here; known: <tool_call>{json}, "
        "<tool_call><function=..>, and Llama 3's {json}"
    )
