"""JSONL to tokenised examples: the model's chat template, and which tokens carry loss.

What of a conversation is trained on is found by a span diff: the text of the first i messages with the template's
generation prompt is what the model will have read when it answers; everything that message i adds to it, up to and
with its end-of-turn token, is the reply. A template may show less of a reply once others follow (Qwen3 its thoughts),
and close a conversation with a token that belongs to no turn (Phi-3): what the whole text has is trained on.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import DataError
from .records import Message, Record, parse_line, parse_record

__all__ = ["Dataset", "Example", "Message", "Template", "load_examples", "parse_record", "render"]


class Template(Protocol):
    """What rendering needs of a tokenizer; riftco.models.Tokenizer is one."""

    bos_id: int | None
    eos_id: int | None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **options: Any
    ) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...


@dataclass(frozen=True)
class Example:
    """Token ids and, for each, the weight of its loss as something to predict (0: not trained on)."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]
    line: int = 0

    @property
    def n_labelled(self) -> int:
        return sum(w > 0 for w in self.weights[1:])  # the first token has nothing before it to predict it from

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Dataset:
    """The examples of one file.

    Attributes:
        skipped: one line of text for each line of the file that `skip_bad` left out.
        truncated: how many examples were cut to the maximum length.
    """

    path: str
    examples: tuple[Example, ...]
    skipped: tuple[str, ...] = ()
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.examples)


@dataclass
class _Reading:
    examples: list[Example] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    truncated: int = 0


def load_examples(
    path: str | os.PathLike[str],
    template: Template,
    *,
    max_length: int | None = None,
    truncate: bool = False,
    skip_bad: bool = False,
) -> Dataset:
    """Read a JSONL file and tokenise each line with the model's chat template.

    Args:
        path: the file; blank lines are passed over.
        template: the model's tokenizer.
        max_length: most tokens of an example; a longer one is an error unless `truncate` cuts its end off.
        truncate: cut instead of refusing. An example left without anything to train on is still an error.
        skip_bad: leave bad lines out, and count them in `Dataset.skipped`.

    Raises:
        DataError: a missing or empty file, or a bad line, as "file:line: why".
    """
    reading = _Reading()
    for number, line in _lines(path):
        try:
            example, cut = example_of(line, template, number, max_length=max_length, truncate=truncate)
            reading.truncated += cut
            reading.examples.append(example)
        except ValueError as bad:  # DataError, and what the tokenizer or the template refuses
            why = f"{path}:{number}: {bad}"
            if not skip_bad:
                raise DataError(f"{why} (--skip-bad leaves such lines out)") from bad
            reading.skipped.append(why)
    if not reading.examples:
        reason = f"all {len(reading.skipped)} lines are bad; the first: {reading.skipped[0]}" if reading.skipped else ""
        raise DataError(f"{path}: no examples in this file{': ' + reason if reason else '; it is empty'}")
    return Dataset(str(path), tuple(reading.examples), tuple(reading.skipped), reading.truncated)


