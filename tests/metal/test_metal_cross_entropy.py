"""Cross-entropy's shader beyond the rooms' cases: rows beyond the grid, values that are not finite, and what a missing
barrier does to numbers.
"""

import metal_emulator
import pytest
import support
import torch
import torch.nn.functional as F

import riftco.metal
from riftco.functional import cross_entropy
from riftco.kernels.cross_entropy import cases

SOURCE = riftco.metal.source("cross_entropy")
DEVICE = next(d for d in support.DEVICES if d.name == "mps-emulated")
pytestmark = pytest.mark.skipif(not DEVICE.available, reason=f"mps-emulated: {DEVICE.why_not}")


@pytest.fixture
def use(monkeypatch):
    """Launch from another source."""
    return lambda source: monkeypatch.setattr(riftco.metal, "source", lambda name: source)


def changed(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1, f"{old!r} occurs {SOURCE.count(old)} times"
    return SOURCE.replace(old, new)


def check(seed: int, case: str = "odd sizes") -> None:
    with metal_emulator.schedule(seed):
        support.check_case(cases, next(c for c in cases.CASES if c.name == case), torch.float32, DEVICE)


def test_a_missing_barrier_gives_wrong_numbers_under_some_schedule(use):
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);\n    part = {"
    use(changed(barrier, "part = {"))
    failed = 0
    for seed in range(4):
        try:
            check(seed)
        except AssertionError:
            failed += 1
    assert failed


def test_a_return_before_a_barrier_is_caught(use):
    use(
        changed(
            "    Statistics part = {-FLT_MAX", "    if (thread_index > 40) return;\n    Statistics part = {-FLT_MAX"
        )
    )
    with pytest.raises(RuntimeError, match="divergence"):
        check(0)


def test_more_rows_than_threadgroups():
    """The launch code stops at 4,096 threadgroups; each then takes several rows."""
    x, y = torch.randn(4099, 3, requires_grad=True), torch.randint(0, 3, (4099,))
    with DEVICE.use(), support.poisoned(), metal_emulator.recording() as jobs:
        loss = cross_entropy(x, y, reduction="none")
        (got,) = torch.autograd.grad(loss.sum(), x)
    assert {j.grid[0] // j.group[0] for j in jobs} == {4096}
    want = F.cross_entropy(x, y, reduction="none")
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize("filler", [torch.nan, torch.inf])
def test_not_finite_rows_as_the_spec_says(filler):
    """A NaN or +inf logit must reach the loss from whichever thread read it."""
    x, y = torch.randn(3, 40), torch.tensor([3, 4, 5])
    x[1, 35] = filler
    with DEVICE.use():
        got, lse = cross_entropy(x, y, reduction="none", return_lse=True)
    want, want_lse = cross_entropy(x, y, reduction="none", return_lse=True, impl="spec")
    torch.testing.assert_close(got, want, equal_nan=True)
    torch.testing.assert_close(lse, want_lse, equal_nan=True)


def test_a_failed_launch_says_why():
    x = torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=r"Failed to create metal library, error: no kernel"):
        riftco.metal.ops().launch("#include <metal_stdlib>\n", "none", [x], [x], [1], [], 1, 32, False)
    with pytest.raises(NotImplementedError, match=r"no Metal kernel for torch\.float64"):
        riftco.metal.launch("nf4", "nf4_gemv", [torch.float64], [x], [x], groups=1, threads=1)
