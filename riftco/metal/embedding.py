"""Launches csrc/metal/embedding.metal; the contract is riftco/kernels/embedding/op.py."""

import torch
from torch import Tensor

from . import launch


def forward(weight: Tensor, ids: Tensor) -> Tensor:
    out = weight.new_empty(*ids.shape, weight.shape[1])
    _launch("gather", out, [weight, ids.reshape(-1).long().contiguous()], rows=weight.shape[0])
    return out


def backward(d_out: Tensor, ids: Tensor, rows: int, padding_idx: int | None, by_frequency: bool) -> Tensor:
    out = d_out.new_empty(rows, d_out.shape[1])
    if len(ids) == 0:
        return out.zero_()
    padding = -1 if padding_idx is None else padding_idx
    _launch("sum", out, [d_out, *_places(ids, rows)], rows=rows, padding=padding, by_frequency=by_frequency)
    return out


def scatter(x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape)
    owner = torch.full((len(x),), -1, dtype=torch.int64, device=x.device)
    if len(ids):
        order, first = _places(ids, len(x))
        owner = torch.where(first[1:] > first[:-1], order[(first[1:] - 1).clamp(min=0)], owner)
    _launch("scatter", out, [x, rows, owner], rows=len(x), other=rows)
    return out, owner


def scatter_backward(d_out: Tensor, ids: Tensor, owner: Tensor, need_x: bool, need_rows: bool) -> tuple[Tensor, Tensor]:
    d_x = d_out.new_empty(d_out.shape if need_x else 0)
    d_rows = d_out.new_empty((len(ids), d_out.shape[1]) if need_rows else 0)
    if need_x:
        _launch("kept", d_x, [d_out, owner], rows=len(d_out))
    if need_rows:
        _launch("owned", d_rows, [d_out, ids.long().contiguous(), owner], rows=len(d_out))
    return d_x, d_rows


def _places(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(the ids' places ordered by id and then by place, where each row's places start there, [rows + 1]).

    Every key is different, so that any sort gives this order. Ids outside fall before or behind all rows.
    """
    n = len(ids)
    keys = ids.long() * n + torch.arange(n, device=ids.device)
    ordered, order = torch.sort(keys)
    return order, torch.searchsorted(ordered, torch.arange(rows + 1, device=ids.device) * n)


def _launch(
    kernel: str, out: Tensor, inputs: list[Tensor], *, rows: int, other: Tensor | None = None,
    padding: int = -1, by_frequency: bool = False,
) -> None:  # fmt: skip
    if out.numel() == 0:
        return
    C = out.shape[-1]
    count = out.numel() // C
    strides = (0, 0) if other is None else other.stride()
    launch(
        "embedding", f"embedding_{kernel}", [out.dtype], [out], inputs,
        [count, C, rows, *inputs[0].stride(), *strides, padding, by_frequency], groups=count, threads=C,
    )  # fmt: skip