def example_of(
    line: str, template: Template, number: int, *, max_length: int | None, truncate: bool
) -> tuple[Example, bool]:
    """One line's example, and whether its end was cut off."""
    example = render(parse_line(line), template, line=number)
    if max_length is None or len(example) <= max_length:
        return example, False
    return _shortened(example, max_length, truncate), True


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    where = pathlib.Path(path)
    if where.is_dir():
        raise DataError(f"{path} is a folder; name the JSONL file in it")
    try:
        with open(where, "rb") as f:
            for number, raw in enumerate(f, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise DataError(f"{path}:{number}: not UTF-8 text; is this a JSONL file?") from None
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give the path of a JSONL file") from None


def _shortened(example: Example, max_length: int, truncate: bool) -> Example:
    if not truncate:
        raise DataError(
            f"the example has {len(example)} tokens, more than the {max_length} allowed; "
            "shorten it, or cut the ends of long examples off with --truncate"
        )
    cut = Example(example.ids[:max_length], example.weights[:max_length], example.line)
    if not cut.n_labelled:
        raise DataError(f"cut to {max_length} tokens, nothing to train on is left of this example")
    return cut


def render(record: Record, template: Template, *, line: int = 0) -> Example:
    """Tokenise one record; loss on the assistant's turns, end-of-turn token included, or on a plain text behind its
    prompt."""
    if not record.messages:
        example = _plain(record, template, line)
    else:
        text, spans = reply_spans(record, template)
        tokens, offsets = template.encode_with_offsets(text)
        example = Example(tuple(tokens), tuple(_weights(offsets, spans)), line)
    if not example.n_labelled:
        raise DataError("nothing to train on: it has no token to predict")
    return example


def _plain(record: Record, template: Template, line: int) -> Example:
    ids = template.encode(record.text, add_special_tokens=True)
    if template.bos_id is not None and ids[:2] == [template.bos_id] * 2:
        ids = ids[1:]  # the text has its own
    weights = [1.0] * len(ids)
    if record.prompt:
        tokens, offsets = template.encode_with_offsets(record.text)
        around = next((n for n in range(len(ids)) if ids[n : n + len(tokens)] == tokens), 0)
        read = sum(start < record.prompt for start, _ in offsets)
        if read == len(tokens):
            raise DataError(
                "nothing to train on: the completion lies in a token that begins in the prompt; white space between "
                "them belongs to the completion"
            )
        weights[: around + read] = [0.0] * (around + read)
    if template.eos_id is not None and ids[-1:] != [template.eos_id]:
        ids, weights = [*ids, template.eos_id], [*weights, 1.0]
    return Example(tuple(ids), tuple(weights), line)


def reply_spans(record: Record, template: Template) -> tuple[str, list[tuple[int, int, float]]]:
    """The rendered text, and (start, end, weight) in characters of each reply that carries loss."""
    turns = [dict(m.fields) for m in record.messages]

    def shown(n: int, add_generation_prompt: bool = False) -> str:
        return template.render_chat(turns[:n], add_generation_prompt=add_generation_prompt, **record.options)

    text = shown(len(turns))
    if record.options.get("tools"):
        others = {k: v for k, v in record.options.items() if k != "tools"}
        if template.render_chat(turns, **others) == text:
            raise DataError("the chat template has no place for 'tools'; write them into the system message")
    spans, closing = [], None
    for i, message in enumerate(record.messages):
        if message.role != "assistant" or message.weight == 0:
            continue
        if i == 0:
            raise DataError("message 0 is the assistant's; a conversation starts with a system or user message")
        before = shown(i, add_generation_prompt=True)
        after = shown(i + 1) if i + 1 < len(turns) else text
        if closing is None:
            closing = _closing(shown(i), before, template)
        # a line break that the template puts behind the end-of-turn token is not the model's to write
        after = after.rstrip().removesuffix(closing).rstrip()
        start = len(before)
        if not (after.startswith(before) and text.startswith(before)):
            start = _parting(before, _shared(before, after, text), template)
            if start < len(shown(i).rstrip().removesuffix(closing).rstrip()):
                raise _rewritten(i)
        reply = _as_shown(after[start:], text[start:], turns[i])
        if reply is None:
            raise _rewritten(i)
        for call in turns[i].get("tool_calls") or ():
            if call["function"]["name"] not in reply:
                raise DataError(f"message {i}: the chat template has no place for tool_calls")
        # of the last reply: many templates show no thoughts of earlier ones
        if i + 1 == len(turns) and str(turns[i].get("reasoning_content") or "").strip() not in reply:
            raise DataError(f"message {i}: the chat template has no place for reasoning_content")
        spans.append((start, start + len(reply), message.weight))
    return text, spans


def _rewritten(i: int) -> DataError:
    return DataError(
        f"the chat template renders message {i} differently once other messages follow, so that its reply cannot be "
        "marked; give each reply a line of its own, with the conversation up to it"
    )


def _closing(text: str, prompt: str, template: Template) -> str:
    """What a template puts behind the last turn of a conversation that nobody is asked to go on with."""
    if prompt.startswith(text.rstrip()):
        return ""
    return text[_parting(text, _shared(text, prompt), template) :].strip()


def _shared(*texts: str) -> str:
    """What they all begin with."""
    low, high = min(texts), max(texts)
    return low[: next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))]


def _parting(text: str, shared: str, template: Template) -> int:
    """Where the token begins in which `text` leaves `shared`, the beginning that it has in common with others."""
    if shared == text:
        return len(text)
    return max((a for a, _ in template.encode_with_offsets(text)[1] if a <= len(shared)), default=0)


def _as_shown(reply: str, text: str, turn: Mapping[str, Any]) -> str | None:
    """What of a reply `text` begins with: all of it, or all but the thought that it begins with."""
    answer = str(turn.get("content") or "").rpartition("</think>")[2].strip()
    k, head = 0, text[:64]
    while k < len(reply):
        if text.startswith(reply[k:]):
            return reply[k:] if answer in reply[k:] else None
        found = reply.find(head, k + 1)
        k = found if found >= 0 else max(k + 1, len(reply) - len(head) + 1)  # behind it there are shorter ends alone
    return None


def _weights(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, float]]) -> Iterator[float]:
    """The weight of the span that a token begins in; a token that begins before the reply belongs to the prompt."""
    i = 0
    for start, end in offsets:
        while i < len(spans) and start >= spans[i][1]:
            i += 1
        yield spans[i][2] if i < len(spans) and start >= spans[i][0] and end > start else 0.0
