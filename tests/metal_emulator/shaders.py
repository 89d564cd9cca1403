"""Shader source -> a library to load, a program for a sanitizer, or the lint's verdict."""

from __future__ import annotations

import functools
import pathlib

from . import toolchain
from .toolchain import INCLUDE, KERNEL_FLAGS, RUNTIME, compiled, machine_flags, run_clang
from .translate import Translation, includes, translate

SANITIZERS = {
    "none": (),
    # the runtime itself stays out of TSan's sight: it is what orders the fibers
    "thread": ("-fsanitize=thread",),
    # fibers switch stacks, which frames kept after return do not survive
    "address": ("-fsanitize=address", "-fsanitize-address-use-after-return=never"),
}


@functools.lru_cache(maxsize=64)
def translated(source: str) -> Translation:
    """Metal source as C++, its own macros expanded."""
    body, headers = includes(source)
    expanded = run_clang(
        ["-x", "c++", "-std=c++17", "-E", "-nostdinc", "-D__METAL__", "-D__METAL_VERSION__=310", "-"], body
    )
    return translate(expanded, headers)


def _kernel_arguments() -> list[str]:
    return [*KERNEL_FLAGS, *machine_flags(), f"-I{INCLUDE}"]


def library(source: str) -> pathlib.Path:
    """A shared library with msl_launch and the shader's kernels."""
    runtime = _object("runtime.cpp", ())
    kernels = [*_kernel_arguments(), "-shared", "-x", "c++", "-", "-x", "none", str(runtime)]
    return compiled("shader", [], kernels, translated(source).cpp)


def program(source: str, sanitizer: str) -> pathlib.Path:
    """A program that replays a job under the sanitizer ("none": under none)."""
    flags = SANITIZERS[sanitizer]
    seen = () if sanitizer == "thread" else flags
    define = ("-DMSL_TSAN",) if sanitizer == "thread" else ()
    objects = [str(_object(name, (*seen, *define))) for name in ("runtime.cpp", "replay.cpp")]
    kernels = [*_kernel_arguments(), *flags, "-x", "c++", "-", "-x", "none", *objects]
    return compiled(f"replay-{sanitizer}", [], kernels, translated(source).cpp)


def _object(name: str, flags: tuple[str, ...]) -> pathlib.Path:
    arguments = ["-std=c++17", "-O2", "-gline-tables-only", "-fPIC", "-Wall", "-Werror", *flags, "-c"]
    return compiled(pathlib.Path(name).stem + ".o", [RUNTIME / name], arguments)


def lint(source: str) -> str:
    """The errors of clang with address spaces as types, in C++14, on which Metal before 4 is based; "" for none."""
    flags = [f for f in _kernel_arguments() if f != "-std=c++17"]
    flags += ["-std=c++14", "-Wno-c++17-extensions", "-DMSL_LINT", "-fsyntax-only", "-x", "c++", "-"]
    try:
        run_clang(flags, translated(source).cpp)
    except toolchain.CompileError as e:
        return str(e)
    return ""
