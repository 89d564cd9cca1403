"""The compiled part for CPUs: csrc/cpu, built by the machine's own C++ compiler when it is first needed, then kept.

Nothing is built or loaded at import. The library calls no PyTorch; it shares PyTorch's OpenMP threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time

from .layout import Model, Step

PACKAGE = pathlib.Path(__file__).parent
INSTALLED = PACKAGE / "source"  # where setup.py puts csrc/cpu in a wheel
CHECKOUT = PACKAGE.parents[1] / "csrc" / "cpu"
COMPILERS = ("g++", "c++", "clang++")
# No fused multiply-add but where the source says so: rows do not depend on what the compiler makes of a loop.
FLAGS = (
    "-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp",
    "-fPIC", "-w",
)  # fmt: skip
SECONDS = 600  # a compiler that takes longer hangs
BUILDING = "building-"  # how folders of builds begin


def why_not() -> str:
    """Why nothing can be compiled here, with the remedy; "" where it can be tried."""
    if platform.system() != "Linux":
        return f"the compiled decoding is made for Linux, not {platform.system()}"
    if compiler() is None:
        asked = os.environ.get("CXX")
        if asked:
            return f"CXX names {asked!r}, which is not there; set it to a C++20 compiler with OpenMP"
        return f"no C++ compiler is installed ({', '.join(COMPILERS)}); install g++ 11 or newer, or set CXX"
    return ""


def compiler() -> str | None:
    """The path of the C++ compiler: what CXX names, else the first that is installed."""
    asked = os.environ.get("CXX")
    return next((found for name in ([asked] if asked else COMPILERS) if (found := shutil.which(name))), None)


def library() -> ctypes.CDLL:
    """The compiled functions, built at the first call: seconds, once for each compiler and processor.

    Raises:
        RuntimeError: nothing can be compiled, or it failed; the message says why in one line.
    """
    found = _attempt()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@functools.cache
def _attempt() -> ctypes.CDLL | str:
    """The library, or why there is none: a compiler that fails is not asked again."""
    if reason := why_not():
        return reason
    try:
        found = ctypes.CDLL(str(_built()))
    except RuntimeError as why:
        return str(why)
    except OSError as why:  # a compiler whose OpenMP is not that of PyTorch
        return f"what {compiler()} built cannot be loaded beside PyTorch ({why}); set CXX to g++"
    found.riftco_work.argtypes = found.riftco_step.argtypes = [ctypes.POINTER(Model), ctypes.POINTER(Step)]
    found.riftco_work.restype, found.riftco_step.restype = ctypes.c_int64, None
    found.riftco_cached_positions.argtypes, found.riftco_cached_positions.restype = [], ctypes.c_int64
    return found


def described(*, build: bool = False) -> str:
    """How models are decoded here, in one line; `build` makes sure of it."""
    try:
        if build:
            library()
        reason = why_not()
    except RuntimeError as why:
        reason = str(why)
    return f"decoding stays in Python: {reason}" if reason else f"decoding is compiled by {compiler()}"


def sources() -> pathlib.Path:
    return INSTALLED if INSTALLED.is_dir() else CHECKOUT


def cache() -> pathlib.Path:
    """Where built libraries are kept."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "riftco"


def _built() -> pathlib.Path:
    """The library of these sources, this compiler and this processor; compiled if it is not there, whole."""
    seen = hashlib.sha256(repr(FLAGS).encode())
    for file in sorted(f for f in sources().iterdir() if f.suffix in (".h", ".cpp")):
        seen.update(file.read_bytes())
    seen.update(_run("-march=native", "-dM", "-E", "-x", "c++", os.devnull).encode())  # its version, what it may use
    place = cache() / f"cpu-{seen.hexdigest()[:24]}.so"
    if not _whole(place):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _sweep(place.parent)
            # on one disk: another process sees all of it
            with tempfile.TemporaryDirectory(prefix=BUILDING, dir=place.parent) as folder:
                made = pathlib.Path(folder, "step.so")
                began = time.perf_counter()
                _say(f"compiling the decoding on this CPU with {compiler()}, once (some seconds)")
                _run(*FLAGS, "-c", str(sources() / "step.cpp"), "-o", f"{folder}/step.o")
                _run("-shared", f"{folder}/step.o", "-o", str(made))  # without an OpenMP of its own: PyTorch's is there
                with open(made, "ab") as built:
                    built.write(hashlib.sha256(made.read_bytes()).digest())
                made.replace(place)
                _say(f"compiled in {time.perf_counter() - began:.1f} s; kept as {place}")
        except OSError as why:
            raise RuntimeError(f"cannot write {place}: {why}; set XDG_CACHE_HOME to a folder that can be") from None
    return place


def _say(what: str) -> None:
    """Why a first reply takes long; standard output is for replies."""
    print(f"riftco: {what}", file=sys.stderr, flush=True)


def _whole(place: pathlib.Path) -> bool:
    """Whether a library ends with the digest of what is before it: who loads one that lost its end is killed."""
    try:
        data = place.read_bytes()
    except OSError:  # it is not there, or no file: who builds it says why not
        return False
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


def _sweep(folder: pathlib.Path) -> None:
    """Remove what builds left that were killed; one that goes on is younger."""
    for left in folder.glob(f"{BUILDING}*"):
        try:
            dead = time.time() - left.stat().st_mtime > 4 * SECONDS
        except FileNotFoundError:  # it ended
            continue
        if dead:
            shutil.rmtree(left, ignore_errors=True)


def _run(*arguments: str) -> str:
    command = [str(compiler()), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} did not end within {SECONDS} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise RuntimeError(f"{command[0]} failed: {said}")
    return done.stdout
