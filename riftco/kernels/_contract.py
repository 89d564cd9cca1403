"""Turns (schema, fake, spec, launchers per device) into a torch operator. Torch-only; imports no kernel.

A launcher is named as ``"module:function"`` and its module is imported on the first call on that device, so
defining an op never needs Triton, Metal or XLA.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad

from .. import metal, tpu
from ._arguments import FLOATING, floating

KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xla": "XLA"}
IMPLS = {"spec": None, "triton": "cuda", "metal": "mps"}  # RIFTCO_IMPL value -> the device whose launchers it names


@dataclass(frozen=True, eq=False)  # a key by itself: its mappings have no hash
class Op:
    name: str
    spec: str
    launchers: Mapping[str, str]
    routes: Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    path: str
    why: str


TABLE: dict[str, Op] = {}  # the op x device table: what explain() prints
_PINNED: dict[tuple[str, str], tuple[Choice, int]] = {}  # (op, device) -> what is fixed, and by how many runs
_PINNING = threading.Lock()


def define(
    name: str,
    schema: str,
    *,
    fake: Callable,
    spec: str,
    launchers: Mapping[str, str],
    routes: Mapping[str, str] | str | None = None,
):
    """Define ``riftco::<name>`` and return its overload.

    Args:
        name: operator name; a second definition is refused.
        schema: torch.library schema of arguments and returns.
        fake: shapes and dtypes of the outputs, for torch.compile and meta tensors.
        spec: ``"module:function"`` with the meaning in plain torch; serves float64 and ``RIFTCO_IMPL=spec``, and
            the CPU unless `launchers` names something better.
        launchers: device type -> ``"module:function"``; a device that is missing here refuses by name.
        routes: where a device's launcher picks among kernels, device type -> ``"module:function"`` of a dtype that
            returns (which calls, route, why) for the GPU of this machine; explain() shows them. One alone is CUDA's.
    """
    if name in TABLE:  # torch itself would only warn and override
        raise RuntimeError(f"riftco::{name} is already defined")
    unknown = set(launchers) - set(KEYS)
    if unknown:
        raise ValueError(f"riftco::{name}: unknown device types {sorted(unknown)}; known: {', '.join(KEYS)}")
    of_device = {"cuda": routes} if isinstance(routes, str) else routes or {}
    TABLE[name] = Op(name, spec, {"cpu": spec, **launchers}, of_device)
    forward = TABLE.get(name.removesuffix("_bwd") + "_fwd") if name.endswith("_bwd") else None
    if forward and (lacking := [d for d in forward.launchers if not has_backward(forward.name, d)]):
        del TABLE[name]  # no graph that cannot be computed
        raise RuntimeError(f"riftco::{forward.name} runs on {', '.join(sorted(lacking))}, where {name} does not")
    torch.library.define(f"riftco::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"riftco::{name}", fake)
    for device, key in KEYS.items():
        torch.library.impl(f"riftco::{name}", key, functools.partial(_call, name, device))
    return getattr(torch.ops.riftco, name).default


def has_backward(name: str, device: str) -> bool:
    """Whether op `name` has a gradient on `device`: x_fwd has where x_bwd runs; rope's gradient is rope itself.

    `define` asserts it for every device before anything can be recorded, and both directions refuse a device they lack
    in `choose`, before a launcher allocates.
    """
    backward = name.removesuffix("_fwd") + "_bwd" if name.endswith("_fwd") else {"rope": "rope"}.get(name)
    return backward in TABLE and device in TABLE[name].launchers and device in TABLE[backward].launchers


def choose(name: str, device: str, dtype: torch.dtype = torch.float32) -> Choice:
    """Which launcher of op `name` serves `device` and `dtype`, and why: what a run has `pinned`, else its own."""
    if dtype != torch.float64 and (name, device) in _PINNED:
        return _PINNED[name, device][0]
    return own(name, device, dtype)


def own(name: str, device: str, dtype: torch.dtype = torch.float32) -> Choice:
    """`choose` outside of any run. Pure but for the RIFTCO_IMPL request."""
    return _own(TABLE[name], device, dtype == torch.float64, os.environ.get("RIFTCO_IMPL", ""))


@functools.cache  # a training step asks hundreds of times
def _own(op: Op, device: str, double: bool, asked: str) -> Choice:
    name = op.name
    if asked and asked not in IMPLS:
        raise ValueError(f"RIFTCO_IMPL={asked!r}; accepted: {', '.join(IMPLS)}")
    if asked == "spec":
        return Choice(op.spec, "RIFTCO_IMPL=spec asks for the spec")
    if double and device in ("cpu", "cuda"):
        return Choice(op.spec, "float64 runs through the spec")
    if asked and device == "cpu":
        source = IMPLS[asked]
        assert source is not None
        if source not in op.launchers:
            raise NotImplementedError(
                f"RIFTCO_IMPL={asked}: riftco::{name} has no {source} kernel; it has: {', '.join(op.launchers)}"
            )
        if asked == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError("RIFTCO_IMPL=triton on CPU tensors needs TRITON_INTERPRET=1 in the environment")
        return Choice(op.launchers[source], f"RIFTCO_IMPL={asked} sends CPU tensors through the {source} launcher")
    if device not in op.launchers:
        raise NotImplementedError(f"no {device} kernel for riftco::{name}; it has: {', '.join(op.launchers)}")
    path = op.launchers[device]
    why = "plain torch (the spec)" if path == op.spec else "its own launcher"
    if device == "mps" and name in metal.PLAIN:
        why = f"PyTorch's own operations: {metal.PLAIN[name]}"
    return Choice(path, f"{device}: {why}")


@contextlib.contextmanager
def pinned(name: str, choices: Mapping[str, Choice]) -> Iterator[None]:
    """Fix what `choose` says of op `name`, device type -> choice, for all threads until the with-block ends.

    Autograd runs backwards in threads of its own, so that a context variable would not reach them. Blocks may overlap
    where they agree; another path than the one that is fixed raises RuntimeError.
    """
    with _PINNING:
        for device, choice in choices.items():
            held, _ = _PINNED.get((name, device), (choice, 0))
            if held.path != choice.path:
                raise RuntimeError(
                    f"riftco::{name} on {device} is {held.path} ({held.why}); it cannot become {choice.path} now"
                )
        for device, choice in choices.items():
            held, holders = _PINNED.get((name, device), (choice, 0))
            _PINNED[name, device] = held, holders + 1
    try:
        yield
    finally:
        with _PINNING:
            for device in choices:
                held, holders = _PINNED.pop((name, device))
                if holders > 1:
                    _PINNED[name, device] = held, holders - 1


@functools.cache
def load(path: str) -> Callable:
    module, _, attr = path.partition(":")
    return getattr(importlib.import_module(module), attr)


def launcher(name: str, t: Tensor) -> Callable:
    """What serves op `name` for tensors like `t`: for the launchers of ops that contain another op."""
    return load(choose(name, t.device.type, t.dtype).path)


def meaning(name: str, t: Tensor) -> Callable:
    """The spec of op `name`, whatever `t` is: for the specs of ops that contain another op."""
    return load(TABLE[name].spec)


def _call(name: str, device: str, *args, **kwargs):
    launcher = load(choose(name, device, _dtype_of(args)).path)
    if device == "xla":
        launcher = tpu.functionalized(launcher)
    return launcher(*args, **kwargs)


def write(op: torch._ops.OpOverload, device: torch.device, *args):
    """Call an op that writes into its arguments, which are on `device`; what it returns.

    XLA's tensors are values, which no operator can write into: there the launcher runs above PyTorch's dispatcher.
    """
    if device.type == "xla":
        return load(choose(op._schema.name.removeprefix("riftco::"), "xla", _dtype_of(args)).path)(*args)
    return op(*args)


def run(op: torch._ops.OpOverload, device: str, *args, **kwargs):
    """What `op` does on `device`, below the dispatcher: for tools that look inside of it."""
    return _call(op._schema.name.removeprefix("riftco::"), device, *args, **kwargs)


def _dtype_of(args: tuple) -> torch.dtype:
    """float64 if any tensor argument is float64, else float32: all that choose() distinguishes."""
    double = torch.float64
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.dtype == double:
                return double
        elif isinstance(arg, (list, tuple)):
            for t in arg:
                if isinstance(t, Tensor) and t.dtype == double:
                    return double
    return torch.float32


@contextlib.contextmanager
def implementation(impl: str | None) -> Iterator[None]:
    """Set RIFTCO_IMPL inside a with-block; None leaves the choice to riftco."""
    before = os.environ.get("RIFTCO_IMPL")
    try:
        if impl is None:
            os.environ.pop("RIFTCO_IMPL", None)
        else:
            os.environ["RIFTCO_IMPL"] = impl
        yield
    finally:
        if before is None:
            os.environ.pop("RIFTCO_IMPL", None)
        else:
            os.environ["RIFTCO_IMPL"] = before


def explain(device: str | None = None, dtype: torch.dtype = torch.float32) -> list[dict[str, str]]:
    """For every op and device: which implementation runs, and why; or why there is none.

    Args:
        device: a device type ("cpu", "cuda", "mps", "xla"), or None for all.
        dtype: the floating dtype of the inputs.

    Returns:
        Rows with keys op, device, implementation, why. Where a device's launcher picks among kernels by shape, a row
        follows for each of some common shapes: the kernels that this machine's GPU would run, and why.

    Raises:
        ValueError: a device type or a dtype that no op has.
    """
    if device is not None and device not in KEYS:
        raise ValueError(f"explain: device must be one of {', '.join(KEYS)}, or None; got {device!r}")
    if dtype not in FLOATING:
        raise ValueError(f"explain: dtype must be float16, bfloat16, float32 or float64; got {dtype!r}")
    importlib.import_module("riftco.functional")  # defines every op
    rows = []
    for name in sorted(TABLE):
        for dev in (device,) if device else KEYS:
            try:
                choice = choose(name, dev, dtype)
                rows.append({"op": name, "device": dev, "implementation": choice.path, "why": choice.why})
                routes = TABLE[name].routes.get(dev) if choice.path == TABLE[name].launchers.get(dev) else None
                for case, route, why in load(routes)(dtype) if routes else ():
                    rows.append({"op": f"{name}, {case}", "device": dev, "implementation": route, "why": why})
            except (NotImplementedError, RuntimeError) as refused:
                rows.append({"op": name, "device": dev, "implementation": "-", "why": str(refused)})
    return rows


def needs_grad(*tensors: Tensor | None) -> bool:
    """True when autograd must record: otherwise the op is called directly, without an autograd.Function.

    Raises:
        NotImplementedError: a tensor has a tangent, which the op would silently drop.
    """
    dual = forward_ad._current_level >= 0 and not torch.compiler.is_compiling()
    if dual and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError("riftco: kernels have no forward-mode derivative; ask for impl='spec'")
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class Function(torch.autograd.Function):
    """torch's, which in every call binds the arguments to the signature of `forward`: here all come by position."""

    @classmethod
    def apply(cls, *args):
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]


