"""One line of a JSONL file to messages or plain text: OpenAI, ShareGPT, Alpaca, text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .errors import DataError

ACCEPTED = "'messages' (OpenAI), 'conversations' (ShareGPT), 'instruction' and 'output' (Alpaca), or 'text'"
ROLES = ("system", "developer", "user", "assistant", "tool")
LARGEST = torch.finfo(torch.float32).max  # of a weight: losses are float32
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Message:
    """One turn. `fields` is what the chat template sees; `weight` scales the loss of an assistant's turn (0: none)."""

    fields: Mapping[str, Any]
    weight: float = 1.0

    @property
    def role(self) -> str:
        return self.fields["role"]


@dataclass(frozen=True)
class Record:
    """A conversation, or a plain text (then `messages` is empty)."""

    messages: tuple[Message, ...] = ()
    text: str = ""


def parse_line(line: str) -> Record:
    """Parse one JSONL line; DataError says what is wrong with it."""
    try:
        value = json.loads(line)
        if "\\ud" in line or "\\uD" in line:  # half of a pair is valid JSON, but no text that a tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as bad:
        raise DataError(f"not valid JSON ({bad})") from None
    return parse_record(value)


def parse_record(value: Any) -> Record:
    """A decoded JSON object to a Record; its format is told by its keys."""
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object with {ACCEPTED}; got {type(value).__name__}")
    if "messages" in value:
        if value.get("tools"):
            raise DataError("'tools' definitions are not supported; write them into the system message")
        turns = _list(value, "messages")
        return Record(messages=_checked([_openai(turn, i) for i, turn in enumerate(turns)]))
    if "conversations" in value:
        turns = _list(value, "conversations")
        return Record(messages=_checked([_sharegpt(turn, i) for i, turn in enumerate(turns)]))
    if "instruction" in value:
        return Record(messages=_alpaca(value))
    if "text" in value:
        if not isinstance(value["text"], str) or not value["text"]:
            raise DataError("'text' must be a string that is not empty")
        return Record(text=value["text"])
    raise DataError(f"no known keys ({', '.join(sorted(value)) or 'the object is empty'}); expected {ACCEPTED}")


def _list(value: Mapping[str, Any], key: str) -> list:
    turns = value[key]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"'{key}' must be a list with at least one message")
    return turns


def _openai(turn: Any, index: int) -> Message:
    where = f"message {index}"
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise DataError(f"{where} must be an object with 'role' and 'content'")
    if turn["role"] not in ROLES:
        raise DataError(f"{where}: role {turn['role']!r} is not known; accepted: {', '.join(ROLES)}")
    fields = {k: v for k, v in turn.items() if k != "weight"}
    content = turn.get("content")
    if isinstance(content, list):  # OpenAI's content parts
        fields["content"] = "".join(_part(p, where) for p in content)
    elif content is None and turn["role"] == "assistant" and turn.get("tool_calls"):
        fields["content"] = ""
    elif not isinstance(content, str):
        raise DataError(f"{where}: 'content' must be a string; got {type(content).__name__}")
    return Message(fields, _weight(turn, where))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise DataError(f"{where}: content part of type {kind!r} is not supported; accepted: text")
    return part["text"]


def _weight(turn: Mapping[str, Any], where: str) -> float:
    weight = turn.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= LARGEST:
        raise DataError(f"{where}: 'weight' must be a finite float32 number of 0 or more; got {weight!r:.40}")
    if turn["role"] != "assistant":
        raise DataError(f"{where}: 'weight' belongs to assistant messages only; this one is {turn['role']}")
    return float(weight)


def _sharegpt(turn: Any, index: int) -> Message:
    where = f"message {index}"
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise DataError(f"{where} must be an object with 'from' and 'value'")
    origin = turn.get("from")
    role = SHAREGPT_ROLES.get(origin) if isinstance(origin, str) else None
    if role is None:
        raise DataError(f"{where}: from {origin!r} is not known; accepted: {', '.join(SHAREGPT_ROLES)}")
    weight = _weight({**turn, "role": role}, where)
    return Message({"role": role, "content": turn["value"]}, weight)


def _alpaca(value: Mapping[str, Any]) -> tuple[Message, ...]:
    for key in ("instruction", "output"):
        if not isinstance(value.get(key), str):
            raise DataError(f"'{key}' must be a string")
    more = value.get("input") or ""
    system = value.get("system") or ""
    if not isinstance(more, str) or not isinstance(system, str):
        raise DataError("'input' and 'system' must be strings where they are given")
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": f"{value['instruction']}\n\n{more}" if more else value["instruction"]})
    turns.append({"role": "assistant", "content": value["output"]})
    return tuple(Message(t) for t in turns)


def _checked(messages: list[Message]) -> tuple[Message, ...]:
    if not any(m.role == "assistant" and m.weight > 0 for m in messages):
        raise DataError("nothing to train on: no assistant message with a weight above 0")
    return tuple(messages)
