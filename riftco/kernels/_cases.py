"""What every room's cases.py is made of: shared by the conformance test and by the bench."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One input shape with one set of options.

    A room's cases.py offers:
        CASES, BENCH: tuples of Case for tests and for benches.
        GRADS: names of the inputs whose gradients are compared.
        ROUNDINGS: output or ``d_<input>`` name -> how many operands the kernel rounds to 16 bit inside.
        make_inputs(case, generator): dict of CPU tensors; floating ones in float64 (the harness rounds them).
        call(inputs, case): dict of outputs through the public function.
        reference(inputs, case): the same outputs through spec.py, differentiable by autograd.
        exercises(case, inputs): True when the case is not vacuous.
        flops(case), bytes_moved(case, dtype): of forward and backward together, for the bench.
    and may offer:
        forward_flops(case): the forward's part of flops; then the bench times the backward by itself, too.
        REFUSED: device -> names of options that its kernel refuses by name.
        TRAINED: names of the outputs that a training step sends gradients through; default all that have one.
    """

    name: str
    shape: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False
