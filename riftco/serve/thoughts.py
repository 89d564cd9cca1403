"""What a reasoning model thinks before it answers, told apart from the answer as it comes: <think>..</think>."""

from __future__ import annotations

from collections.abc import Sequence

from ..models import Tokenizer

OPEN, CLOSE = MARKS = ("<think>", "</think>")
TAIL = 16  # tokens of a prompt that are looked at: what a template opens stands at its end


class Thoughts:
    """Splits one reply into (whether it is a thought, text). A thought stands at its beginning or nowhere; white space
    around it is dropped.

    Args:
        inside: the prompt has opened it.
        begun: and has some of it, or of its answer, already.

    Attributes:
        inside: it is being written.
    """

    def __init__(self, inside: bool = False, begun: bool = False):
        self.inside, self._held = inside, ""
        self._undecided = not inside and not begun  # nothing but white space, or a part of the mark, was seen yet
        self._marked, self._begun, self._closed = (
            begun,
            begun,
            False,
        )  # its mark is behind; some of it was given; its end was seen

    def add(self, text: str) -> list[tuple[bool, str]]:
        self._held += text
        return self._read(False)

    def rest(self) -> list[tuple[bool, str]]:
        """At the reply's end."""
        return self._read(True)

    def _read(self, final: bool) -> list[tuple[bool, str]]:
        made: list[tuple[bool, str]] = []
        if self._undecided:
            lead = self._held.lstrip()
            if lead.startswith(OPEN):
                self.inside = True
            elif OPEN.startswith(lead) and not final:
                return made
            self._undecided = False
        if self.inside:
            self._think(made, final)
        if self.inside:
            return made
        if self._closed:
            self._held = self._held.lstrip()
            self._closed = not self._held  # until the answer has begun
        if self._held:
            made.append((False, self._held))
            self._held = ""
        return made

    def _think(self, made: list[tuple[bool, str]], final: bool) -> None:
        if not self._begun:
            self._held = self._held.lstrip()
            if not self._marked:  # some repeat the mark that the prompt ends with
                if OPEN.startswith(self._held) and not final:
                    return
                self._held, self._marked = self._held.removeprefix(OPEN).lstrip(), True
            if not self._held:
                return
        at = self._held.find(CLOSE)
        end = len(self._held) if at < 0 else at
        if at < 0 and not final:
            end -= max((n for n in range(1, len(CLOSE)) if self._held.endswith(CLOSE[:n])), default=0)
        if thought := self._held[:end].rstrip():
            made.append((True, thought))
            self._begun = True
        if at < 0:
            self._held = "" if final else self._held[len(thought) :]
        else:
            self._held, self.inside, self._closed = self._held[at + len(CLOSE) :], False, True


def thoughts_of(tokenizer: Tokenizer, prompt: Sequence[int], begun: str = "") -> Thoughts | None:
    """For a reply to this prompt, which goes on with `begun`; None where the chat template knows of no thoughts."""
    if not tokenizer.has_chat_template or CLOSE not in tokenizer.template():
        return None
    if begun.strip():
        return Thoughts(begun.lstrip().startswith(OPEN) and CLOSE not in begun, begun.strip() != OPEN)
    return Thoughts(tokenizer.decode(prompt[-TAIL:]).rstrip().endswith(OPEN))
