"""XLA's launchers on the CPU: they are plain torch but for the loop, which the host runs here."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import support
import torch

from riftco.kernels import _contract


def step_by_step(body, pairs, state, fixed):
    for i, j in pairs:
        state = body(torch.tensor(i), torch.tensor(j), state, fixed)
    return state


@contextlib.contextmanager
def serving_the_cpu(module, launcher, op: str, cases, **sizes: int) -> Iterator[Callable]:
    """`launcher` serves op's forward and backward on the CPU, through the forward and backward of the test `module`.

    Yields what checks one of `cases`. `sizes` of tiles should be so small that a case has several.
    """
    cpu = dataclasses.replace(next(d for d in support.DEVICES if d.name == "cpu"), loss=4.0)
    with contextlib.ExitStack() as stack:
        for name, value in {"loop": step_by_step, **sizes}.items():
            if hasattr(launcher, name):
                stack.enter_context(mock.patch.object(launcher, name, value))
        for end, function in (("fwd", "forward"), ("bwd", "backward")):
            choice = _contract.Choice(f"{module}:{function}", "a test")
            stack.enter_context(_contract.pinned(f"{op}_{end}", {"cpu": choice}))
        yield functools.partial(support.check_case, cases, device=cpu)
