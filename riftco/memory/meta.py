"""Traces a step on meta tensors as another device would run it: every buffer counts and none is allocated.

For a CPU the launchers themselves run, on meta tensors; what attention works on inside, a few MiB, is left out. For
CUDA, whose kernels need their device, stand-ins allocate what the launchers of the large products do; of every other
operator only the results count.
"""

from __future__ import annotations

import dataclasses
import importlib

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels import _contract, _frozen
from ..kernels.cross_entropy import op as cross_entropy
from ..kernels.gguf_linear.route import SCRATCH_BYTES as GGUF_SCRATCH
from ..kernels.linear_cross_entropy import cpu as cpu_head
from ..kernels.linear_cross_entropy import slices
from ..kernels.lora_linear.base import launcher, unpack
from ..kernels.lora_linear.route import route
from ..kernels.nf4.route import SCRATCH_BYTES as NF4_SCRATCH
from .trace import MemoryTrace

TARGETS = ("cpu", "cuda")
HERE = __name__
# Their launchers read values (lengths of documents, which ids there are) or call kernels that have no meta form: their
# results alone count.
RESULTS_ONLY = ("attention_fwd", "attention_bwd", "adam_step", "adam_paged_step", "embedding_bwd")
OF_HEAD = {
    "linear_cross_entropy_fwd": f"{HERE}:head_forward",
    "linear_cross_entropy_bwd": f"{HERE}:head_backward",
}
OF_CUDA = {
    "nf4_linear_fwd": f"{HERE}:nf4_forward",
    "nf4_linear_bwd": f"{HERE}:nf4_backward",
    "gguf_linear_fwd": f"{HERE}:gguf_forward",
    "gguf_linear_bwd": f"{HERE}:gguf_backward",
    "lora_linear_fwd": f"{HERE}:lora_forward",
    "lora_linear_bwd": f"{HERE}:lora_backward",
    "linear_cross_entropy_fwd": f"{HERE}:cuda_head_forward",
    "linear_cross_entropy_bwd": f"{HERE}:cuda_head_backward",
}


class MetaTrace(MemoryTrace):
    """A MemoryTrace of meta tensors that stand for those of `target`, "cpu" or "cuda"."""

    def __init__(self, target: str, *named):
        self.target = target
        self.is_late = False
        self._inside = 0  # of launchers, which ask for the target's memory
        super().__init__(*named)

    def __enter__(self):
        importlib.import_module("riftco.functional")  # defines every op
        launchers = _launchers(self.target)
        for path in launchers.values():
            _contract.load(path)  # before the trace: a module first imported in it would keep its tables on meta
        super().__enter__()
        for name, path in launchers.items():
            choice = _contract.Choice(path, f"stands for {self.target} on meta tensors")
            self._stack.enter_context(_contract.pinned(name, {"meta": choice}))
        return self

    def _counts(self, t: Tensor) -> bool:
        return t.is_meta and t.layout == torch.strided and type(t) in (Tensor, torch.nn.Parameter)

    def _opens(self, func) -> bool:
        return func._schema.name.removeprefix("riftco::") in _launchers(self.target)

    def _launched(self, func, device: str, args, kwargs):
        self._inside += 1
        try:
            return super()._launched(func, device, args, kwargs)
        finally:
            self._inside -= 1

    def _called(self, func, args, kwargs):
        if not self._inside:
            return func(*args, **kwargs)
        if "device" in [a.name for a in func._schema.arguments]:
            kwargs = {**kwargs, "device": torch.device("meta"), "pin_memory": False}
            names = {a.name for a in func._schema.arguments}
            kwargs = {name: value for name, value in kwargs.items() if name in names}
        if any(isinstance(t, Tensor) and t.is_meta for t in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_there, (args, kwargs))  # tables that lie on the CPU
        return func(*args, **kwargs)


def _there(value):
    lies_here = isinstance(value, Tensor) and not value.is_meta and value.dim() > 0
    return torch.empty_like(value, device="meta") if lies_here else value


def _launchers(target: str) -> dict[str, str]:
    """op -> what runs for it on meta tensors; ops that are missing give their results alone."""
    if target == "cuda":
        return OF_CUDA
    own = {name: op.launchers["cpu"] for name, op in _contract.TABLE.items() if name not in RESULTS_ONLY}
    return own | OF_HEAD


# ---- the sliced head: its own code, with kernels that give their results alone on CUDA


