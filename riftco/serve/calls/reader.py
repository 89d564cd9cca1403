"""Text and calls out of a reply, as it comes."""

from __future__ import annotations

from collections.abc import Mapping

from .call import Call, Tool
from .formats import Format


class Reader:
    """Splits one reply. A call is given when it is whole; what only began like one stays text.

    Args:
        format: how the model writes calls.
        tools: name -> tool, of those that were offered.
        most: how many calls a reply may have; None: any number.
    """

    def __init__(self, format: Format, tools: Mapping[str, Tool], most: int | None = None):
        self.format, self.tools, self.most = format, tools, most
        self.count = 0
        self._held = ""  # text that may belong to a call
        self._inside = False  # _held begins (but for white space) with what a call begins with
        self._begun = False  # text was shown
        self._after = False  # nothing was shown since the last call

    @property
    def done(self) -> bool:
        """There are as many calls as there may be."""
        return self.most is not None and self.count >= self.most

    def add(self, text: str) -> list[str | Call]:
        self._held += text
        return self._read(False)

    def rest(self) -> list[str | Call]:
        """At the reply's end."""
        return self._read(True)

    def _read(self, final: bool) -> list[str | Call]:
        made: list[str | Call] = []
        while not self.done:
            if self._after:
                self._held = self._held.lstrip(" \n\t" + self.format.between)
            if not self._held:
                break
            if not self._inside and not self._begin(made, final):
                break
            lead = len(self._held) - len(self._held.lstrip())
            found = self.format.take(self._held[lead:], self.tools, final)
            if found is None:
                break
            call, size = found
            if call is None:
                self._show(made, self._held[: lead + size])
                self._held = self._held[lead + size :]
            else:
                made.append(call)
                self.count += 1
                self._held, self._after = self._held[lead + size :], True
            self._inside = False
        if self.done:
            self._held = ""
        return made

    def _begin(self, made: list[str | Call], final: bool) -> bool:
        """Show what belongs to no call; whether a call may have begun. White space before a call is dropped with it."""
        at, keep = self.format.begins(self._held, not self._begun)
        if at is not None:
            end = len(self._held[:at].rstrip())
        elif final:
            end = len(self._held)
        else:
            end = len(self._held[: len(self._held) - keep].rstrip())
        self._show(made, self._held[:end])
        self._held = "" if final and at is None else self._held[end:]
        self._inside = at is not None
        return self._inside

    def _show(self, made: list[str | Call], text: str) -> None:
        for mark in self.format.special:
            text = text.replace(mark, "")
        if text:
            made.append(text)
            self._begun, self._after = self._begun or bool(text.strip()), False
