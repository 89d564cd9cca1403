"""Every operator of PyTorch that riftco calls beside its shaders runs on Metal, as PyTorch's own list says; none of its
tensors there is float64, which Metal lacks, and no op waits for a value on the host.
"""

import functools
import pathlib

import pytest
import support
import torch
import torchgen
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import riftco.metal
from riftco.kernels import _contract
from riftco.kernels._check import inputs_of, outputs_and_grads, to
from riftco.kernels.attention import cases as attention_cases
from riftco.train.tiny import TinyRun, train_tiny

ROOMS = support.rooms()
DEVICE = next(d for d in support.DEVICES if d.name == "mps-emulated")
pytestmark = pytest.mark.skipif(not DEVICE.available, reason=f"mps-emulated: {DEVICE.why_not}")
LIST = pathlib.Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_consecutive")
EVERYWHERE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


@functools.cache
def listed() -> dict[str, str]:
    """Operator -> the dispatch keys that have a kernel; "" for one composed of others."""
    entries = {e["func"].partition("(")[0]: e for e in yaml.safe_load(LIST.read_text())}

    def keys(entry) -> str:
        if entry.get("structured_delegate"):
            entry = entries[entry["structured_delegate"]]
        return ", ".join(entry.get("dispatch", ()))

    return {name: keys(entry) for name, entry in entries.items()}


def runs_on_metal(operator: str) -> bool:
    """`operator` as in "aten::mm" or "aten::sum.dim_IntList"."""
    namespace, _, name = operator.partition("::")
    if namespace != "aten":
        return namespace in ("riftco_mps", "profiler")
    keys = {k.strip() for k in listed()[name].split(",")}
    return "MPS" in keys or keys == {""} or bool(keys & set(EVERYWHERE))


class Called(TorchDispatchMode):
    """The operators called, composed ones as their parts, inside riftco's ops too; which of them saw float64 there, and
    which made the host wait: by a read value, or by a mask whose ones must be counted.
    """

    def __init__(self):
        super().__init__()
        self.operators, self.float64, self.waited, self.inside = set(), set(), set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "riftco":
            self.inside += 1
            with self:
                out = _contract.run(function, "cpu", *args, **kwargs)
            self.inside -= 1
            return out
        if function.namespace == "aten":
            with self:
                out = function.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = function(*args, **kwargs)
        name = function.name()
        self.operators.add(name)
        if self.inside and any(
            isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves((args, out))
        ):
            self.float64.add(name)
        indices = tree_leaves(args[1]) if name.startswith("aten::index") else ()
        masks = any(getattr(t, "dtype", None) == torch.bool for t in indices)
        if self.inside and (masks or name in WAITING):
            self.waited.add(name)
        return out


def check(called: Called) -> None:
    assert not {o for o in called.operators if not runs_on_metal(o)}
    assert not called.float64
    assert not called.waited
    assert "riftco_mps::launch" in called.operators


@pytest.mark.parametrize("room", ROOMS)
def test_of_every_room(room):
    cases, called = ROOMS[room], Called()
    for case in (c for c in cases.CASES if not c.slow):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = to(inputs_of(cases, case, dtype), dtype, "cpu")
            with DEVICE.use(), called:
                outputs_and_grads(cases.call, cases, case, inputs)
    check(called)


def test_of_materialised_attention():
    called = Called()
    for case in (c for c in attention_cases.CASES if not c.slow):
        inputs = to(inputs_of(attention_cases, case, torch.float32), torch.float32, "cpu")
        with DEVICE.use(), called:
            outputs_and_grads(lambda i, c: attention_cases.call(i, c, "materialized"), attention_cases, case, inputs)
    check(called)
    assert {"aten::bmm", "riftco_mps::launch"} <= called.operators
    assert "aten::_softmax" not in called.operators  # it has a shader


@pytest.mark.parametrize("run", [TinyRun(2), TinyRun(2, attention="flash", method="qlora")], ids=["full", "qlora"])
def test_of_a_training(run):
    called = Called()
    with DEVICE.use(), called:
        train_tiny(run)
    check(called)


@pytest.mark.parametrize("operator", riftco.metal.TORCH)
def test_what_stands_in_a_shaders_place(operator):
    assert "MPS" in listed()[operator.removeprefix("aten::")]


def test_the_check_can_fail():
    assert not runs_on_metal("aten::geqrf") and not runs_on_metal("quantized::linear")
    called = Called()
    with called:
        called.inside = 1
        float(torch.ones(2).double().sum())
        torch.ones(2)[torch.tensor([True, False])]
    assert "aten::sum" in called.float64
    assert called.waited == {"aten::_local_scalar_dense", "aten::index.Tensor"}
