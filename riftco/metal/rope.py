"""Launches csrc/metal/rope.metal; the contract is riftco/kernels/rope/op.py."""

import torch
from torch import Tensor

from ..kernels._launch import as_batch
from . import launch


def forward(
    x: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, transpose: bool
) -> list[Tensor]:
    out = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in x]
    _turn(out, x, cos, sin, positions, interleaved, transpose)
    return out


def inplace(x: list[Tensor], cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool) -> None:
    _turn(x, x, cos, sin, positions, interleaved, False)


def _turn(out: list[Tensor], x: list[Tensor], cos, sin, positions, interleaved: bool, transpose: bool) -> None:
    """One launch for one or two tensors; two where q and k differ in dtype."""
    if x[0].shape[:-2].numel() == 0 or (len(x) == 1 and x[0].numel() == 0):
        return
    if len(x) == 2 and x[0].dtype != x[1].dtype:
        for o, t in zip(out, x):
            _turn([o], [t], cos, sin, positions, interleaved, transpose)
        return
    sides = [(as_batch(o), as_batch(t)) for o, t in zip((out[0], out[-1]), (x[0], x[-1]))]
    (q_out, q), (k_out, k) = sides
    B, T = q.shape[:2]
    if positions is not None:
        positions = positions.reshape(B, T)
    heads = [(*t.stride(), *o.stride(), *t.shape[2:]) for o, t in sides]
    work = max(h * d for h, d in (t.shape[2:] for _, t in sides))
    launch(
        "rope", "rope", [q.dtype, torch.int64 if positions is None else positions.dtype],
        [q_out, k_out], [q, k, cos, sin, positions],
        [*heads[0], *heads[1], *cos.stride(), *sin.stride(), *((0, 0) if positions is None else positions.stride()),
         B * T, T, cos.shape[0], cos.shape[1], positions is not None, len(x) == 2, interleaved, transpose],
        groups=B * T, threads=max(work // 2, 1),
    )  # fmt: skip
