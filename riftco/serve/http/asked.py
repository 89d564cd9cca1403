"""What a request asks of the form of its reply, in any dialect: tools, which of them must be called, a schema."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .. import grammar
from ..batch import Refused
from ..calls import Call, CallGrammar, Format, Reader, Tool, format_of
from ..grammar import Grammar
from .errors import ApiError
from .service import Service

log = logging.getLogger(__name__)


class Function(BaseModel):
    """A function that may be called; `input_schema` is Anthropic's word for its parameters."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    input_schema: dict[str, Any] | None = None

    def tool(self) -> Tool:
        found = self.parameters or self.input_schema or {"properties": {}}
        return Tool(self.name, self.description or "", {"type": "object", **found})


class Parameters(BaseModel):
    """What is read of a function's parameters before the grammar's compiler reads them whole."""

    model_config = ConfigDict(extra="allow")

    type: Literal["object"]
    properties: dict[str, dict[str, Any] | bool] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


def function_of(given: Any, where: str) -> Tool:
    """A tool of a request; refused where it is no function, or its parameters are no schema of an object."""
    try:
        tool = Function.model_validate(given).tool()
        Parameters.model_validate(tool.parameters)
        return tool
    except ValidationError as why:
        first = why.errors()[0]
        at = ".".join(str(part) for part in (where, *first["loc"]))
        raise ApiError(400, f"{at}: {first['msg']}", param=where) from None


@dataclass(frozen=True)
class Asked:
    """Of one reply.

    Attributes:
        tools: those that the prompt shows.
        names: of these, the ones that may be called; None: all.
        must: whether one of them has to be.
        parallel: whether there may be several calls.
        lark: a grammar that the reply keeps to where it calls nothing; "": none.
    """

    tools: tuple[Tool, ...] = ()
    names: tuple[str, ...] | None = None
    must: bool = False
    parallel: bool = True
    lark: str = ""

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The chat template's options with the tools among them."""
        return {**given, "tools": [tool.as_template() for tool in self.tools]} if self.tools else dict(given)

    @property
    def callable(self) -> list[Tool]:
        return [tool for tool in self.tools if self.names is None or tool.name in self.names]

    def only(self, names: Sequence[str]) -> Asked:
        """No other tools than these may be called."""
        known = sorted({tool.name for tool in self.tools})
        for name in names:
            if name not in known:
                why = f"tool_choice: no tool {name!r}; tools: {', '.join(known) or 'none'}"
                raise ApiError(400, why, param="tool_choice")
        return replace(self, names=tuple(names))

    def format(self, service: Service) -> Format:
        try:
            return format_of(service.tokenizer)
        except Refused as why:
            raise ApiError(400, str(why), param="tools") from None

    def reader(self, service: Service) -> Reader | None:
        """What finds calls in the reply."""
        if not self.tools:
            return None
        return Reader(self.format(service), {t.name: t for t in self.callable}, None if self.parallel else 1)

    async def grammar(self, service: Service) -> Grammar | None:
        """What the reply must keep to; compiled on a thread, as it may take a second."""
        if self.tools:
            self.format(service)  # refused here, before anything is queued
        if not self.must and not self.lark:
            return await service.away(self._held, service) if self.callable else None

        def compiled() -> Grammar:
            return service.grammars.compile(self._rules(service))

        try:
            return await service.away(compiled)
        except Refused as why:
            raise ApiError(400, str(why), param=None if self.must else "response_format") from None

    def _held(self, service: Service) -> Grammar | None:
        """What holds calls that are made without being asked for. They were not asked to keep to anything: where that
        cannot be (llguidance is missing, or cannot follow a schema) they are what the model makes of them."""
        format = self.format(service)
        try:
            return CallGrammar(service.grammars.compile(format.rest(self.callable)), format.mark, service.tokenizer)
        except Refused as why:
            log.info("calls are not held to their schemas: %s", why)
            return None

    def _rules(self, service: Service) -> str:
        if not self.callable:
            return self.lark
        format = self.format(service)
        calls = format.rules(self.callable, self.parallel and format.many)
        if self.must:
            return f"start: calls\n{calls}"
        return f"start: calls | {self.lark.removeprefix('start: ')}\n{calls}"

    def refuse(self, service: Service) -> Callable[[Sequence[int]], str | None] | None:
        """Why a reply that was served is not to be learned: it calls a tool."""
        if not self.tools:
            return None

        def why(reply: Sequence[int]) -> str | None:
            reader, tokenizer = self.reader(service), service.tokenizer
            assert reader is not None
            text = tokenizer.decode([t for t in reply if t not in tokenizer.stop_ids])
            found = [*reader.add(text), *reader.rest()]
            return NO_CALLS if any(isinstance(part, Call) for part in found) else None

        return why

    def check_learn(self, learn: Any) -> None:
        """Refuse to learn a reply that can be nothing but a call."""
        if learn is not None and self.must and learn.reply is None and learn.reply_tokens is None:
            raise ApiError(400, NO_CALLS, param="learn.reply")


