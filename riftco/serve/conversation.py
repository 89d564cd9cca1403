"""Conversations as tokens: one function makes a prompt for serving and for learning, so that both see the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..data import DataError
from ..data.records import plain_call
from ..models import Text, Tokenizer
from .batch import Refused
from .learner import LearnOutcome
from .requests import Finished, Request, Ticket
from .sampling import Sampling
from .scheduler import Scheduler

Messages = Sequence[Mapping[str, Any]]


def serving_prompt_tokens(tokenizer: Tokenizer, messages: Messages, go_on: bool = False, **options: Any) -> list[int]:
    """The tokens that a conversation is served with; `options` are the chat template's own, `tools` among them.

    `go_on`: the reply continues the last message, which is the assistant's, instead of following it.
    """
    plain = plain_messages(messages)
    if any("tool_calls" in m for m in plain) and "tool_calls" not in tokenizer.template(bool(options.get("tools"))):
        raise Refused("this model's chat template has no place for tool_calls; send the conversation without them")
    if not go_on:
        return tokenizer.encode(tokenizer.render_chat(plain, add_generation_prompt=True, **options))
    if not plain or plain[-1].get("role") != "assistant" or "tool_calls" in plain[-1] or not plain[-1].get("content"):
        raise Refused(
            "there is no text to go on with: the last message must be the assistant's, with text and no calls"
        )
    return tokenizer.encode(tokenizer.render_chat(plain, continue_final_message=True, **options))


def plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """OpenAI's messages as chat templates take them: text in one piece, calls with their arguments as objects.

    Raises:
        Refused: media, or calls that are none.
    """
    made: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # id of a call -> its tool, which some templates want beside the answer
    for i, message in enumerate(messages):
        plain = {**message, "role": "system"} if message.get("role") == "developer" else dict(message)
        if isinstance(plain.get("content"), list):
            plain["content"] = _text(plain["content"], f"messages.{i}.content")
        if plain.get("tool_calls"):
            plain["content"] = plain.get("content") or ""
            calls = plain["tool_calls"] if isinstance(plain["tool_calls"], list) else [plain["tool_calls"]]
            plain["tool_calls"] = [_call(c, f"messages.{i}.tool_calls") for c in calls]
            called |= {str(c.get("id")): c["function"]["name"] for c in plain["tool_calls"]}
        else:
            plain.pop("tool_calls", None)
        asked = str(plain.get("tool_call_id"))  # both may lack ids
        if plain.get("role") == "tool" and asked in called:
            plain.setdefault("name", called[asked])
        made.append(plain)
    return made


def _text(parts: list[Any], where: str) -> str:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise Refused(f"{where} holds a part of type {kind!r}; this model reads text")
    return "".join(part["text"] for part in parts)


def _call(call: Any, where: str) -> dict[str, Any]:
    try:
        return plain_call(call, where)
    except DataError as why:
        raise Refused(str(why)) from None


def end_of_turn(tokenizer: Tokenizer) -> list[int]:
    """What the chat template puts behind an answer, up to the token that ends generation."""
    marked = tokenizer.render_chat([{"role": "user", "content": "x"}, {"role": "assistant", "content": "answer"}])
    after = tokenizer.encode(marked[marked.rindex("answer") + len("answer") :])
    for i, token in enumerate(after):
        if token in tokenizer.stop_ids:
            return after[: i + 1]
    return [] if tokenizer.eos_id is None else [tokenizer.eos_id]


def reply_tokens(tokenizer: Tokenizer, message: Mapping[str, Any]) -> list[int]:
    """The tokens of an assistant's message that can be learned: its text and the end of its turn.

    Raises:
        Refused: tool calls, reasoning, media, or no text.
    """
    if message.get("role") != "assistant":
        raise Refused(f"the last message must be the assistant's reply; got role {message.get('role')!r}")
    for name in ("tool_calls", "reasoning_content"):
        if message.get(name):
            raise Refused(f"a reply with {name} cannot be learned; send its text alone")
    text = message.get("content")
    if not isinstance(text, str):
        raise Refused("a reply with media or parts cannot be learned; send one text")
    if not text:
        raise Refused("the reply to learn is empty")
    return [*tokenizer.encode(text), *end_of_turn(tokenizer)]


class Chat:
    """One conversation on one slot, which can be corrected.

    Args:
        scheduler: of the engine.
        tokenizer: the model's.
        adapter: what serves (if promoted) and learns; None: the base, which learns nothing.
        system: a system message.
        template: options of the chat template.
    """

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer, *, adapter: str | None = None, system: str | None = None,
        template: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        self.scheduler, self.tokenizer, self.adapter = scheduler, tokenizer, adapter
        self.template = template or {}
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.finished: Finished | None = None
        self._asked: list[int] = []

    def say(self, text: str, *, max_new_tokens: int = 256, sampling: Sampling | None = None) -> Iterator[str]:
        """Ask; yields the answer piece by piece, while it is made."""
        messages = [*self.messages, {"role": "user", "content": text}]
        asked = serving_prompt_tokens(self.tokenizer, messages, **self.template)
        request = Request(
            asked,
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            stop_ids=self.tokenizer.stop_ids,
            adapters={} if self.adapter is None else {self.adapter: 1.0},
        )
        ticket = self.scheduler.submit(request)  # where it is refused the conversation stays as it was
        self.messages, self._asked = messages, asked
        return self._read(ticket)

    def _read(self, ticket: Ticket) -> Iterator[str]:
        text, shown = Text(self.tokenizer), ""
        try:
            for chosen in ticket:
                if chosen.token not in self.tokenizer.stop_ids and (piece := text.add(chosen.token)):
                    shown += piece
                    yield piece
            if rest := text.rest():
                shown += rest
                yield rest
        finally:
            if ticket.finished is None:  # nobody reads on
                ticket.cancel()
            self.finished = ticket.finished
            self.messages.append({"role": "assistant", "content": shown})

    def correct(self, reply: str, *, lr: float, steps: int = 1) -> list[LearnOutcome]:
        """Learn this in place of the last answer; the conversation goes on from it."""
        if self.finished is None or self.finished.slot is None or self.adapter is None:
            raise Refused("there is no answer to correct" if self.adapter else "no adapter learns here")
        message = {"role": "assistant", "content": reply}
        tokens, outcomes = reply_tokens(self.tokenizer, message), []
        for _ in range(steps):
            outcomes.append(self.scheduler.learn(self.finished.slot, self._asked, tokens, self.adapter, lr))
        if outcomes and outcomes[-1].success:
            self.messages[-1] = message
        return outcomes
