"""A request on its slot, and what a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from .draft import Draft
from .learner import LearnOutcome
from .requests import Ticket
from .sampling import Sampler
from .slots import Slot
from .writing import Writing


@dataclass
class Turn:
    """A request on its slot."""

    ticket: Ticket
    slot: Slot
    prompt: list[int]
    sampler: Sampler
    cached: int
    text: Draft | None = None  # what guesses are made of
    draft: list[int] = field(default_factory=list)  # guessed in this iteration
    drafted: int = 0
    accepted: int = 0
    considered: int = 0  # the last batch that had room for it
    why: str | None = None  # how the reply ended, once it has
    learn: LearnOutcome | None = None
    writing: Writing | None = None  # of its lesson, until the disk has it

    @property
    def reply(self) -> list[int]:
        return self.ticket.tokens

    @property
    def pending(self) -> list[int]:
        """Tokens that the slot has not read: the rest of the prompt, and what was said."""
        read = len(self.slot.tokens)
        n = len(self.prompt)
        return self.prompt[read:] + self.reply if read < n else self.reply[read - n :]


@dataclass
class Totals:
    """What a scheduler has done so far."""

    prompt: int = 0
    cached: int = 0
    predicted: int = 0
    drafted: int = 0
    accepted: int = 0
    learned: int = 0
    refused: int = 0
    learn_seconds: float = 0.0
