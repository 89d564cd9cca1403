"""What the op tests share: devices, error budgets, poisoned memory, mutants."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import io
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from riftco import tpu
from riftco.kernels import ROOMS, _check, _contract
from riftco.kernels._cases import Case

poisoned = _check.poisoned


@dataclass(frozen=True)
class Device:
    name: str
    torch_device: str
    impl: str | None  # RIFTCO_IMPL under which its cases run
    probe: Callable[[], str]  # "" when it can run here, else why not
    loss: float | None = None  # in place of what loss_on() says of the device
    around: Callable[[bool], contextlib.AbstractContextManager] | None = None  # checks how results came

    @functools.cached_property
    def why_not(self) -> str:
        return self.probe()

    @property
    def available(self) -> bool:
        return not self.why_not

    def use(self):
        return _contract.implementation(self.impl)

    @contextlib.contextmanager
    def using(self, warm: bool = False) -> Iterator[list | None]:
        """What a case runs in. Where a list is yielded, it takes the results, and how they came is checked at the end;
        warm: the case has run there before, with other values."""
        around = self.around(warm) if self.around else contextlib.nullcontext()
        with self.use(), around as results:
            yield results


def _triton() -> str:
    if torch.cuda.is_available():
        return "a GPU is here and runs the same kernels"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


def _metal() -> str:
    emulator = importlib.import_module("metal_emulator")
    reason = emulator.why_not()
    if not reason:
        emulator.install()  # compiles at the first launch
    return reason


def _xla() -> str:
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla lives in its own environment: make test-tpu"
    importlib.import_module("torch_xla").device()  # before the first backward, at which autograd counts the devices
    return ""


@contextlib.contextmanager
def _one_graph(warm: bool) -> Iterator[list]:
    with importlib.import_module("xla_graph").recorded() as record:
        yield record.results
    assert not record.fallbacks, f"left to the CPU: {record.fallbacks}"
    assert record.executions == 1 and record.compiles <= (0 if warm else 1), record


DEVICES = (
    Device("cpu", "cpu", None, lambda: ""),
    # the interpreter's products are NumPy's, of which processors sum few rows differently well: 2.6 on one with AVX-512
    Device("cpu-triton", "cpu", "triton", _triton, loss=3.0),
    Device("mps-emulated", "cpu", "metal", _metal),
    Device("cuda", "cuda", None, lambda: "" if torch.cuda.is_available() else "no CUDA device"),
    Device("xla", tpu.DEVICE_TYPE, None, _xla, around=_one_graph),
)
SPEC = Device("cpu-spec", "cpu", "spec", lambda: "")  # what serves float64, and XLA where it has nothing better
MARKS = {"cuda": pytest.mark.gpu, "xla": pytest.mark.xla}


def skip_without_a_gpu(item: pytest.Item) -> None:
    """The mark alone decides."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def device_params(names: tuple[str, ...] | None = None) -> list:
    """pytest params of the devices; those that cannot run here skip with the reason."""
    params = []
    for d in DEVICES:
        if names is None or d.name in names:
            marks = [MARKS[d.name]] if d.name in MARKS else []
            if not d.available:
                marks.append(pytest.mark.skip(reason=f"{d.name}: {d.why_not}"))
            params.append(pytest.param(d, id=d.name, marks=marks))
    return params


def serves(cases, device: str, case: Case) -> bool:
    """False where the device's kernel refuses one of the case's options by name; the room's tests hold the refusal."""
    return not any(case.options.get(o) for o in getattr(cases, "REFUSED", {}).get(device, ()))


def rooms() -> dict[str, object]:
    """Room name -> its cases module."""
    return {name: importlib.import_module(f"riftco.kernels.{name}.cases") for name in ROOMS}


def check_case(cases, case: Case, dtype: torch.dtype, device: Device, seed: int = 0, spoil=None) -> None:
    """Run one case on one device against the spec in float64."""
    _check.check_case(
        cases, case, dtype, device.torch_device, seed, loss=device.loss, using=device.using, spoil=spoil
    )  # fmt: skip


def assert_same_sums(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits; on a GPU, whose lanes add in an order that strides decide, equal but for rounding."""
    if got.device.type == "cuda":
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(got, want)


def compiled(script: str, *arguments: object) -> list[list[str]]:
    """What a compile_*.py script of this folder prints, a kernel a line, in words. In a process of its own: this one
    may have Triton's interpreter on."""
    tests = pathlib.Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "RIFTCO_IMPL")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests.parent), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(tests / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.split() for line in done.stdout.splitlines()]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-4) -> None:
    """The largest error is a small part of the largest value."""
    error = (got - want).abs().max() / want.abs().max()
    assert error <= tolerance, f"{error:.2e}"  # NaN fails