def once_differentiable(backward: Callable) -> Callable:
    """For Function.backward: differentiating the gradient again is an error.

    torch's own decorator looks at the incoming gradients only, so that with create_graph=True the part of a second
    derivative that comes through the saved tensors would silently be missing.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if torch.compiler.is_compiling():
            return outputs
        if torch._C._functorch.peek_interpreter_stack() is not None:  # torch.func always records; once is allowed
            return outputs
        if not any(isinstance(t, Tensor) and t.requires_grad for t in (*grads, *ctx.saved_tensors)):
            return outputs
        many = isinstance(outputs, tuple)
        delayed = torch._C._functions.DelayedError(
            b"riftco: this op's backward is once_differentiable; ask for impl='spec' to differentiate it twice",
            len(outputs) if many else 1,
        )
        fresh: list = [t if t is None else t.detach().requires_grad_() for t in (outputs if many else (outputs,))]
        marked = delayed(*fresh)
        return marked if many else marked[0] if isinstance(marked, tuple) else marked

    return wrapper


def autocast(*tensors):
    """Cast as torch.autocast casts the arguments of a linear layer: floating ones, but for float64; others stay."""
    device = next((t.device.type for t in tensors if isinstance(t, Tensor)), "")
    if device not in KEYS or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if floating(t) and t.dtype != torch.float64 else t for t in tensors)


def checks_enabled() -> bool:
    """RIFTCO_CHECK=1 asks for checks of values, which cost a device synchronisation."""
    return os.environ.get("RIFTCO_CHECK") == "1"


def same_device(op: str, **tensors: Tensor | None) -> None:
    """Refuse tensors on different devices by name."""
    if len({t.device for t in tensors.values() if t is not None}) > 1:
        places = ", ".join(f"{n} on {t.device}" for n, t in tensors.items() if t is not None)
        raise ValueError(f"{op}: all tensors must be on one device; got {places}")
