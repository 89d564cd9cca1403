"""riftco doctor: what it says of this machine, that it sees faults, and the way it takes on a Mac."""

import json

import pytest
import support
import torch

from riftco import metal, tpu
from riftco.doctor import machine, report
from riftco.kernels import _contract
from riftco.kernels.swiglu import cases as swiglu_cases
from riftco.train import tiny

EMULATED = next(d for d in support.DEVICES if d.name == "mps-emulated")


@pytest.fixture
def quick(monkeypatch):
    """Two rooms, so that a test takes a second."""
    monkeypatch.setattr(report, "ROOMS", ("swiglu", "rope"))
    monkeypatch.setattr(report, "STEPS", 2)


def test_a_sound_machine(riftco, quick):
    done = riftco("doctor", "--device", "cpu", "--json")
    found = json.loads(done.stdout)
    assert found["ok"] and found["versions"]["torch"] == torch.__version__ and found["versions"]["riftco"]
    assert found["devices"] == {"cpu": {"state": "works", "detail": found["devices"]["cpu"]["detail"], "remedy": ""}}
    assert [(s["op"], s["failures"]) for s in found["suites"]] == [("swiglu", []), ("rope", [])]
    assert all(s["passed"] > 10 for s in found["suites"])
    assert [t["method"] for t in found["trainings"]] == ["full", "lora", "qlora"]
    assert all(len(t["losses"]) == 2 and not t["failure"] for t in found["trainings"])
    assert {"system", "processor", "memory", "commit"} <= found["machine"].keys()


def test_the_text_holds_what_a_bug_report_needs(riftco, quick, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tpu, "why_not", lambda: "torch_xla is not installed; make tpu-env makes a place for it")
    monkeypatch.setenv("RIFTCO_CHECK", "0")
    monkeypatch.setenv("SECRET_TOKEN", "do not print")
    text = riftco("doctor", "--op", "rope").stdout
    for part in (
        f"torch                  {torch.__version__}",
        "RIFTCO_CHECK           0",
        "rope",
        "all that is here works",
    ):
        assert part in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert "absent: " in lines["cuda"] and "; " in lines["cuda"]
    assert "make tpu-env" in lines["xla"] and "works" in lines["cpu"]
    assert "swiglu" not in text and "training" not in text and "do not print" not in text


def test_an_environment_that_steers_nothing_says_so(riftco, quick, monkeypatch):
    monkeypatch.setattr(machine, "environment", dict)
    said = riftco("doctor", "--device", "cpu", "--op", "swiglu").stdout
    assert "\nenvironment: nothing that steers riftco, PyTorch or the compilers is set\ndevices\n" in said


def test_a_kernel_that_is_wrong_is_named(riftco, quick, monkeypatch):
    real, wrong = _contract.load, _contract.own("rope", "cpu").path

    def load(path):
        function = real(path)
        if path != wrong:
            return function
        return lambda q, k, *rest: tuple(t * 1.1 for t in function(q, k, *rest))

    monkeypatch.setattr(_contract, "load", load)
    done = riftco("doctor", "--device", "cpu", "--json", "--op", "rope", code=1)
    found = json.loads(done.stdout)
    (suite,) = found["suites"]
    assert not found["ok"] and "OutOfBudget: q" in suite["failures"][0] and ", float32: " in suite["failures"][0]
    text = riftco("doctor", "--device", "cpu", "--op", "rope", code=1).stdout
    assert f"{len(suite['failures'])} FAILED" in text.splitlines()[-1] and suite["failures"][0] in text


def test_a_case_that_cannot_be_built_hurts_no_other(riftco, quick, monkeypatch):
    """Its name and its error are findings; the op's other cases, the other ops and the trainings run all the same."""
    first, real = swiglu_cases.CASES[0], swiglu_cases.make_inputs

    def make_inputs(case, generator):
        if case is first:
            raise RuntimeError("the weight has no data")
        return real(case, generator)

    sound = json.loads(riftco("doctor", "--device", "cpu", "--json").stdout)["suites"]
    monkeypatch.setattr(swiglu_cases, "make_inputs", make_inputs)
    found = json.loads(riftco("doctor", "--device", "cpu", "--json", code=1).stdout)
    swiglu, rope = found["suites"]
    assert len(swiglu["failures"]) == 3 and all("the weight has no data" in f for f in swiglu["failures"])
    assert all(f.startswith(f"{first.name}, ") for f in swiglu["failures"])
    assert (swiglu["passed"], rope["passed"]) == (sound[0]["passed"] - 3, sound[1]["passed"])
    assert len(found["trainings"]) == 3 and not any(t["failure"] for t in found["trainings"])


def test_its_counts_are_of_all_small_cases():
    """Of every op, forward and backward against float64, in each dtype; the rest is named as not run."""
    for room in ("cross_entropy", "embedding"):
        cases = support.rooms()[room]
        suite = report._suite(room, "cpu")
        small = [c for c in cases.CASES if not c.slow]
        assert suite.passed == len(small) * len(getattr(cases, "DTYPES", report.DTYPES)) and not suite.failures
    without = {name for name, cases in support.rooms().items() if not cases.GRADS}
    assert without == {"adam"}, "every other op's cases compare gradients"


