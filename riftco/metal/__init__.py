"""The compiled Metal extension and the shaders' text. Each <op>.py beside this file launches csrc/metal/<op>.metal.

Nothing is loaded at import: the extension exists on macOS only (setup.py), and the first launch asks for it.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

PACKAGE = pathlib.Path(__file__).parent
INSTALLED = PACKAGE / "shaders"  # where setup.py puts csrc/metal in a wheel
CHECKOUT = PACKAGE.parents[1] / "csrc" / "metal"
SUFFIXES = {
    torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.int8: "i8",
}  # fmt: skip

# What runs on PyTorch's own MPS operations, and why; every other operator has a shader. A test holds
# this to the op table.
PLAIN = {
    "adam_advance": "one addition for each step count",
    "cached_attention_write": "rows are copied into slots and pages",
    "cross_entropy_labelled": "a count of labels",
    "cross_entropy_mean_fwd_bwd_": "never asked for here: the count and the fused pass are, one after the other",
    "linear_cross_entropy_places": "a count of labels",
    "lora_rescale_bwd": "DoRA alone asks for it: a factor for each feature",
    "lora_rescale_fwd": "DoRA alone asks for it: a factor for each feature",
}

# Operators of PyTorch's own that stand where one might look for a shader, and why. A test holds all that riftco calls
# on Metal to PyTorch's list of what runs there.
TORCH = {
    "aten::addmm": "products of dense matrices are Apple's own, tuned for each GPU",
    "aten::bmm": "products of dense matrices are Apple's own, tuned for each GPU",
    "aten::constant_pad_nd": "padding, at the left too, is a copy through strides; no op of riftco pads",
    "aten::gelu": "alone it is one pass over memory; gated units, whose pass is wider, have it in their shader",
    "aten::gelu_backward": "as gelu",
    "aten::mm": "products of dense matrices are Apple's own, tuned for each GPU",
}

_find_extension: Callable[[], pathlib.Path] | None = None


def use_extension(find: Callable[[], pathlib.Path]) -> None:
    """Take the extension from the path that `find` returns, when it is first needed, instead of the package's own."""
    global _find_extension
    _find_extension = find


@functools.cache
def ops():
    """The extension's operators, torch.ops.riftco_mps.

    Raises:
        RuntimeError: the extension was not built, or was built with another version of PyTorch.
    """
    path = _find_extension() if _find_extension else _built()
    try:
        torch.ops.load_library(str(path))
    except OSError as e:
        raise RuntimeError(f"riftco: cannot load the Metal extension {path.name}: {e}\n{REBUILD}") from e
    built_with = torch.ops.riftco_mps.built_with()
    if _release(built_with) != _release(torch.__version__):
        raise RuntimeError(
            f"riftco: the Metal extension was built with torch {built_with}; this is {torch.__version__}. {REBUILD}"
        )
    return torch.ops.riftco_mps


def launch(
    shader: str, kernel: str, dtypes: Sequence[torch.dtype], outputs: Sequence[Tensor], inputs: Sequence[Tensor | None],
    numbers: Sequence[int] = (), reals: Sequence[float] = (), *, groups: int, threads: int, exact: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel of <shader>.metal whose host_name is `kernel` and the names of `dtypes`.

    Args:
        outputs, inputs: its buffers, in this order. None for an input that a flag among `numbers` says is not read.
        numbers, reals: the 64-bit and the float members of its struct, which is the last buffer.
        groups: threadgroups that there is work for; a kernel strides over what more than 4,096 leave.
        threads: of a threadgroup, rounded up to whole simdgroups and at most 256; or exactly so many with `exact`.
    """
    if missing := [t for t in dtypes if t not in SUFFIXES]:
        raise NotImplementedError(f"riftco: {kernel} has no Metal kernel for {missing[0]}")
    name = "_".join((kernel, *(SUFFIXES[t] for t in dtypes)))
    # every buffer must be bound
    bound = [outputs[0].new_empty(1, dtype=torch.uint8) if t is None else t for t in inputs]
    ops().launch(source(shader), name, list(outputs), bound, list(numbers), list(reals), groups, threads, exact)


def bound(*tensors: Tensor) -> list[Tensor | None]:
    """Inputs of `launch` that may be empty: of nothing there is nothing to bind, and nothing is read."""
    return [t if t.numel() else None for t in tensors]


REBUILD = "Build it against the torch that is installed: pip install --no-build-isolation --force-reinstall riftco"


def _built() -> pathlib.Path:
    found = sorted(PACKAGE.parent.glob("_C*.so"))
    if not found:
        raise RuntimeError(
            f"riftco: the Metal extension is not built (no {PACKAGE.parent / '_C*.so'}). On a Mac with Xcode's command "
            f"line tools, `pip install` builds it; other systems have no Metal. {REBUILD}"
        )
    return found[0]


def _release(version: str) -> list[str]:
    return version.partition("+")[0].split(".")[:2]


@functools.cache
def source(name: str) -> str:
    """The text of <name>.metal with its own #include "..." lines replaced by those files, each once.

    Metal compiles this text at run time and knows no include path.
    """
    folder = INSTALLED if INSTALLED.is_dir() else CHECKOUT
    return _inlined(folder, f"{name}.metal", set())


def _inlined(folder: pathlib.Path, file: str, seen: set[str]) -> str:
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate((folder / file).read_text().splitlines(), 1):
        if m := re.fullmatch(r'#include "([\w.]+)"', line):
            if m[1] not in seen:
                seen.add(m[1])
                lines += [_inlined(folder, m[1], seen), f'#line {number + 1} "{file}"']
            else:
                lines.append("")
        elif line.strip() != "#pragma once":  # which means nothing in one text
            lines.append(line)
        else:
            lines.append("")
    return "\n".join(lines) + "\n"
