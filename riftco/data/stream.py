"""A JSONL file of any size as micro-batches, in bounded memory.

The file is read in windows of lines; a window's examples are packed by best fit and its rows shuffled, so only a window
is ever held. The position is a byte offset and a row: a resume reads one window again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from .batch import Batch, pack
from .chat import Example, Template, example_of
from .errors import DataError
from .loader import check_tokens
from .packing import shuffled_rows

LINE_BYTES = 64 << 20
KEPT = 10  # diagnostics of skipped lines that are kept


class StreamLoader:
    """Micro-batches of at most `tokens` tokens from a file that is never held whole.

    Shuffling reaches as far as a window does; shuffle a file beforehand if its order matters.

    Args:
        path: chat JSONL, as load_examples reads it.
        template: the model's tokenizer.
        tokens: most tokens of a micro-batch.
        seed: of the order inside windows.
        epochs: stop after so many passes; None goes on for ever.
        window: examples of a window; it also ends at 64 * tokens tokens.
        max_length, truncate: as in load_examples; no example may be longer than a micro-batch.
        skip_bad: pass over bad lines and count them; else `next` raises DataError, and the call after it goes on
            behind that line.

    Attributes:
        skipped: bad lines passed over in the first epoch; skipped_lines: the first few, as "file:line: why".
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        template: Template,
        tokens: int,
        seed: int,
        *,
        epochs: int | None = None,
        window: int = 1024,
        max_length: int | None = None,
        truncate: bool = False,
        skip_bad: bool = False,
    ):
        check_tokens(tokens)
        if window < 1:
            raise DataError(f"a window needs 1 example or more; got {window}")
        if os.path.isdir(path):
            raise DataError(f"{path} is a folder; name the JSONL file in it")
        if not os.path.isfile(path):
            raise DataError(f"{path}: no such file; give the path of a JSONL file")
        self.path, self.template, self.tokens, self.seed, self.epochs = str(path), template, tokens, seed, epochs
        self.window, self.truncate, self.skip_bad = window, truncate, skip_bad
        self.max_length = min(max_length or tokens + 1, tokens + 1)
        self.bytes = os.path.getsize(path)
        self.epoch, self.position, self.skipped = 0, 0, 0
        self.skipped_lines: list[str] = []
        self._at, self._next = (0, 1), (0, 1)  # (offset, line) where the window begins, and where the one after it does
        self._found = 0  # examples of this epoch in earlier windows
        self._examples: list[Example] | None = None
        self._rows: list[list[int]] = []
        self._skipped_before = 0

    def next(self) -> Batch | None:
        """The next micro-batch, or None after the last epoch.

        Raises:
            DataError: a bad line, by file and number.
        """
        while self.epochs is None or self.epoch < self.epochs:
            if self._examples is None:
                self._read()
            assert self._examples is not None
            if self.position < len(self._rows):
                row = self._rows[self.position]
                self.position += 1
                return pack([self._examples[i] for i in row], [self._examples[i].line for i in row])
            self._advance()
        return None

    def _advance(self) -> None:
        """On to the next window, or the next epoch's first."""
        self._found += len(self._examples or ())
        self._at, self.position, self._examples, self._skipped_before = self._next, 0, None, self.skipped
        if self._at[0] >= self.bytes:
            if not self._found:
                raise DataError(f"{self.path}: no examples in this file")
            self.epoch, self._at, self._found = self.epoch + 1, (0, 1), 0

    def _read(self) -> None:
        examples: list[Example] = []
        used = 0
        with open(self.path, "rb") as file:
            file.seek(self._at[0])
            self._next = self._at
            for number, raw, end in _lines(file, *self._at):
                after = (end, number + 1)
                try:
                    example = self._example(raw, number)
                except ValueError as bad:  # DataError, and what the tokenizer or the template refuses
                    why = f"{self.path}:{number}: {bad}"
                    if not self.skip_bad:
                        if examples:  # they come first; the next window begins at the bad line
                            break
                        self._at = self._next = after
                        raise DataError(f"{why} (--skip-bad leaves such lines out)") from bad
                    if self.epoch == 0:
                        self.skipped += 1
                        self.skipped_lines = [*self.skipped_lines, why][:KEPT]
                    example = None
                if example is not None:
                    examples.append(example)
                    used += len(example) - 1
                self._next = after
                if len(examples) >= self.window or used >= 64 * self.tokens:
                    break
            else:
                self._next = (self.bytes, 0)
        rng = random.Random(f"{self.seed}/{self.epoch}/{self._at[0]}")
        order = list(range(len(examples)))
        rng.shuffle(order)
        self._examples = examples
        self._rows = shuffled_rows(order, [len(e) - 1 for e in examples], self.tokens, rng)

    def _example(self, raw: bytes, number: int) -> Example | None:
        """None for a blank line."""
        if len(raw) > LINE_BYTES:
            raise DataError(f"the line is longer than {LINE_BYTES >> 20} MiB")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise DataError("not UTF-8 text; is this a JSONL file?") from None
        if not line.strip():
            return None
        return example_of(line, self.template, number, max_length=self.max_length, truncate=self.truncate)[0]

    def state_dict(self) -> dict[str, Any]:
        return {
            "bytes": self.bytes,
            "tokens": self.tokens,
            "seed": self.seed,
            "window": self.window,
            "epoch": self.epoch,
            "offset": list(self._at),
            "position": self.position,
            "found": self._found,
            "skipped": self._skipped_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.state_dict()
        for name in ("bytes", "tokens", "seed", "window"):
            if state[name] != mine[name]:
                raise DataError(
                    f"the saved position is of a stream with {name} {state[name]}; this run's is {mine[name]}"
                )
        at = (int(state["offset"][0]), int(state["offset"][1]))
        if (state["epoch"], at) != (self.epoch, self._at):
            self._examples, self.skipped = None, state["skipped"]
        self.epoch, self._at, self.position = state["epoch"], at, state["position"]
        self._found, self._skipped_before = state["found"], state["skipped"]


def _lines(file: BinaryIO, offset: int, number: int) -> Iterator[tuple[int, bytes, int]]:
    """(number, bytes, where the next one begins) of each line; of a line beyond the limit only its start is held."""
    while raw := file.readline(LINE_BYTES + 1):
        offset += len(raw)
        last = raw
        while len(last) > LINE_BYTES and not last.endswith(b"\n"):
            last = file.readline(LINE_BYTES + 1)
            offset += len(last)
        yield number, raw, offset
        number += 1