def nmse(got: torch.Tensor, want: torch.Tensor) -> float:
    """Squared error over squared size, in float64."""
    got, want = got.double().cpu(), want.double().cpu()
    return ((got - want).square().sum() / want.square().sum().clamp(min=1e-60)).item()


def xla(test):
    """Run a test, which takes a `device`, on XLA's."""
    return pytest.mark.xla(pytest.mark.parametrize("device", device_params(("xla",)))(test))


def run_again(cases, case: Case, dtype: torch.dtype, device: Device) -> None:
    """Run a case that has run on the device before, with other values."""
    inputs = _check.inputs_of(cases, case, dtype, seed=1)
    _check.run_case(cases, case, dtype, device.torch_device, inputs, functools.partial(device.using, warm=True))


@contextlib.contextmanager
def mutant(module: str, old: str, new: str) -> Iterator[None]:
    """Run every function of `module` from a copy of its source in which `old`, found exactly once, became `new`.

    Launchers are replaced where they are looked up; other modules hold the real functions, which get the changed code.
    """
    original = importlib.import_module(module)
    source = pathlib.Path(original.__file__).read_text()
    assert source.count(old) == 1, f"{module}: {old!r} occurs {source.count(old)} times"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / f"mutant_{abs(hash((module, old, new)))}.py"
        file.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(f"{module.rpartition('.')[0]}.{file.stem}", file)
        changed = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(changed)
        real = _contract.load

        def load(path: str):
            where, _, attr = path.partition(":")
            return getattr(changed, attr) if where == module else real(path)

        _contract.load = load
        before, codes = dict(vars(original)), {}
        for name, value in vars(changed).items():
            if isinstance(value, types.FunctionType) and value.__module__ == changed.__name__:
                codes[before[name]] = before[name].__code__
                before[name].__code__ = value.__code__
            elif not name.startswith("__"):
                setattr(original, name, value)
        try:
            yield
        finally:
            _contract.load = real
            vars(original).update(before)
            for function, code in codes.items():
                function.__code__ = code


def assert_caught(cases, module: str, old: str, new: str, case: str, device: str = "cpu-triton") -> None:
    """A planted bug in a kernel must fail the conformance check of `case`."""
    dev = next(d for d in (*DEVICES, SPEC) if d.name == device)
    if not dev.available and device == "cpu-triton" and torch.cuda.is_available():
        dev = next(d for d in DEVICES if d.name == "cuda")
    if not dev.available:
        pytest.skip(f"{device}: {dev.why_not}")
    chosen = next(c for c in cases.CASES if c.name == case)
    check_case(cases, chosen, torch.float32, dev)
    with mutant(module, old, new), pytest.raises(AssertionError):
        check_case(cases, chosen, torch.float32, dev)


def assert_twin(ours: type, theirs: type, *args, inputs: tuple[torch.Tensor, ...], **kwargs) -> None:
    """`ours(*args)` takes the place of `theirs(*args)`: arguments with their defaults, state_dict strict both ways,
    outputs and gradients, deepcopy and pickle."""

    def arguments(kind):
        return {p.name: p.default for p in list(inspect.signature(kind.__init__).parameters.values())[1:]}

    wanted = arguments(theirs)
    assert list(arguments(ours).items())[: len(wanted)] == list(wanted.items())
    one, other = ours(*args, **kwargs), theirs(*args, **kwargs)
    shapes = [{k: (v.shape, v.dtype) for k, v in m.state_dict().items()} for m in (one, other)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])
    assert [n for n, _ in one.named_parameters()] == [n for n, _ in other.named_parameters()]
    for (_, p), (_, q) in zip(one.named_parameters(), other.named_parameters()):
        torch.testing.assert_close(p, q, msg="initial values")
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn(p.shape))
    one.load_state_dict(other.state_dict(), strict=True)
    other.load_state_dict(one.state_dict(), strict=True)
    buffer = io.BytesIO()
    torch.save(one, buffer)
    buffer.seek(0)
    results = []
    for module in (other, one, copy.deepcopy(one), torch.load(buffer, weights_only=False)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = module(*leaves)
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
        results.append((out, *torch.autograd.grad(out, [*leaves, *module.parameters()], seed)))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, want)
