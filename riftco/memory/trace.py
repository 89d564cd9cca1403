"""Follows every storage from its birth to its death, on torch's own hooks.

A dispatch mode sees what each operator returns, those inside of riftco's ops too; module hooks say which module runs;
saved-tensor hooks say what a line of code keeps for the backward; weak references say when a storage dies. What a
kernel of PyTorch itself takes and gives back inside is not seen.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..kernels import _contract
from ..models.held import held_beside_parameters, tensors_in
from .report import KINDS, MemoryReport, Row, general

HERE = str(pathlib.Path(__file__).parent)
PACKAGE = pathlib.Path(__file__).parent.parent
TORCH = str(pathlib.Path(torch.__file__).parent)
ENGINE = "_engine_run_backward"  # below it, a frame belongs to what called the backward
SOURCES = 6  # named of each tensor


@dataclass(eq=False)
class Storage:
    """One storage's life; times count births and deaths."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    op: str
    module: str
    where: str
    sources: tuple[str, ...]
    born: int
    died: int | None = None
    labels: dict[str, str] = field(default_factory=dict)  # owner for the whole life -> kind
    saves: list[list[Any]] = field(default_factory=list)  # [line of code, from, until or None]
    reference: weakref.ref | None = None

    def alive(self, at: int) -> bool:
        return self.born <= at and (self.died is None or self.died > at)

    def saved(self, at: int) -> list[str]:
        return list(dict.fromkeys(line for line, start, end in self.saves if start <= at and (end is None or end > at)))


