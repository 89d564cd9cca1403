"""The examination: each device that works runs every op's small cases and three short trainings."""

from __future__ import annotations

import contextlib
import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .. import tpu
from ..bench.machine import reason_of
from ..kernels import ROOMS, _check
from ..kernels._cases import Case
from ..train.config import ALIASES, ConfigError
from ..train.tiny import TinyRun, train_tiny
from . import machine
from .machine import State

DEVICES = ("cpu", "cuda", "mps", "xla")
BACKENDS = {"cpu": "cpu", "cuda": "cuda", "mps": "metal", "xla": "tpu"}  # of `riftco train-tiny`
LISTED = {"mps": "mps-emulated"}  # what the rooms' cases call the device, where that is not its type
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ATTENTION = {"full": "materialized", "lora": "flash", "qlora": "flash"}  # of each training
STEPS = 8
APART = 0.01  # by how much of itself a step's loss may leave the CPU's
Tell = Callable[[str], None]


@dataclass
class Suite:
    """One op on one device."""

    device: str
    op: str
    passed: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    refused: str = ""  # why the op has no kernel there, by design

    def lines(self) -> list[str]:
        if self.refused:
            return [f"  {self.op:22s} {self.refused}"]
        failed = f", {len(self.failures)} FAILED" if self.failures else ""
        return [
            f"  {self.op:22s} {self.passed} passed{failed} in {self.seconds:.1f} s",
            *(f"    {f}" for f in self.failures),
        ]


@dataclass
class Training:
    """One short training on one device: losses step by step."""

    device: str
    method: str
    losses: list[float] = field(default_factory=list)
    failure: str = ""

    def lines(self) -> list[str]:
        ends = f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f} in {len(self.losses)} steps" if self.losses else ""
        return [f"  {'training, ' + self.method:22s} " + (f"FAILED: {self.failure}" if self.failure else ends)]


@dataclass
class Report:
    versions: dict[str, str]
    machine: dict[str, str]
    environment: dict[str, str]
    devices: dict[str, State]
    suites: list[Suite] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def failures(self) -> int:
        broken = sum(s.state == "broken" for s in self.devices.values())
        return broken + sum(len(s.failures) for s in self.suites) + sum(bool(t.failure) for t in self.trainings)

    def asdict(self) -> dict[str, Any]:
        return {"ok": not self.failures, **asdict(self)}


def examine(devices: Sequence[str] = (), op: str | None = None, tell: Tell = lambda line: None) -> Report:
    """Examine the named devices, by default all.

    Args:
        op: only ops whose name contains this, and no training.
        tell: hears the report line by line, as it is made.

    Raises:
        ConfigError: an unknown device or op, or a named device that is not here.
    """
    devices = [ALIASES.get(d, d) for d in devices]
    if unknown := [d for d in devices if d not in DEVICES]:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}; got {unknown[0]!r}")
    rooms = [r for r in ROOMS if op is None or op in r]
    if not rooms:
        raise ConfigError(f"no op's name contains {op!r}; they are: {', '.join(ROOMS)}")
    states = {d: machine.device_state(d) for d in devices or DEVICES}
    for device in devices:
        if states[device].state == "absent":
            raise ConfigError(f"--device {device}: {states[device].detail}; {states[device].remedy}")
    report = Report(machine.versions(), machine.machine(), machine.environment(), states)
    for name in ("versions", "machine", "environment"):
        rows = getattr(report, name)
        tell(name if rows else f"{name}: nothing that steers riftco, PyTorch or the compilers is set")
        for key, value in rows.items():
            tell(f"  {key:22s} {value}")
    tell("devices")
    for device, state in states.items():
        tell(f"  {device:22s} {state}")
    for device in (d for d, state in states.items() if state.state == "works"):
        with _heard(report.warnings):
            _run_on(device, rooms, op is None, report, tell)
    for text in report.warnings:
        tell(f"warning: {text}")
    tell(f"{report.failures} FAILED" if report.failures else "all that is here works")
    return report


def _run_on(device: str, rooms: Sequence[str], train: bool, report: Report, tell: Tell) -> None:
    tell(f"on {device}: each op's small cases in float32, float16 and bfloat16 against float64")
    for room in rooms:
        suite = _suite(room, device)
        report.suites.append(suite)
        for line in suite.lines():
            tell(line)
    for method in ATTENTION if train else ():
        training = _training(method, device, report.trainings)
        report.trainings.append(training)
        for line in training.lines():
            tell(line)


def where(device: str) -> str:
    """What tensors are sent to."""
    return str(tpu.device()) if device == "xla" else device


def _suite(room: str, device: str) -> Suite:
    cases, suite = importlib.import_module(f"riftco.kernels.{room}.cases"), Suite(device, room)
    listed = LISTED.get(device, device)
    if listed not in getattr(cases, "DEVICES", (listed,)):
        suite.refused = f"not on {device}: refused by name"
        return suite
    begin = time.perf_counter()
    for case in cases.CASES:
        if case.slow or any(case.options.get(o) for o in getattr(cases, "REFUSED", {}).get(listed, ())):
            continue
        for dtype in getattr(cases, "DTYPES", DTYPES):
            if why := _failure(cases, case, dtype, where(device)):
                suite.failures.append(f"{case.name}, {str(dtype).removeprefix('torch.')}: {why}")
            else:
                suite.passed += 1
    suite.seconds = time.perf_counter() - begin
    return suite


def _failure(cases, case: Case, dtype: torch.dtype, place: str) -> str:
    """In one line; empty when the case passes. Whatever is raised is a finding."""
    try:
        _check.check_case(cases, case, dtype, place)
    except Exception as e:
        return reason_of(e)
    return ""


def _training(method: str, device: str, earlier: Sequence[Training]) -> Training:
    """The loss must fall, and on an accelerator be the CPU's at every step."""
    run = Training(device, method)
    try:
        result = train_tiny(TinyRun(STEPS, BACKENDS[device], ATTENTION[method], method=method))
        run.losses = [m.loss for m in result.metrics]
        same = [t for t in earlier if t.device == "cpu" and t.method == method]
        wanted = same[0].losses if same else _training(method, "cpu", ()).losses if device != "cpu" else run.losses
    except Exception as e:
        run.failure = reason_of(e)
        return run
    if not result.after.loss < result.before.loss:  # NaN is a failure, too
        run.failure = f"held-out loss {result.before.loss:.4f} -> {result.after.loss:.4f}"
    for step, (got, want) in enumerate(zip(run.losses, wanted), 1):
        if not run.failure and not abs(got - want) <= APART * want:
            run.failure = f"loss of step {step} is {got:.4f}, on the CPU {want:.4f}"
    return run


@contextlib.contextmanager
def _heard(texts: list[str]) -> Iterator[None]:
    """Collect each warning once, in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in (str(w.message).strip().partition("\n")[0] for w in caught):
        if text not in texts:
            texts.append(text)
