"""Rows on CPUs: PyTorch's kernels where they keep float32 sums in id order."""

import torch
from torch import Tensor

from . import spec


def backward(d_out: Tensor, ids: Tensor, rows: int, padding_idx: int | None, by_frequency: bool) -> Tensor:
    """As the spec. PyTorch's kernel sums each row in id order, but in the gradient's dtype and over a whole [V, C]:
    so 16-bit gradients are summed in float32 over the rows that occur."""
    at = -1 if padding_idx is None else padding_idx
    kernel = torch.ops.aten.embedding_dense_backward
    if d_out.dtype == torch.float32:
        return kernel(d_out.contiguous(), ids, rows, at, by_frequency)
    seen, places = torch.unique(ids, return_inverse=True)
    sums = kernel(d_out.float(), places, len(seen), -1, by_frequency)
    total = d_out.new_zeros(rows, d_out.shape[1])
    total[seen.long()] = sums.to(d_out.dtype)
    if padding_idx is not None:
        total[padding_idx] = 0
    return total


def scatter(x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    owner = spec.owners(ids, len(x))
    replaced = (owner >= 0).nonzero().squeeze(1)
    out = x.clone(memory_format=torch.contiguous_format)
    return out.index_copy_(0, replaced, rows.index_select(0, owner[replaced])), owner


def scatter_backward(d_out: Tensor, ids: Tensor, owner: Tensor, need_x: bool, need_rows: bool) -> tuple[Tensor, Tensor]:
    d_x = d_rows = d_out.new_empty(0)
    if need_x:
        d_x = d_out.clone(memory_format=torch.contiguous_format)
        d_x.index_fill_(0, (owner >= 0).nonzero().squeeze(1), 0)
    if need_rows:
        d_rows = d_out.index_select(0, ids)
        last = owner.index_select(0, ids) == torch.arange(len(ids))
        d_rows.index_fill_(0, (~last).nonzero().squeeze(1), 0)
    return d_x, d_rows
