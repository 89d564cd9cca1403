"""Cross-entropy's shader and launch code: planted bugs, each caught by what it is meant for; rows beyond the grid."""

import importlib
import os
import pathlib
import shutil
import subprocess
import sys

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
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
REDUCTION_BARRIER = "  " + BARRIER + "  MaxSum all"
REUSE_BARRIER = BARRIER.strip() + "  // the next row reuses `shared`"


def changed(old: str, new: str) -> str:
    assert SOURCE.count(old) == 1, f"{old!r} occurs {SOURCE.count(old)} times"
    return SOURCE.replace(old, new)


@pytest.fixture
def use(monkeypatch):
    """Launch from another source."""
    launcher = importlib.import_module("riftco.metal.cross_entropy")
    return lambda source: monkeypatch.setattr(launcher, "source", lambda name: source)


def check(seed: int, case: str = "odd sizes") -> None:
    with metal_emulator.schedule(seed):
        support.check_case(cases, next(c for c in cases.CASES if c.name == case), torch.float32, DEVICE)


def job(V: int = 70):
    """A forward launch with several simdgroups, on exactly sized buffers."""
    x, y = torch.randn(5, V), torch.randint(0, V, (5,))
    with DEVICE.use(), support.poisoned(), metal_emulator.recording() as jobs:
        cross_entropy(x, y)
    (launch,) = jobs
    return launch


def replay(launch, sanitizer: str, seed: int = 0):
    if reason := metal_emulator.why_not_sanitizer(sanitizer):
        pytest.skip(reason)
    return launch.replay(sanitizer, seed)


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("? exp_m1(log_p) :", "? -exp_m1(log_p) :", "odd sizes"),
        ("part.sum * precise::exp(part.largest - shift(largest))", "part.sum", "several blocks of V"),
        ("(log_total - picked) * w;", "log_total - picked;", "row weights, none"),
        ("d_loss[n * p.stride_d_loss]", "d_loss[0]", "odd sizes"),
        ("y >= 0 && ", "", "ignore_index 0, int32"),
        ("if (lane < simdgroups) all", "all", "odd sizes"),  # reads what nobody wrote: NaN
    ],
)
def test_wrong_numbers_are_caught(use, old, new, case):
    use(changed(old, new))
    with pytest.raises(AssertionError):
        check(0, case)


def test_a_missing_barrier_is_caught(use):
    """By its numbers under some schedule, and as a race under any."""
    broken = changed(REDUCTION_BARRIER, "  MaxSum all")
    use(broken)
    failed = 0
    for seed in range(4):
        try:
            check(seed)
        except AssertionError:
            failed += 1
    assert failed
    report = replay(job().with_source(broken), "thread").report
    assert "data race" in report and "common.h" in report


def test_a_missing_barrier_between_rows_is_a_race():
    one_group = job().with_groups(1)
    assert replay(one_group, "thread").status == 0
    report = replay(one_group.with_source(changed(REUSE_BARRIER, "")), "thread").report
    assert "data race" in report


def test_a_divergent_barrier_is_caught(use):
    use(changed(REDUCTION_BARRIER, "  if (simdgroup == 0) " + BARRIER + "  MaxSum all"))
    with pytest.raises(RuntimeError, match="64 of 64 threads wait at different threadgroup_barriers"):
        check(0)


def test_a_return_before_a_barrier_is_caught(use):
    use(changed("    MaxSum part = {-INFINITY", "    if (thread_index > 40) return;\n    MaxSum part = {-INFINITY"))
    with pytest.raises(RuntimeError, match="divergence"):
        check(0)


@pytest.mark.parametrize("bound", ["v <= p.V", "v < p.V + 1"])
def test_a_read_out_of_bounds_is_caught(bound):
    broken = changed("v < p.V; v += threads) {\n      const float x", f"{bound}; v += threads) {{\n      const float x")
    report = replay(job().with_source(broken), "address").report
    assert "heap-buffer-overflow" in report and "cross_entropy.metal" in report


def test_a_write_past_a_threadgroup_array_is_caught():
    broken = changed("threadgroup float shared[64]", "threadgroup float shared[33]")
    report = replay(job().with_source(broken), "address").report
    assert "heap-buffer-overflow" in report and "common.h" in report


def test_an_oversized_threadgroup_array_is_caught(use):
    array = "threadgroup float shared[64]"
    use(changed(array, "threadgroup float shared[8192]"))
    check(0)
    use(changed(array, "threadgroup float shared[8193]"))
    with pytest.raises(RuntimeError, match="more than 32768"):
        check(0)


def test_the_wrong_address_space_is_caught():
    broken = changed("threadgroup_max_sum(part, shared, lane", "threadgroup_max_sum(part, loss, lane")
    errors = metal_emulator.lint(broken)
    assert "threadgroup_max_sum" in errors and "address space" in errors


OUTPUTS = "f->setArg(3, loss);\n    f->setArg(4, lse);"
INPUTS = "f->setArg(0, logits);\n    f->setArg(1, target);"
LSE = "f->setArg(4, lse);\n    f->setArg(5, params);"


@pytest.mark.parametrize(
    "old,new,caught",
    [
        (OUTPUTS, OUTPUTS.replace("loss", "lse"), "loss: err=nan"),
        (INPUTS, INPUTS.replace("1", "2").replace("0", "1").replace("2", "0"), "a tensor of 8-byte elements"),
        (LSE, "f->setArg(5, params);", "buffer(4) was not set"),
    ],
    ids=["one output for both", "inputs swapped", "one left out"],
)
def test_a_wrong_buffer_index_in_the_launch_code_is_caught(tmp_path, old, new, caught):
    """In a process of its own: an operator library can be loaded once."""
    csrc = shutil.copytree(metal_emulator.CSRC, tmp_path / "csrc")
    header = csrc / "cross_entropy.h"
    text = header.read_text()
    assert text.count(old) == 1
    header.write_text(text.replace(old, new))
    tests = pathlib.Path(__file__).parents[1]
    code = f"""
import pathlib, support, metal_emulator, torch
from riftco.kernels.cross_entropy import cases
device = next(d for d in support.DEVICES if d.name == "mps-emulated")
assert device.available
metal_emulator.install(pathlib.Path({str(csrc)!r}))
support.check_case(cases, next(c for c in cases.CASES if c.name == "odd sizes"), torch.float32, device)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and caught in done.stderr, done.stderr


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
        riftco.metal.ops().cross_entropy_fwd(
            "#include <metal_stdlib>\n", x, torch.zeros(2, dtype=torch.long), None, x, torch.empty(2, 2), -100, 1, 0, 4
        )