def test_a_training_that_does_not_learn_or_leaves_the_cpus_is_named(monkeypatch):
    good = tiny.train_tiny(tiny.TinyRun(2))

    class Result:
        before, after, metrics = good.after, good.before, good.metrics

    monkeypatch.setattr(report, "train_tiny", lambda run: Result)
    assert "held-out loss" in report._training("full", "cpu", ()).failure
    monkeypatch.setattr(report, "train_tiny", lambda run: good)
    earlier = report.Training("cpu", "full", [good.metrics[0].loss, good.metrics[1].loss * 1.02])
    assert "loss of step 2 is" in report._training("full", "cuda", [earlier]).failure
    assert not report._training("full", "cuda", ()).failure
    monkeypatch.setattr(report, "train_tiny", lambda run: 1 / 0)
    assert report._training("full", "cpu", ()).failure.startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--device", "abacus"), "--device must be one of cpu, cuda, mps, xla; got 'abacus'"),
        (("--device", "mps"), "--device mps: Metal exists on Macs only; use cuda or cpu"),
        (("--device", "metal"), "--device mps: Metal exists on Macs only; use cuda or cpu"),
        (("--device", "cpu", "--op", "nose"), "no op's name contains 'nose'"),
    ],
)
def test_bad_options(riftco, monkeypatch, options, why):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    assert why in riftco("doctor", *options, code=2).stderr


@pytest.mark.parametrize(
    ("system", "built", "remedy"),
    [("Linux", False, "use cuda"), ("Darwin", False, "arm64 Python"), ("Darwin", True, "macOS 14")],
)
def test_every_absence_of_metal_has_its_remedy(monkeypatch, system, built, remedy):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    monkeypatch.setattr(machine.platform, "system", lambda: system)
    state = machine.device_state("mps")
    assert state.state == "absent" and remedy in state.remedy


@pytest.mark.parametrize(("cuda", "system", "remedy"), [
    (None, "Linux", "CUDA build"), ("12.8", "Linux", "nvidia-smi"), (None, "Darwin", "mps"),
])  # fmt: skip
def test_every_absence_of_cuda_has_its_remedy(monkeypatch, cuda, system, remedy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine.platform, "system", lambda: system)
    state = machine.device_state("cuda")
    assert state.state == "absent" and remedy in state.remedy


def test_a_gpu_that_cannot_be_used_is_broken(monkeypatch):
    class Properties:
        name, major, minor, total_memory = "Old", 7, 5, 16 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: True)
    state = machine.device_state("cuda")
    assert state.state == "broken" and "Old" in state.detail and "8.0" in state.remedy
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.device_state("cuda").remedy == "pip install triton"


def test_a_mac_without_the_extension_is_broken(riftco, quick, monkeypatch):
    """Metal is there, riftco's part is not: the remedy, status 1, and no suite on it."""

    def missing():
        raise RuntimeError(f"riftco: the Metal extension is not built (no _C*.so). {metal.REBUILD}")

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(metal, "ops", missing)
    found = json.loads(riftco("doctor", "--device", "mps", "--json", code=1).stdout)
    assert found["devices"]["mps"]["state"] == "broken" and "is not built" in found["devices"]["mps"]["detail"]
    assert found["devices"]["mps"]["remedy"] == metal.REBUILD and not found["suites"]


@pytest.mark.skipif(not EMULATED.available, reason=f"mps-emulated: {EMULATED.why_not}")
def test_on_a_mac_the_shaders_are_examined(riftco, quick, monkeypatch):
    """The emulator in the place of a Mac's GPU: tensors lie on the CPU, all else is what a Mac runs."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(report, "where", lambda device: "cpu")
    monkeypatch.setitem(tiny.BACKENDS, "metal", "cpu")
    monkeypatch.setattr(report, "ATTENTION", {"lora": "flash"})
    with EMULATED.use():
        found = json.loads(riftco("doctor", "--device", "mps", "--json").stdout)
    assert found["ok"] and found["devices"]["mps"]["detail"] == f"Metal extension built with torch {torch.__version__}"
    assert all(s["passed"] > 10 and s["device"] == "mps" for s in found["suites"])
    (training,) = found["trainings"]
    assert training["device"] == "mps" and training["losses"][1] < training["losses"][0]
    real = metal.source
    broken = real("swiglu").replace("T(x * activated(", "T(activated(")
    assert broken != real("swiglu")
    monkeypatch.setattr(metal, "source", lambda name: broken if name == "swiglu" else real(name))
    with EMULATED.use():
        found = json.loads(riftco("doctor", "--device", "mps", "--json", "--op", "swiglu", code=1).stdout)
    assert found["suites"][0]["failures"]


def test_ops_without_a_kernel_there_are_said_to_be_refused(monkeypatch):
    monkeypatch.setattr(swiglu_cases, "DEVICES", ("cpu",), raising=False)
    assert "not on xla: refused by name" in report._suite("swiglu", "xla").lines()[0]
