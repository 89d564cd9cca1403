"""One line of a JSONL file to messages or plain text: OpenAI, ShareGPT, Alpaca, prompt and completion, text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .errors import DataError

ACCEPTED = (
    "'messages' (OpenAI), 'conversations' (ShareGPT), 'instruction' and 'output' (Alpaca), 'prompt' and 'completion', "
    "or 'text'"
)
ARRAY = "; a JSON array becomes JSONL with: jq -c '.[]' FILE.json > FILE.jsonl"
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns beside a conversation
ROLES = ("system", "developer", "user", "assistant", "tool")
# names of the calls between a conversation and its template, which nobody sets; chat_template is code
NO_OPTIONS = frozenset((
    "self", "tokenizer", "messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message",
    "go_on", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask",
))  # fmt: skip
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
    """A conversation, or a plain text (then `messages` is empty).

    Attributes:
        prompt: how many characters the text begins with that are not trained on.
        options: what of the record its chat template takes beside the messages: `tools`, `enable_thinking`.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    prompt: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_line(line: str) -> Record:
    """Parse one JSONL line; DataError says what is wrong with it."""
    try:
        value = json.loads(line)
        if "\\ud" in line or "\\uD" in line:  # half of a pair is valid JSON, but no text that a tokenizer takes
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as bad:
        array = line.lstrip().startswith("[")
        raise DataError(f"not valid JSON{' in one line' * array} ({bad}){ARRAY * array}") from None
    if isinstance(value, list):
        raise DataError(f"expected a JSON object a line; got list{ARRAY}")
    return parse_record(value)


def parse_record(value: Any) -> Record:
    """A decoded JSON object to a Record; its format is told by its keys."""
    if not isinstance(value, dict):
        raise DataError(f"expected a JSON object with {ACCEPTED}; got {type(value).__name__}")
    for key in MEDIA:
        if value.get(key):
            raise DataError(f"'{key}' are not supported: models read text alone here")
    if "messages" in value:
        turns = [_openai(turn, i) for i, turn in enumerate(_list(value, "messages"))]
        return _conversation(turns, value)
    if "conversations" in value:
        turns = [_sharegpt(turn, i) for i, turn in enumerate(_list(value, "conversations"))]
        system = _text_of(value, "system")
        if system and turns[0].role != "system":
            turns.insert(0, Message({"role": "system", "content": system}))
        return _conversation(turns, value)
    if "instruction" in value:
        return Record(messages=_alpaca(value), options=_options(value))
    if "prompt" in value and "completion" in value:
        return _completion(value)
    if "text" in value:
        _no_options(value)
        if not isinstance(value["text"], str) or not value["text"]:
            raise DataError("'text' must be a string that is not empty")
        return Record(text=value["text"])
    raise DataError(f"no known keys ({', '.join(sorted(value)) or 'the object is empty'}); expected {ACCEPTED}")


def _conversation(turns: list[Message], value: Mapping[str, Any]) -> Record:
    if not any(m.role == "assistant" and m.weight > 0 for m in turns):
        raise DataError("nothing to train on: no assistant message with a weight above 0")
    return Record(messages=tuple(named_answers(turns)), options=_options(value))


def named_answers(turns: Iterable[Message]) -> Iterator[Message]:
    """The turns, where a tool's answer has the name of the tool that was called, which some templates want."""
    called: dict[str, str] = {}
    for turn in turns:
        called |= {str(call.get("id")): call["function"]["name"] for call in turn.fields.get("tool_calls") or ()}
        asked = str(turn.fields.get("tool_call_id"))  # both may lack ids
        if turn.role == "tool" and asked in called:
            turn = replace(turn, fields={"name": called[asked], **turn.fields})
        yield turn


def _options(value: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template's options of a record: tools, as a list or the JSON of one, and those that it names."""
    options = value.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise DataError(f"'chat_template_kwargs' must be an object; got {type(options).__name__}")
    check_options(options)
    tools = value.get("tools") or []
    if isinstance(tools, str):  # a column of one type for all rows
        try:
            tools = json.loads(tools) or []
        except (ValueError, RecursionError) as bad:
            raise DataError(f"'tools' is no JSON ({bad})") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise DataError("'tools' must be a list of objects: {type: 'function', function: {name, parameters}}")
    return {**options, "tools": tools} if tools else dict(options)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what would not reach the chat template.

    Raises:
        DataError: a name that is no option of a template.
    """
    if taken := NO_OPTIONS & options.keys():
        raise DataError(f"chat_template_kwargs: {min(taken)} is no option of a template")


def _no_options(value: Mapping[str, Any]) -> None:
    for key in ("tools", "chat_template_kwargs"):
        if value.get(key):
            raise DataError(f"'{key}' are of conversations: a text has no template that would show them")


def _completion(value: Mapping[str, Any]) -> Record:
    """Two texts, or two lists of messages, of which the second is trained on."""
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise DataError("nothing to train on: 'completion' is empty")
        _no_options(value)
        return Record(text=prompt + completion, prompt=len(prompt))
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise DataError("'prompt' and 'completion' must be two strings or two lists of messages")
    turns = [_openai(turn, i) for i, turn in enumerate([*prompt, *completion])]
    return _conversation([replace(t, weight=0.0) if i < len(prompt) else t for i, t in enumerate(turns)], value)


def _text_of(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key) or ""
    if not isinstance(text, str):
        raise DataError(f"'{key}' must be a string where it is given")
    return text


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
    if turn["role"] == "developer":  # what newer clients call the system; templates know the old name
        fields["role"] = "system"
    if turn.get("tool_calls"):
        calls = turn["tool_calls"] if isinstance(turn["tool_calls"], list) else [turn["tool_calls"]]
        fields["tool_calls"] = [plain_call(call, f"{where}: tool_calls") for call in calls]
    else:
        fields.pop("tool_calls", None)
    content = turn.get("content")
    if isinstance(content, list):  # OpenAI's content parts
        fields["content"] = "".join(_part(p, where) for p in content)
    elif content is None and turn["role"] == "assistant" and turn.get("tool_calls"):
        fields["content"] = ""
    elif not isinstance(content, str):
        raise DataError(f"{where}: 'content' must be a string; got {type(content).__name__}")
    return Message(fields, _weight(turn, where))


def plain_call(call: Any, where: str) -> dict[str, Any]:
    """A call with its arguments as an object, as chat templates take it; OpenAI's form has them as JSON in a string.

    Raises:
        DataError: what is no call.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} must be of functions: {{id, type, function: {{name, arguments}}}}")
    arguments = function.get("arguments") or "{}"
    try:
        made = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        made = None
    if not isinstance(made, dict):
        raise DataError(f"{where}: the arguments of {function['name']!r} are no JSON object: {arguments!r:.60}")
    return {**call, "function": {**function, "arguments": made}}


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
    if isinstance(turn, dict) and "role" in turn and "from" not in turn:
        return _openai(turn, index)  # many files have OpenAI's messages under ShareGPT's key
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
    more, system = _text_of(value, "input"), _text_of(value, "system")
    turns = [{"role": "system", "content": system}] if system else []
    history = value.get("history") or []
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError("'history' must be a list of pairs, each a question and its answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    turns.append({"role": "user", "content": f"{value['instruction']}\n\n{more}" if more else value["instruction"]})
    turns.append({"role": "assistant", "content": value["output"]})
    return tuple(Message(t) for t in turns)
