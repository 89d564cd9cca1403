"""What an op's check is made of: the dtypes, numbers and flags that are taken, and how a refusal says what came.

A refusal comes before any work, in one line: TypeError where a number or a flag is of another kind, else ValueError.
"""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # not the 8-bit ones, which no kernel reads
INDICES = (torch.int32, torch.int64)
NUMBERS = (float, int, numbers.Real, torch.SymInt, torch.SymFloat)  # the common ones first: an ABC is slow to ask
WHOLE = (int, numbers.Integral, torch.SymInt)


def floating(t: object) -> bool:
    """A tensor of float16, bfloat16, float32 or float64, not sparse: what every check calls floating."""
    return isinstance(t, Tensor) and t.dtype in FLOATING and t.layout == torch.strided


def indices(t: object) -> bool:
    """A tensor of int32 or int64."""
    return isinstance(t, Tensor) and t.dtype in INDICES and t.layout == torch.strided


def given(*values: object) -> str:
    """What came, for a refusal: dtype and shape of a tensor, else the kind of the value."""
    return ", ".join(_given(v) for v in values)


def _given(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{value!r} ({type(value).__name__})" if isinstance(value, (str, *NUMBERS)) else type(value).__name__
    text = f"{value.dtype} {tuple(value.shape)}"
    if value.layout != torch.strided:
        return f"{text}, {value.layout}"
    if value.is_floating_point() and value.dtype not in FLOATING:
        return f"{text}; floating is float16, bfloat16, float32 or float64"
    return text


def number(
    op: str, name: str, value: object, accepted: str, *, least: float = -math.inf, most: float = math.inf,
    above: float = -math.inf, below: float | None = math.inf,
) -> None:  # fmt: skip
    """Refuse what is no number, and what is not within least <= value <= most and above < value < below: NaN never is,
    infinity only with below=None."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{op}: {name} must be a number, {accepted}; got {given(value)}")
    if not (least <= value <= most and above < value and (below is None or value < below)):  # type: ignore[operator]
        raise ValueError(f"{op}: {name} must be {accepted}; got {value}")


def whole(op: str, name: str, value: object, accepted: str, *, least: int = -(2**63), most: int = 2**63 - 1) -> None:
    """Refuse what is no integer (bool is none) and what is not within least..most, by default what 64 bits hold."""
    if isinstance(value, bool) or not isinstance(value, WHOLE):
        raise TypeError(f"{op}: {name} must be an integer, {accepted}; got {given(value)}")
    if not least <= value <= most:  # type: ignore[operator]
        raise ValueError(f"{op}: {name} must be {accepted}; got {value}")


def flags(op: str, **values: object) -> None:
    """Refuse what is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, (bool, torch.SymBool)):
            raise TypeError(f"{op}: {name} must be True or False; got {given(value)}")


def check_impl(op: str, impl: object, *accepted: str) -> None:
    """Refuse another implementation than None and those accepted, by default the spec."""
    names = accepted or ("spec",)
    if impl is not None and impl not in names:
        raise ValueError(f"{op}: impl must be None or {', '.join(map(repr, names))}; got {impl!r}")