class _Saved:
    """What the graph holds in a saved tensor's place; it dies with the node."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()  # a node that saves what it returns would hold itself through it


class _Operators(TorchDispatchMode):
    def __init__(self, trace: MemoryTrace):
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        sources = [self.trace._find(t) for t in tensors]
        if func.namespace == "riftco" and tensors and self.trace._opens(func):
            with self:  # the op's launcher runs below: its own buffers are seen
                out = self.trace._launched(func, tensors[0].device.type, args, kwargs)
        else:
            out = self.trace._called(func, args, kwargs)
        self.trace._born(func, out, [s for s in sources if s is not None])
        return out


class MemoryTrace:
    """Traces everything inside a with-block, in this thread and in the backwards that it starts.

    Args:
        model: its parameters, buffers and frozen weights are named.
        optimizer: its state is named.
        inputs: name -> tensor, what the step reads.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Mapping[str, Tensor] | None = None,
    ):
        self.model, self.optimizer = model, optimizer
        self.storages: list[Storage] = []
        self.known: dict[int, Storage] = {}
        self.clock = 0
        self.bytes = 0
        self.peaks: dict[str, tuple[int, int]] = {"step": (0, 0)}  # phase -> most bytes, and when
        self._phase = "step"
        self._modules: list[str] = []
        self._names = {id(m): name for name, m in model.named_modules()} if model is not None else {}
        self._stack = contextlib.ExitStack()
        for name, tensor in (inputs or {}).items():
            self._label(tensor, name, "input")
        self._label_model()

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        enter = torch.nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        leave = torch.nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True)
        self._stack.callback(enter.remove)
        self._stack.callback(leave.remove)
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(self, *error):
        self._stack.close()
        self._label_model()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of the step."""
        before, self._phase = self._phase, name
        self._look()
        try:
            yield
        finally:
            self._phase = before
            self._label_model()

    @property
    def peak(self) -> int:
        return max(nbytes for nbytes, _ in self.peaks.values())

    def report(self, top: int = 20, allocator_bytes: int | None = None, *, phase: str | None = None) -> MemoryReport:
        """What is alive at the peak: of the whole trace, or of one phase."""
        phase = phase or max(self.peaks, key=lambda name: self.peaks[name][0])
        peak, at = self.peaks[phase]
        alive = sorted(self.alive(phase), key=lambda s: -s.nbytes)
        leaves = [s for s in alive if s.op == "leaf"]
        kinds = dict.fromkeys(KINDS, 0)
        saved: dict[str, int] = {}
        for s in alive:
            kinds[_kind(s, at)] += s.nbytes
            for line in s.saved(at) if s.op != "leaf" else ():
                saved[line] = saved.get(line, 0) + s.nbytes
        return MemoryReport(
            peak_bytes=peak,
            phase=phase,
            count=len(alive),
            kinds={k: n for k, n in kinds.items() if n},
            tensors=tuple(_row(s, at) for s in alive[:top]),
            leaves=tuple(_row(s, at) for s in leaves[:top]),
            leaf_bytes=sum(s.nbytes for s in leaves),
            leaf_count=len(leaves),
            saved=dict(sorted(saved.items(), key=lambda item: -item[1])),
            allocator_bytes=allocator_bytes,
        )

    def alive(self, phase: str) -> list[Storage]:
        """What is alive at the peak of a phase."""
        return [s for s in self.storages if s.alive(self.peaks[phase][1])]

    # ---- how operators run

    def _called(self, func, args, kwargs):
        return func(*args, **kwargs)

    def _opens(self, func) -> bool:
        """Whether to look inside of one of riftco's own operators."""
        return True

    def _launched(self, func, device: str, args, kwargs):
        """One of riftco's own operators, below the dispatcher."""
        return _contract.run(func, device, *args, **kwargs)

    def _counts(self, t: Tensor) -> bool:
        """Whether the tensor has a storage to account for."""
        return t.layout == torch.strided and t.device.type != "meta" and type(t) in (Tensor, torch.nn.Parameter)

    # ---- what torch tells

    def _born(self, func, out, sources: list[Storage]) -> None:
        for t in tree_leaves(out):
            if not isinstance(t, Tensor) or not self._counts(t) or t.untyped_storage()._cdata in self.known:
                continue
            node = torch._C._current_autograd_node()
            op = str(func).removesuffix(".default")
            module = self._modules[-1] if self._modules else ""
            if node is not None:
                op = f"{op} in {node.name()}"
                module = module or _module_of(sources)
            self._add(t, op, module, place(), tuple(dict.fromkeys(map(_described, sources)))[:SOURCES])

    def _enter_module(self, module, args) -> None:
        self._modules.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module, args, output) -> None:
        self._modules.pop()

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        storage = self._find(tensor)
        if storage is not None:
            module = self._modules[-1] if self._modules else ""
            line = (place() or "code without a file") + (f" @ {general(module)}" if module else "")
            self.clock += 1
            entry = [line, self.clock, None]
            storage.saves.append(entry)
            weakref.finalize(saved, self._dropped, entry).atexit = False
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        return saved.tensor

    def _dropped(self, entry: list[Any]) -> None:
        self.clock += 1
        entry[2] = self.clock

    # ---- the books

    def _find(self, t: Tensor) -> Storage | None:
        """The tensor's storage; one that was not seen before existed before the trace."""
        if not self._counts(t):
            return None
        found = self.known.get(t.untyped_storage()._cdata)
        return found or self._add(t, "leaf", "", "", ())

    def _add(self, t: Tensor, op: str, module: str, where: str, sources: tuple[str, ...]) -> Storage:
        storage = t.untyped_storage()
        self.clock += 1
        born = 0 if op == "leaf" else self.clock
        nbytes = storage.nbytes()
        record = Storage(nbytes, tuple(t.shape), str(t.dtype)[6:], str(t.device), op, module, where, sources, born)
        key = storage._cdata
        record.reference = weakref.ref(storage, lambda _: self._died(key, record))
        self.known[key] = record
        self.storages.append(record)
        self.bytes += nbytes
        if op == "leaf":  # it was there at every peak, too
            self.peaks = {name: (most + nbytes, at) for name, (most, at) in self.peaks.items()}
        self._look()
        return record

    def _look(self) -> None:
        if self.bytes > self.peaks.get(self._phase, (-1, 0))[0]:
            self.peaks[self._phase] = self.bytes, self.clock

    def _died(self, key: int, record: Storage) -> None:
        self.clock += 1
        record.died = self.clock
        self.bytes -= record.nbytes
        if self.known.get(key) is record:
            del self.known[key]

    def _label(self, t: Tensor, owner: str, kind: str) -> None:
        storage = self._find(t)
        if storage is not None:
            storage.labels.setdefault(owner, kind)

    def _label_model(self) -> None:
        """Name what model and optimizer hold now."""
        if self.model is not None:
            for name, p in self.model.named_parameters(remove_duplicate=False):
                self._label(p, name, "parameter" if p.requires_grad else "frozen weight")
                if p.grad is not None:
                    self._label(p.grad, f"gradient of {name}", "gradient")
            for name, module in self.model.named_modules():
                for attribute, tensors in held_beside_parameters(module).items():
                    for t in tensors:
                        self._label(t, f"{name}.{attribute}".lstrip("."), "frozen weight")
        if self.optimizer is not None:
            for t in tensors_in([*self.optimizer.state.values(), *vars(self.optimizer).get("pools", {}).values()]):
                self._label(t, "optimizer", "optimizer state")


def place() -> str:
    """The innermost line of code outside of torch and of this tracer; "" where autograd's engine called."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(TORCH):
            if frame.f_code.co_name == ENGINE:
                return ""
        elif not file.startswith((HERE, "<")) and not file.endswith("_contract.py"):
            path = pathlib.Path(file)
            name = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path.name
            return f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _kind(s: Storage, at: int) -> str:
    kinds = {*s.labels.values(), *(["saved for backward"] if s.saved(at) else [])}
    return next((k for k in KINDS if k in kinds), "other")


def _described(s: Storage) -> str:
    if s.labels:
        return next(iter(s.labels))
    return s.op + (f" @ {s.module}" if s.module else "")


def _module_of(sources: list[Storage]) -> str:
    """The module whose backward this is: that of what it saved, or of a weight, before that of an incoming gradient."""
    for s in sorted(sources, key=lambda s: " in " in s.op):
        if s.module or s.labels:
            return s.module or next(iter(s.labels)).rpartition(".")[0]
    return ""


def _row(s: Storage, at: int) -> Row:
    owners = (*s.labels, *(f"saved at {line}" for line in s.saved(at)))
    return Row(s.nbytes, s.shape, s.dtype, s.device, _kind(s, at), s.op, s.module, s.where, owners, s.sources)
