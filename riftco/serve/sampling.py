"""The next token of each row, chosen on the device. Rows are independent: a row's draw comes from its own generator.

V vocabulary.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .batch import Refused, whole
from .draw import choose
from .grammar import Matcher


@dataclass(frozen=True)
class Sampling:
    """How a reply is sampled; the defaults take the likeliest token.

    Attributes:
        temperature: 0 takes the likeliest; otherwise logits are divided by it.
        top_k: among the k likeliest (0: all).
        top_p: among the likeliest that together hold this probability.
        min_p: among those at least this likely, relative to the likeliest.
        repetition_penalty: seen tokens' logits are divided by it, multiplied where negative (as transformers does).
        presence_penalty, frequency_penalty: taken off once, and for each time that a token was generated (OpenAI's).
        logit_bias: token -> what is added.
        seed: of this reply; None takes a fresh one.
        logprobs: how many of the likeliest tokens to report with their log-probabilities, 0 to 20; None: none at all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def check(self, vocab: int) -> None:
        """Refuse by name what is outside of its limits; `vocab` bounds the tokens that a bias may name."""
        limits = {
            "temperature": (0, 1e6), "top_k": (0, math.inf), "top_p": (1e-9, 1), "min_p": (0, 1),
            "repetition_penalty": (1e-6, 1e6), "presence_penalty": (-1e6, 1e6), "frequency_penalty": (-1e6, 1e6),
            "logprobs": (0, 20),
        }  # fmt: skip
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name == "logprobs":
                continue
            if not isinstance(value, numbers.Real) or not low <= float(value) <= high:
                raise Refused(f"{name} must be between {low:g} and {high:g}; got {value!r}")
            if name in ("top_k", "logprobs"):
                whole(value, name)
        if self.seed is not None and not -(1 << 63) <= whole(self.seed, "seed") < 1 << 64:
            raise Refused(f"seed must be a number of 64 bits; got {self.seed}")
        self._check_bias(vocab)

    def _check_bias(self, vocab: int) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise Refused(f"logit_bias must be token -> number; got {self.logit_bias!r:.60}")
        for token, bias in self.logit_bias.items():
            known = 0 <= whole(token, "logit_bias: a token") < vocab
            if not known or not isinstance(bias, numbers.Real) or not (abs(bias) <= 1e6 or bias == -math.inf):
                raise Refused(
                    f"logit_bias: {token} -> {bias} is no token of the {vocab}, or neither -inf nor from -1e6 to 1e6"
                )
        if sum(bias == -math.inf for bias in self.logit_bias.values()) == vocab:
            raise Refused("logit_bias forbids every token; leave one that can be chosen")


@dataclass(frozen=True)
class Chosen:
    """A token, its log-probability (before temperature and cuts), and the likeliest ones with theirs."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses one reply's tokens; remembers what its penalties count.

    Args:
        options: how.
        prompt: the tokens before the reply, which the repetition penalty counts as seen.
        vocab, device: of the logits.
        matcher: of the grammar that the reply keeps to, if there is one.

    Attributes:
        plain: whether it takes the likeliest token of the logits as they are.
    """

    def __init__(
        self,
        options: Sampling,
        prompt: Sequence[int],
        vocab: int,
        device: torch.device,
        matcher: Matcher | None = None,
    ):
        options.check(vocab)
        self.options, self.matcher = options, matcher
        self.generator = torch.Generator(device)
        self.generator.seed() if options.seed is None else self.generator.manual_seed(options.seed)
        self.bias = self.counts = self.seen = None
        if options.logit_bias:
            self.bias = torch.zeros(vocab, device=device)
            at = torch.tensor(list(options.logit_bias), device=device)
            self.bias[at] = torch.tensor(list(options.logit_bias.values()), dtype=torch.float32, device=device)
        if options.presence_penalty or options.frequency_penalty:
            self.counts = torch.zeros(vocab, device=device)
        if options.repetition_penalty != 1:
            self.seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            self.seen[torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
        changes = (self.bias, self.counts, self.seen, matcher)
        self.plain = options.temperature == 0 and all(change is None for change in changes)

    @property
    def done(self) -> bool:
        """Whether the reply is whole by its grammar."""
        return self.matcher is not None and self.matcher.done

    @property
    def failure(self) -> str:
        """Why the reply cannot go on by its grammar; mostly empty."""
        return "" if self.matcher is None else self.matcher.failure

    def follow(self, token: int) -> None:
        """The reply goes on with a token that was chosen."""
        if self.matcher is not None:
            self.matcher.follow(token)

    def choose(self, logits: Tensor) -> Tensor:
        """A token [1] for logits [V]; it counts as generated from now on."""
        return choose([self], logits[None])

    def count(self, token: Tensor) -> None:
        """A token [1] was generated."""
        if self.counts is not None:
            self.counts.index_add_(0, token, torch.ones_like(token, dtype=torch.float32))
        if self.seen is not None:
            self.seen[token] = True

    def accept(self, logits: Tensor, draft: Sequence[int], likeliest: Sequence[int] | None = None) -> list[int]:
        """The tokens that would have been chosen one by one: those of the draft as far as it is right, and one more;
        they count as followed.

        logits [1 + len(draft), V]: row i follows the first i tokens of the draft, and `likeliest` are its likeliest
        tokens, where they are known. One draw a token, as without a draft.
        """
        if self.plain:
            chosen = logits.argmax(-1).tolist() if likeliest is None else list(likeliest)
            right = next((i for i, (a, b) in enumerate(zip(chosen, draft)) if a != b), len(draft))
            return chosen[: right + 1]
        tokens: list[int] = []
        for row in logits:
            tokens.append(int(self.choose(row)))
            self.follow(tokens[-1])
            if self.done or self.failure or len(tokens) > len(draft) or tokens[-1] != draft[len(tokens) - 1]:
                break
        return tokens

    def adjusted(self, x: Tensor) -> Tensor:
        """Logits after bias and penalties, of what the grammar allows."""
        o = self.options
        if self.seen is not None:
            x = torch.where(self.seen, torch.where(x > 0, x / o.repetition_penalty, x * o.repetition_penalty), x)
        if self.counts is not None:
            x = x - o.presence_penalty * (self.counts > 0) - o.frequency_penalty * self.counts
        if self.bias is not None:
            x = x + self.bias
        allowed = None if self.matcher is None else self.matcher.allowed(x.device)
        if allowed is not None:
            x = x.masked_fill(~allowed, -torch.inf)
        return x

    def report(self, logits: Tensor, row: int, token: int) -> Chosen:
        """What is told of a token that was chosen by a row of logits [n, V], which is read only where that is asked."""
        if self.options.logprobs is None:
            return Chosen(token)
        logp = logits[row].float().log_softmax(-1)
        values, ids = logp.topk(min(self.options.logprobs, len(logp)))
        return Chosen(token, float(logp[token]), tuple(zip(ids.tolist(), values.tolist())))