NO_CALLS = "a reply with tool_calls cannot be learned; send its text alone as the reply to learn"


def of_schema(given: Any, where: str) -> str:
    """The grammar of {"type": "text" | "json_object" | "json_schema", ..}; "" for text. The schema stands under
    `json_schema`, as in chat completions, or beside the type, as in responses."""
    if given is None:
        return ""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return ""
    if kind == "json_object":
        found: Any = {"type": "object"}
    elif kind == "json_schema":
        found = given["json_schema"] if isinstance(given.get("json_schema"), Mapping) else given
        found = found.get("schema")
    else:
        raise ApiError(400, f"{where}.type must be text, json_object or json_schema; got {kind!r}", param=where)
    if not isinstance(found, Mapping):
        raise ApiError(400, f"{where}: json_schema needs a schema, which is an object", param=where)
    return f"start: {grammar.schema(found)}"


def of_openai(tools: Sequence[Any] | None, choice: Any, parallel: bool | None, lark: str, nested: bool) -> Asked:
    """OpenAI's tools and tool_choice; `nested`: functions stand under "function", as in chat completions."""
    made = []
    for i, given in enumerate(tools or ()):
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind != "function":
            raise ApiError(400, f"tools.{i}.type must be function; got {kind!r}", param="tools")
        function, where = (given.get("function"), f"tools.{i}.function") if nested else (given, f"tools.{i}")
        made.append(function_of(function, where))
    asked = Asked(tuple(made), parallel=parallel is not False, lark=lark)
    if isinstance(choice, Mapping):
        return _chosen(asked, choice, nested)
    if choice in (None, "auto"):
        return asked
    if choice == "none":
        return Asked(lark=lark)
    if choice != "required":
        raise ApiError(
            400, f"tool_choice must be none, auto, required or name a function; got {choice!r}", param="tool_choice"
        )
    return must(asked)


def must(asked: Asked) -> Asked:
    if not asked.callable:
        raise ApiError(400, "tool_choice asks for a call, and there are no tools", param="tool_choice")
    return replace(asked, must=True)


def _chosen(asked: Asked, choice: Mapping[str, Any], nested: bool) -> Asked:
    kind = choice.get("type")
    inner = choice.get(str(kind)) if nested else choice
    if not isinstance(inner, Mapping) or kind not in ("function", "allowed_tools"):
        raise ApiError(400, f"tool_choice.type must be function or allowed_tools; got {kind!r}", param="tool_choice")
    if kind == "function":
        return replace(must(asked.only([str(inner.get("name"))])), parallel=False)
    given = inner.get("tools")
    tools = [t for t in given if isinstance(t, Mapping)] if isinstance(given, list) else []
    named = [t.get("function") if nested else t for t in tools]
    some = asked.only([str(t.get("name")) for t in named if isinstance(t, Mapping)])
    return must(some) if inner.get("mode") == "required" else some
