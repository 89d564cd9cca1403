"""What taking and replacing rows means, in plain torch. V rows of C values; n ids."""

import torch
from torch import Tensor


def forward(weight: Tensor, ids: Tensor) -> Tensor:
    """Row ids[...] of weight [V, C] -> [..., C]."""
    return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])


def backward(d_out: Tensor, ids: Tensor, rows: int, padding_idx: int | None, by_frequency: bool) -> Tensor:
    """d_weight [V, C]: each row is the sum of d_out [n, C] where its id stands, in that order, in float32.

    The row padding_idx gets 0. by_frequency divides a row by how often its id occurs.
    """
    acc = torch.promote_types(d_out.dtype, torch.float32)
    total = torch.zeros(rows, d_out.shape[1], dtype=acc, device=d_out.device)
    total = total.index_add(0, ids, d_out.to(acc))
    if by_frequency:
        count = torch.zeros(rows, dtype=acc, device=d_out.device)
        count = count.index_add(0, ids, torch.ones_like(ids, dtype=acc))
        total = total / count.clamp(min=1).unsqueeze(1)
    if padding_idx is not None:
        others = torch.arange(rows, device=d_out.device) != padding_idx
        total = torch.where(others.unsqueeze(1), total, 0)
    return total.to(d_out.dtype)


def owners(ids: Tensor, rows: int) -> Tensor:
    """int64 [V]: which of the ids replaces each row, the last one where several do; -1: none."""
    order = torch.arange(len(ids), device=ids.device)
    none = torch.full((rows,), -1, dtype=torch.int64, device=ids.device)
    return none.scatter_reduce(0, ids.long(), order, "amax")


def scatter(x: Tensor, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(x [V, C] with row ids[i] replaced by rows[i] [n, C], owners)."""
    owner = owners(ids, len(x))
    if not len(rows):
        return x.clone(memory_format=torch.contiguous_format), owner
    return torch.where((owner >= 0).unsqueeze(1), rows.index_select(0, owner.clamp(min=0)), x), owner


def scatter_backward(d_out: Tensor, ids: Tensor, owner: Tensor, need_x: bool, need_rows: bool) -> tuple[Tensor, Tensor]:
    """d_x is d_out but 0 at replaced rows; d_rows[i] is d_out's row ids[i], 0 where a later one replaced it."""
    none = d_out.new_empty(0)
    d_x = torch.where((owner < 0).unsqueeze(1), d_out, 0) if need_x else none
    if not need_rows:
        return d_x, none
    last = owner.index_select(0, ids) == torch.arange(len(ids), device=ids.device)
    return d_x, torch.where(last.unsqueeze(1), d_out.index_select(0, ids), 0)
