"""Finding clang, and compiling into a cache that several test processes may share."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence

HERE = pathlib.Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "metal_emulator"
INCLUDE, RUNTIME = HERE / "include", HERE / "runtime"
MACHINES = {"x86_64": ("-march=x86-64-v3",), "aarch64": ()}  # v3: conversions of half in hardware
KERNEL_FLAGS = (
    "-std=c++17",
    "-O1",
    "-gline-tables-only",
    "-fPIC",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-optimize-sibling-calls",  # the return address names the call site of a barrier
    "-Xclang",
    "-ffloat16-excess-precision=none",  # half arithmetic rounds at every step, as on a GPU
    "-Wall",
    "-Werror",
    "-Wno-unused-function",
    "-Wno-unused-value",
    "-Wno-unknown-pragmas",
    "-Wno-pass-failed",  # a rendezvous is never duplicated, so its loop stays one
    "-Wno-psabi",
)


class CompileError(Exception):
    """The compiler's own words."""


# what clang++ gained by version 16, and the flag for it
PROBE = "template <auto F> struct A {}; float f(__bf16 b) { return b; } __bf16 g(float f) { return f * (_Float16)2; }"


@functools.cache
def clang() -> str | None:
    """The newest clang++ that knows half and bfloat: 20 down to 16, or one without a number."""
    for name in (*(f"clang++-{v}" for v in range(20, 15, -1)), "clang++"):
        if path := shutil.which(name):
            command = [path, "-x", "c++", *KERNEL_FLAGS, *machine_flags(), "-fsyntax-only", "-"]
            if subprocess.run(command, input=PROBE, capture_output=True, text=True).returncode == 0:
                return path
    return None


@functools.cache
def why_not() -> str:
    """What is missing for the emulator to run here; "" for nothing."""
    if platform.system() != "Linux":
        return "the Metal emulator runs on Linux"
    if platform.machine() not in MACHINES:
        return f"the Metal emulator runs on {' and '.join(MACHINES)}, not on {platform.machine()}"
    if clang() is None:
        return "clang 16 or newer is not installed: apt-get install clang-19 libclang-rt-19-dev"
    return ""


@functools.cache
def why_not_sanitizer(name: str) -> str:
    """Why no program built with -fsanitize=<name> runs here; "" when one does."""
    if reason := why_not():
        return reason
    try:
        program = compiled(f"probe-{name}", [], [f"-fsanitize={name}", "-x", "c++", "-"], text="int main() {}")
    except CompileError as e:
        return f"no {name} sanitizer (apt-get install libclang-rt-19-dev): {str(e).splitlines()[-1]}"
    done = subprocess.run([program], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"the {name} sanitizer does not run here: {done.stderr.strip()[-200:]}"


@functools.cache
def symbolizer() -> str | None:
    """What turns a sanitizer's addresses into shader lines, if it is installed."""
    for name in (*(f"llvm-symbolizer-{v}" for v in range(20, 13, -1)), "llvm-symbolizer"):
        if path := shutil.which(name):
            return path
    return None


def run_clang(arguments: Sequence[str], text: str | None = None) -> str:
    """clang++'s standard output; CompileError with its standard error when it fails."""
    compiler = clang()
    assert compiler is not None, "why_not() comes first"
    done = subprocess.run([compiler, *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stdout


@functools.cache
def _fingerprint(folder: pathlib.Path) -> str:
    digest = hashlib.sha256(f"{clang()} {platform.machine()}".encode())
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def compiled(
    stem: str,
    sources: Sequence[pathlib.Path],
    arguments: Sequence[str],
    text: str | None = None,
    headers: Sequence[pathlib.Path] = (),
) -> pathlib.Path:
    """A file in the cache that clang++ made of `sources` (and `text` on standard input); made once for one content.

    `headers`: files that the sources include, besides the emulator's own.
    """
    key = hashlib.sha256(f"{_fingerprint(INCLUDE)} {_fingerprint(RUNTIME)} {arguments} {text}".encode())
    for file in (*sources, *headers):
        key.update(file.read_bytes())
    target = CACHE / f"{stem}-{key.hexdigest()[:16]}"
    with locked(target):
        if not target.exists():
            partial = target.with_suffix(".partial")
            run_clang([*arguments, *map(str, sources), "-o", str(partial)], text)
            os.replace(partial, target)
    return target


@contextlib.contextmanager
def locked(target: pathlib.Path) -> Iterator[None]:
    """One process at a time makes `target`."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def machine_flags() -> tuple[str, ...]:
    return MACHINES[platform.machine()]