def _with_copy(fake):
    """A CPU's cross-entropy works on a float32 copy of 16-bit logits."""

    def losses(logits: Tensor, *rest):
        copy = logits.float()
        results = fake(logits, *rest)
        del copy
        return results

    return losses


CPU_HEAD = dataclasses.replace(
    cpu_head.LOSS,
    forward=_with_copy(cross_entropy._fake_fwd),
    forward_backward_=_with_copy(cross_entropy._fake_fwd_bwd_),
    host_counts=False,
)


def head_forward(*arguments):
    return slices.forward(CPU_HEAD, *arguments)


def head_backward(*arguments):
    return slices.backward(CPU_HEAD, *arguments)


def cuda_head_forward(*arguments):
    return slices.forward(CUDA_HEAD, *arguments)


def cuda_head_backward(*arguments):
    return slices.backward(CUDA_HEAD, *arguments)


# ---- products with frozen weights on CUDA: a scratch of the decoded weight lives as long as the call


def nf4_forward(x: Tensor, codes, absmax, bias: Tensor | None, N: int, K: int, block_size: int, onto=None) -> Tensor:
    return _frozen.forward(x, bias, N, K, NF4_SCRATCH, _rows_of(K), onto=onto)


def nf4_backward(d_y: Tensor, codes, absmax, N: int, K: int, block_size: int, onto=None) -> Tensor:
    return _frozen.backward(d_y, N, K, NF4_SCRATCH, _columns_of(N), onto=onto)


def gguf_forward(x: Tensor, packed, bias: Tensor | None, format: str, N: int, K: int, onto=None) -> Tensor:
    return _frozen.forward(x, bias, N, K, GGUF_SCRATCH, _rows_of(K), onto=onto)


def gguf_backward(d_y: Tensor, packed, format: str, N: int, K: int, onto=None) -> Tensor:
    return _frozen.backward(d_y, N, K, GGUF_SCRATCH, _columns_of(N), onto=onto)


def _rows_of(K: int) -> _frozen.Decode:
    return lambda lo, hi, room: room[: (hi - lo) * K].view(hi - lo, K)


def _columns_of(N: int) -> _frozen.Decode:
    return lambda lo, hi, room: room[: N * (hi - lo)].view(N, hi - lo)


CUDA_HEAD = slices.Loss(
    cross_entropy._fake_fwd,
    cross_entropy._fake_fwd_bwd_,
    cross_entropy._fake_bwd,
    temporaries=lambda p: 0,
    vocabulary_below=512,
)


# ---- adapters on CUDA: where base products come first, the members' gradients of x live until one launch sums them


def lora_forward(
    x: Tensor, kinds, weights, sizes, biases, lora_a: list[Tensor], lora_b, scales, seed, dropout_p, rows
) -> tuple[list[Tensor], Tensor]:
    bases, lines = unpack(kinds, weights, sizes), x.shape[:-1].numel()
    count = lines if rows is None else rows.numel()
    xa = lora_a[0].new_empty(count, sum(a.shape[0] for a in lora_a))
    if route(lines, rows is not None).name == "adapters first":
        ys = [x.new_empty(*x.shape[:-1], b.shape[0]) for b in lora_b]
        for base, y in zip(bases, ys, strict=True):
            base.forward(x, None, launcher, onto=y)
    else:
        ys = [base.forward(x, bias, launcher) for base, bias in zip(bases, biases, strict=True)]
    return ys, xa


def lora_backward(
    d_ys: list[Tensor], x, kinds, weights, sizes, lora_a, lora_b, xa, scales, seed, dropout_p, rows, need_x: bool,
    need_w: list[bool], need_a: bool, need_b: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
    bases, lines = unpack(kinds, weights, sizes), d_ys[0].shape[:-1].numel()
    d_x = d_ys[0].new_empty(0)
    if need_x and route(lines, rows is not None).name == "adapters first":
        d_x = d_ys[0].new_empty(*d_ys[0].shape[:-1], lora_a[0].shape[1])
        for base, t in zip(bases, d_ys, strict=True):
            base.backward(t, launcher, onto=d_x)
    elif need_x:
        parts = [base.backward(t, launcher) for base, t in zip(bases, d_ys, strict=True)]
        d_x = parts[0]
    d_ws = [t.new_empty(t.shape[-1], x.shape[-1]) if need else t.new_empty(0) for t, need in zip(d_ys, need_w)]
    total = need_a * sum(a.numel() for a in lora_a) + need_b * sum(b.numel() for b in lora_b)
    return d_x, d_ws, d_ys[0].new_empty(total, dtype=torch.float32)
