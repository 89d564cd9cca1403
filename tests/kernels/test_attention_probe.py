"""Which attention backward a run uses: picked once with a reason, fixed until the run ends, the same result."""

import contextlib
import dataclasses
import os
import threading

import pytest
import support
import torch

from riftco import explain
from riftco.functional import attention, attention_backward
from riftco.kernels import _contract
from riftco.kernels.attention import cases, probe

SHAPE = (torch.float32, 4, 2, 16)
DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))


@pytest.fixture
def broken(monkeypatch):
    """A CPU whose own backward raises."""
    op = _contract.TABLE[probe.OP]
    launchers = {**op.launchers, "cpu": "riftco.kernels.attention.probe:_missing"}
    monkeypatch.setitem(_contract.TABLE, probe.OP, dataclasses.replace(op, launchers=launchers))

    def missing(*args):
        raise NotImplementedError("no kernel for this head shape\nand a second line")

    monkeypatch.setattr(probe, "_missing", missing, raising=False)
    _contract.load.cache_clear()
    yield
    _contract.load.cache_clear()


def gradients(T=40):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, h, 16, generator=generator, requires_grad=True) for h in (4, 2, 2))
    return torch.autograd.grad(attention(q, k, v, causal=True).square().sum(), (q, k, v))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_kernel_that_works_is_native(device, dtype, packed):
    with device.use():
        state = torch.get_rng_state()
        choice = probe.pick([device.torch_device], dtype, 2, 1, 16, packed=packed)
        assert choice.path == "native" and "2 query heads, 1 key heads, head dim 16" in choice.why, choice
        assert torch.equal(state, torch.get_rng_state())


def test_a_kernel_that_fails_is_composed_by_name(broken):
    choice = probe.pick(["cpu"], *SHAPE)
    assert choice == _contract.Choice("composed", "cpu: NotImplementedError: no kernel for this head shape")
    with pytest.raises(NotImplementedError):  # no fallback without that decision
        gradients()
    with attention_backward(["cpu"], *SHAPE) as picked:
        assert picked == choice
        gradients()


def test_a_kernel_that_is_wrong_is_composed_by_name(monkeypatch):
    monkeypatch.setattr("riftco.kernels.attention.cpu_plain.MOST", 0)  # the blocks, of which one is made wrong
    with support.mutant(
        "riftco.kernels.attention.cpu", "use.add(wanted_k, d_s.mT, x)", "use.add(wanted_k, d_s.mT, x * 0.9)"
    ):
        choice = probe.pick(["cpu"], *SHAPE)
    assert choice.path == "composed" and choice.why.startswith("cpu: its dk is off by an NMSE of "), choice


def test_one_device_that_cannot_decides_for_all(monkeypatch):
    monkeypatch.setattr(probe, "_why_not", lambda device, *shape: "too old" if device.index == 1 else "")
    choice = probe.pick(["cuda:0", "cuda:1"], *SHAPE)
    assert choice == _contract.Choice("composed", "cuda:1: too old")
    with attention_backward(["cuda:0", "cuda:1"], *SHAPE):
        assert _contract.choose(probe.OP, "cuda").path == probe.COMPOSED


def test_native_and_composed_are_equal(monkeypatch):
    with attention_backward(["cpu"], *SHAPE) as native:
        first = gradients()
    monkeypatch.setattr(probe, "_why_not", lambda *shape: "asked for")
    with attention_backward(["cpu"], *SHAPE) as composed:
        second = gradients()
    assert (native.path, composed.path) == ("native", "composed")
    for a, b in zip(first, second):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    assert any(not torch.equal(a, b) for a, b in zip(first, second))  # they are two implementations


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_composed_is_within_the_budget(case, dtype, monkeypatch):
    monkeypatch.setattr(probe, "_why_not", lambda *shape: "asked for")
    with attention_backward(["cpu"], *SHAPE):
        support.check_case(cases, case, dtype, dataclasses.replace(support.DEVICES[0], loss=4))


def test_nothing_changes_it_while_the_run_lasts(broken, monkeypatch):
    with attention_backward(["cpu"], *SHAPE):
        fixed = _contract.choose(probe.OP, "cpu")
        assert fixed.path == probe.COMPOSED and fixed.why.startswith("fixed for this run: composed, cpu: ")
        assert {r["op"]: r["implementation"] for r in explain("cpu")}[probe.OP] == probe.COMPOSED
        with _contract.implementation("spec"):
            assert _contract.choose(probe.OP, "cpu") == fixed
        seen = []
        thread = threading.Thread(target=lambda: seen.append(_contract.choose(probe.OP, "cpu")))
        thread.start()
        thread.join()
        assert seen == [fixed]
        monkeypatch.setattr(probe, "_why_not", lambda *shape: "")  # another run would now pick the device's own
        with (
            pytest.raises(RuntimeError, match=r"it cannot become .*probe:_missing now"),
            contextlib.ExitStack() as other,
        ):
            other.enter_context(attention_backward(["cpu"], *SHAPE))
        assert _contract.choose(probe.OP, "cpu") == fixed
        assert _contract.choose(probe.OP, "cpu", torch.float64).path.endswith("spec:backward")
    assert not _contract._PINNED and "RIFTCO_IMPL" not in os.environ


def test_runs_that_agree_may_overlap():
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(attention_backward(["cpu"], *SHAPE))
    second.enter_context(attention_backward(["cpu"], *SHAPE))
    first.close()
    assert _contract.choose(probe.OP, "cpu").why.startswith("fixed for this run")
    second.close()
    assert not _contract._PINNED
