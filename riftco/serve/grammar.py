"""Replies that keep to a grammar: which tokens may come next, worked out by llguidance (the extra `structured`).

V vocabulary.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models import Tokenizer
from .batch import Refused

# Python's json.dumps: what models write, and no white space without an end
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
KEPT = 32  # compiled grammars
PROBED = 16  # tokens that are tried of a grammar before a reply begins
NO_WORD_OF_IT = "doesn't satisfy the grammar"  # llguidance's, of a token; its other errors are limits that were reached


class Matcher:
    """Where one reply stands in its grammar.

    Attributes:
        done: nothing may follow; the reply is whole.
        failure: why it cannot go on, where it cannot.
    """

    def __init__(self, state: Any, vocab: int, tokens: Any):
        self._state, self._vocab, self._tokens = state, vocab, tokens
        self._words = torch.empty((tokens.vocab_size + 31) // 32, dtype=torch.int32)
        self.done, self.failure = False, ""

    def allowed(self, device: torch.device) -> Tensor | None:
        """Which tokens may come next, bool [V]; None: all."""
        self._state.unsafe_compute_mask_ptr(self._words.data_ptr(), 4 * len(self._words))
        self._note()
        words = self._words.to(device)
        bits = (words[:, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
        return bits.flatten()[: self._vocab].bool()

    def follow(self, token: int) -> None:
        """The reply goes on with this token."""
        self._state.consume_token(token)
        self._note()
        self.done = self._state.is_stopped()

    def begins(self, text: str) -> bool:
        """Whether the reply may begin with this text, which it then does."""
        tokens = self._tokens.tokenize_str(text)
        if self._state.validate_tokens(tokens) < len(tokens):
            return False
        for token in tokens:
            self.follow(token)
        return True

    def _note(self) -> None:
        if self._state.is_error() and not self.failure:
            said = self._state.get_error().strip().partition("\n")[0]
            if NO_WORD_OF_IT in said:
                self.failure = f"the grammar and the other options leave no token that may come next ({said})"
            else:
                self.failure = f"a limit of llguidance is reached ({said})"


class Grammar:
    """A compiled grammar, for any number of replies.

    Attributes:
        whole: the reply keeps to it from its first token to its last.
    """

    whole = True

    def __init__(self, start: Any, vocab: int, tokens: Any):
        self._start, self._vocab, self._tokens = start, vocab, tokens

    def matcher(self, prompt: Sequence[int] = ()) -> Matcher:
        """For a reply to this prompt."""
        return Matcher(self._start.deep_copy(), self._vocab, self._tokens)


class Grammars:
    """Compiles for one tokenizer and a model of `vocab` logits."""

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        self.tokenizer, self.vocab = tokenizer, vocab
        self._lock = threading.Lock()
        self.compile = functools.lru_cache(KEPT)(self._compile)

    @functools.cached_property
    def _tokens(self) -> Any:
        from llguidance.hf import from_tokenizer

        hf, stops = self.tokenizer.hf, sorted(self.tokenizer.stop_ids)
        return from_tokenizer(hf, n_vocab=max(self.vocab, self.tokenizer.vocabulary_size), eos_token=stops or None)

    def _compile(self, lark: str) -> Grammar:
        """Of llguidance's Lark, from the rule `start` on.

        Raises:
            Refused: it is no grammar, or one that llguidance cannot follow; or llguidance is not installed.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise Refused(
                "replies that follow a schema or a grammar need llguidance: pip install 'riftco[structured]'"
            ) from None
        with self._lock:
            tokens = self._tokens
        start = LLMatcher(tokens, lark, log_level=0)
        if start.is_error():
            raise Refused(f"the grammar is refused: {start.get_error().strip()[:1000]}")
        made = Grammar(start, self.vocab, tokens)
        if why := _probed(made.matcher(), self.tokenizer.stop_ids):
            raise Refused(f"the grammar is refused: {why}")
        return made


def _probed(matcher: Matcher, stops: Collection[int]) -> str:
    """What is wrong with a grammar, as far as a reply's first tokens show it; mostly empty. Limits are reached on the
    way."""
    for n in range(PROBED):
        allowed = matcher.allowed(torch.device("cpu"))
        if matcher.failure or allowed is None:
            return matcher.failure
        may = [t for t in allowed.nonzero().flatten().tolist() if t not in stops]
        if not may:
            return "" if n or bool(allowed.any()) else "no reply can keep to it"
        matcher.follow(may[0])
        if matcher.done or matcher.failure:
            return matcher.failure
    return ""


def text(literal: str) -> str:
    """A literal in a rule."""
    return json.dumps(literal, ensure_ascii=False) if literal else ""


def mark(literal: str, ids: Mapping[str, int]) -> str:
    """A mark in a rule, as text or as the token that it is in some vocabularies (mark -> id): llguidance matches one
    that looks like a tag with no text, special or not."""
    return f"({text(literal)} | <[{ids[literal]}]>)" if literal in ids else text(literal)


def schema(of: Mapping[str, Any] | bool) -> str:
    """JSON of a schema, in a rule."""
    given = {"type": "object"} if of is True else of
    if not isinstance(given, Mapping):
        raise Refused(f"a JSON schema is an object; got {given!r:.60}")
    return "%json " + json.dumps({**given, "x-guidance": SPACES})


def from_gbnf(grammar: str) -> str:
    """llama.cpp's way of writing grammars, as Lark."""
    try:
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError:
        return grammar  # compile says what is missing
    try:
        return any_to_lark(grammar)
    except Exception as why:  # its reader raises errors of its own, and Python's, for what is no grammar
        raise Refused(f"the grammar is refused: {str(why)[:1000]}") from None
