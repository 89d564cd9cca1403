"""Correctness against the spec in float64: asked of kernels by the conformance test and `riftco doctor`, of peers by
the bench.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor

from ._cases import Case


class OutOfBudget(AssertionError):
    """A result is further from float64 than its rounding explains."""


def inputs_of(cases, case: Case, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """The case's inputs rounded to the tested dtype, held in float64: every path sees the same numbers.

    Tensors that a case makes in float32 (weights of rows, tables, scales) stay as they are.
    """
    with contextlib.nullcontext() if device == "cpu" else torch.device(device):  # large inputs are made in place
        made = cases.make_inputs(case, torch.Generator(device).manual_seed(seed))
    return {k: v.to(dtype).double() if v.dtype == torch.float64 else v for k, v in made.items()}


def to(inputs: dict[str, Tensor], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """float64 inputs cast to `dtype`; everything on `device`, each a fresh tensor."""
    typed = {k: v.detach().clone().to(dtype if v.dtype == torch.float64 else v.dtype) for k, v in inputs.items()}
    return {k: v.to(device) for k, v in typed.items()}  # in two steps: not every device has float64


def leaves_of(cases, inputs: dict[str, Tensor]) -> list[str]:
    """Names of the inputs whose gradients are taken."""
    return [k for k in cases.GRADS if k in inputs]


def outputs_and_grads(
    fn: Callable, cases, case: Case, inputs: dict[str, Tensor], trained: Container[str] | None = None,
    device: str = "cpu",
) -> dict[str, Tensor]:  # fmt: skip
    """All outputs of `fn(inputs, case)` and d_<name> for the room's GRADS, with one seeded upstream gradient each.

    Gradients come through the outputs named in `trained`, by default all that have one. The results lie on `device`.
    """
    wanted = leaves_of(cases, inputs)
    leaves = {k: v.requires_grad_() if k in wanted else v for k, v in inputs.items()}
    out = fn(leaves, case)
    if wanted:
        gen = torch.Generator().manual_seed(99)
        loss = sum(
            (o * torch.randn(o.shape, generator=gen, dtype=torch.float64).to(o.dtype).to(o.device)).sum()
            for name, o in out.items()
            if o.requires_grad and (trained is None or name in trained)
        )
        grads = torch.autograd.grad(loss, [leaves[k] for k in wanted])
        out = {**out, **{f"d_{k}": g for k, g in zip(wanted, grads)}}
    return {k: v.detach().to(device) for k, v in out.items()}


def loss_on(device: str) -> float:
    """How many times what the spec loses in float32 on the CPU may be lost on a device type: the products of XLA and
    of tensor cores are summed in plain order, PyTorch's on a CPU in blocks."""
    return {"cuda": 4.0, "xla": 4.0}.get(device, 2.0)


def within_budget(
    name: str, got: Tensor, oracle: Tensor, near: Tensor, dtype: torch.dtype, roundings: int = 0, slack: float = 1.0,
    loss: float = 2.0,
) -> float:  # fmt: skip
    """|got - float64| may be at most twice (`loss` times) what the same maths loses in float32, plus one rounding of
    the stored dtype, plus one for each operand that the kernel rounds to 16 bit inside; all of it times `slack`.

    One whole ulp a rounding, as the interpreter truncates to bfloat16. Non-finite values must be the same ones.
    Returns the largest error over the largest value. Raises OutOfBudget.
    """
    if got.shape != oracle.shape:
        raise OutOfBudget(f"{name}: shape {tuple(got.shape)}, not {tuple(oracle.shape)}")
    if not oracle.is_floating_point():
        if not torch.equal(got, oracle):
            raise OutOfBudget(f"{name}: integers differ")
        return 0.0
    got64, finite = got.double(), oracle.isfinite()
    if not torch.equal(got64[~finite].nan_to_num(7e77), oracle.double()[~finite].nan_to_num(7e77)):
        raise OutOfBudget(f"{name}: inf/NaN")
    if not bool(finite.any()):
        return 0.0
    got64, exact, near64 = got64[finite], oracle.double()[finite], near.double()[finite]
    eps = torch.finfo(got.dtype).eps + roundings * (torch.finfo(dtype).eps if dtype.itemsize == 2 else 0)
    err, base, scale = (got64 - exact).abs().max(), (near64 - exact).abs().max(), exact.abs().max()
    budget = slack * (loss * base + eps * scale) + 1e-30
    if not bool(err <= budget):  # NaN must fail, so the comparison is written to be true only for numbers
        raise OutOfBudget(f"{name}: {err=:.3e} {base=:.3e} {scale=:.3e} budget {budget:.3e} eps {eps:.1e}")
    return float(err / scale.clamp(min=1e-30))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN (or the largest integer): results must not depend on what a buffer held before."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, True
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before, warn_only=warn)


def check_case(
    cases, case: Case, dtype: torch.dtype, device: str, seed: int = 0, *, loss: float | None = None,
    using: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    spoil: Callable[[Tensor], Tensor] | None = None,
) -> None:  # fmt: skip
    """Run one case on a device against the spec in float64, buffers poisoned. Raises OutOfBudget, an AssertionError.

    Args:
        loss: in place of what `loss_on` says of the device.
        using: the context in which the case runs, and its oracle does not; where it yields a list, that takes the
            results, which are still on the device.
        spoil: changes each result before it is judged.
    """
    inputs = inputs_of(cases, case, dtype, seed)
    assert cases.exercises(case, inputs), f"{case.name}: this case is vacuous"
    oracle, near = (
        outputs_and_grads(cases.reference, cases, case, to(inputs, t, "cpu")) for t in (torch.float64, torch.float32)
    )
    got = {name: value.cpu() for name, value in run_case(cases, case, dtype, device, inputs, using).items()}
    if got.keys() != oracle.keys():
        raise OutOfBudget(f"outputs {sorted(got)}, not {sorted(oracle)}")
    for name in oracle:
        value, roundings = spoil(got[name]) if spoil else got[name], cases.ROUNDINGS.get(name, 0)
        within_budget(name, value, oracle[name], near[name], dtype, roundings, loss=loss or loss_on(device))


def run_case(
    cases, case: Case, dtype: torch.dtype, device: str, inputs: dict[str, Tensor],
    using: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> dict[str, Tensor]:  # fmt: skip
    """Outputs and gradients of a case, on the device."""
    with using() as results, poisoned():
        got = outputs_and_grads(cases.call, cases, case, to(inputs, dtype, device), device=device)
        if results is not None:
            results += got.values()
    return got
