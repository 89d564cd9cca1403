"""Calls that a model makes of its own accord, held to the schemas of their tools from the mark on that begins one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ...models import Text, Tokenizer
from ..grammar import Grammar, Matcher
from ..thoughts import MARKS, thoughts_of

log = logging.getLogger(__name__)


class HeldCalls(Matcher):
    """Where one reply stands: in text, of which every token may come next, or in a call.

    Args:
        call: what follows the mark.
        mark: what a call begins with, outside of a thought.
        prompt: the tokens before the reply.
    """

    def __init__(self, call: Grammar, mark: str, tokenizer: Tokenizer, prompt: Sequence[int]):
        self.done, self.failure = False, ""
        self._call, self._mark, self._tokenizer = call, mark, tokenizer
        self._special = tokenizer.ids_of((mark, *MARKS))
        self._thoughts = thoughts_of(tokenizer, prompt)
        self._inside: Matcher | None = None
        self._begin()

    def _begin(self) -> None:
        self._text, self._said = Text(self._tokenizer), ""

    def allowed(self, device: torch.device) -> Tensor | None:
        if self._inside is None:
            return None
        mask = self._inside.allowed(device)
        if self._inside.failure:
            self._let_go()
            return None
        return mask

    def follow(self, token: int) -> None:
        if self._inside is not None:
            self._inside.follow(token)
            if self._inside.failure:
                self._let_go()
            elif self._inside.done:
                self._inside = None
                self._begin()
            return
        if token in self._special:
            more, self._text = self._text.rest() + self._special[token], Text(self._tokenizer)
        else:
            more = "" if token in self._tokenizer.stop_ids else self._text.add(token)
        if self._thoughts is not None:
            more = "".join(text for thinks, text in self._thoughts.add(more) if not thinks)
        self._said = (self._said + more)[-len(self._mark) - len(more) :]
        at = self._said.find(self._mark)
        if at >= 0:
            inside = self._call.matcher()
            if inside.begins(self._said[at + len(self._mark) :]):  # else it is no call of this form
                self._inside = inside
            self._begin()

    def _let_go(self) -> None:
        assert self._inside is not None
        log.warning("a call is not held to its schema from here on: %s", self._inside.failure)
        self._inside = None
        self._begin()


class CallGrammar(Grammar):
    """Of a reply in which calls are held, and nothing else is."""

    whole = False

    def __init__(self, call: Grammar, mark: str, tokenizer: Tokenizer):
        self._call, self._mark, self._tokenizer = call, mark, tokenizer

    def matcher(self, prompt: Sequence[int] = ()) -> Matcher:
        return HeldCalls(self._call, self._mark, self._tokenizer, prompt)
