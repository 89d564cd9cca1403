"""riftco's Metal extension over the fake library: built on first use, then steered by seed and recorded."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
import tempfile
from collections.abc import Iterator

import torch

import riftco.metal

from . import shaders
from .jobs import Job
from .toolchain import HERE, RUNTIME, CompileError, compiled
from .translate import MetalError

CSRC = HERE.parents[1] / "csrc"
_kept: list = []  # what C++ holds pointers to


def install(csrc: pathlib.Path = CSRC) -> None:
    """Let riftco.metal load the emulated extension made of `csrc`. Compiles nothing yet."""
    riftco.metal.use_extension(lambda: _load(csrc).path)


def build(csrc: pathlib.Path = CSRC) -> pathlib.Path:
    """The extension's own sources and the fake Metal library, as one shared library."""
    home = pathlib.Path(torch.__file__).parent
    version = f'-DRIFTCO_TORCH_VERSION="{torch.__version__}"'
    # no path of csrc: a changed copy is then compiled once, wherever it lies
    flags = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Werror", "-isystem", str(home / "include"), version, "-c"]
    headers = sorted(csrc.glob("*.h"))
    objects = [compiled(f"{f.stem}.o", [f], flags, headers=headers) for f in sorted(csrc.glob("*.cpp"))]
    objects.append(compiled("fake_metal.o", [RUNTIME / "fake_metal.cpp"], flags))
    libraries = [f"-L{home / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
    return compiled("riftco_mps.so", objects, ["-shared", *libraries])


class _Extension:
    def __init__(self, path: pathlib.Path):
        self.path = path
        self.dll = ctypes.CDLL(str(path))
        self.dll.riftco_fake_seed.argtypes = [ctypes.c_ulong]
        self.dll.riftco_fake_record.argtypes = [ctypes.c_char_p]
        callback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(self._compile)
        self.dll.riftco_fake_compiler(callback)
        _kept.append(callback)

    @staticmethod
    def _compile(source: bytes) -> int:
        try:
            answer = str(shaders.library(source.decode()))
        except (CompileError, MetalError) as e:
            answer = f"!{e}"
        buffer = ctypes.create_string_buffer(answer.encode())
        _kept.append(buffer)
        return ctypes.addressof(buffer)


@functools.cache
def _load(csrc: pathlib.Path) -> _Extension:
    return _Extension(build(csrc))


@contextlib.contextmanager
def schedule(seed: int) -> Iterator[None]:
    """The order in which the threads of a threadgroup run: 0 ascending, 1 descending, others random."""
    dll = _load(CSRC).dll
    dll.riftco_fake_seed(seed)
    try:
        yield
    finally:
        dll.riftco_fake_seed(0)


@contextlib.contextmanager
def recording() -> Iterator[list[Job]]:
    """Collect the launches made inside; the list is filled at the end."""
    dll, jobs = _load(CSRC).dll, []
    with tempfile.TemporaryDirectory() as folder:
        dll.riftco_fake_record(folder.encode())
        try:
            yield jobs
        finally:
            dll.riftco_fake_record(b"")
        jobs.extend(Job.read(p) for p in sorted(pathlib.Path(folder).iterdir(), key=lambda p: int(p.name)))
