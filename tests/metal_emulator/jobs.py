"""Launches that the fake Metal library recorded, and their replay in a process that a sanitizer watches."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import struct
import subprocess
import tempfile
from dataclasses import dataclass

from . import shaders
from .toolchain import symbolizer


@dataclass(frozen=True)
class Argument:
    given: int  # msl::Given
    item: int
    data: bytes

    @staticmethod
    def tensor(data: bytes, item: int) -> Argument:
        return Argument(1, item, data)

    @staticmethod
    def value(data: bytes) -> Argument:
        return Argument(2, 0, data)


@dataclass(frozen=True)
class Job:
    source: str
    kernel: str
    grid: tuple[int, int, int]  # in threads
    group: tuple[int, int, int]
    arguments: tuple[Argument, ...]

    @staticmethod
    def read(path: pathlib.Path) -> Job:
        data, at = path.read_bytes(), 0

        def take(layout: str):
            nonlocal at
            values = struct.unpack_from("<" + layout, data, at)
            at += struct.calcsize("<" + layout)
            return values if len(values) > 1 else values[0]

        def text() -> bytes:
            nonlocal at
            length = take("I")
            at += length
            return data[at - length : at]

        source, kernel, grid, group = text().decode(), text().decode(), take("3I"), take("3I")
        arguments = []
        for _ in range(take("I")):
            given, item, length = take("iQQ")
            arguments.append(Argument(given, item, data[at : at + length]))
            at += length
        return Job(source, kernel, grid, group, tuple(arguments))

    @property
    def threads(self) -> int:
        """In a threadgroup."""
        return math.prod(self.group)

    def with_source(self, source: str) -> Job:
        return dataclasses.replace(self, source=source)

    def with_groups(self, count: int) -> Job:
        """The same launch by `count` threadgroups, of a kernel that strides over what is left."""
        return dataclasses.replace(self, grid=(count * self.group[0], *self.grid[1:]))

    def replay(self, sanitizer: str, seed: int = 0) -> Replay:
        program = shaders.program(self.source, sanitizer)
        with tempfile.TemporaryDirectory() as folder:
            job, results = pathlib.Path(folder, "job"), pathlib.Path(folder, "results")
            name = self.kernel.encode()
            head = struct.pack(f"<I{len(name)}s6II", len(name), name, *self.grid, *self.group, len(self.arguments))
            parts = [struct.pack("<iQQ", a.given, a.item, len(a.data)) + a.data for a in self.arguments]
            job.write_bytes(head + b"".join(parts))
            done = subprocess.run(
                [program, job, results, str(seed)], capture_output=True, text=True, env=_environment()
            )
            data = results.read_bytes() if results.exists() else b""
        buffers, at = [], 0
        for a in self.arguments:
            buffers.append(data[at : at + len(a.data)])
            at += len(a.data)
        return Replay(done.returncode, done.stderr, tuple(buffers))


def _environment() -> dict[str, str]:
    """The sanitizers' settings; leaks are no concern of a process that replays one launch."""
    env = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": ""}
    if path := symbolizer():
        env |= {"ASAN_SYMBOLIZER_PATH": path, "TSAN_SYMBOLIZER_PATH": path}
    return env


@dataclass(frozen=True)
class Replay:
    status: int  # 0: ran, and the sanitizer had nothing to say
    report: str
    buffers: tuple[bytes, ...]  # the arguments' bytes after the launch
