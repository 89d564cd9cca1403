"""Rows of keys that lie in slots or pages, as the twins of other libraries take them. Torch-only."""

import torch
from torch import Tensor

from .._arguments import floating, given, indices, whole


def packed_rows(
    key: Tensor, value: Tensor, starts: Tensor | None, lens: Tensor, block_table: Tensor | None, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The first lens[n] rows of each document n, one document after another.

    key, value [rows, K, D] with document n from starts[n] on; or, with block_table [N, pages a document], pages
    [pages, P, K, D]. Returns key, value [total, K, D] and cu [N + 1]; total is a bound that needs no synchronisation,
    and what rows beyond cu[-1] hold is without meaning. Differentiable.
    """
    if not indices(lens) or lens.dim() != 1:
        raise ValueError(f"attention: lengths of keys must be int32 or int64 [N]; got {given(lens)}")
    if starts is not None and not indices(starts):
        raise ValueError(f"attention: cu_seqlens_k must be int32 or int64 [documents + 1]; got {given(starts)}")
    N = len(lens)
    if not floating(key) or not floating(value):
        raise ValueError(f"attention: keys and values must be floating; got {given(key, value)}")
    if block_table is not None and (
        not indices(block_table) or block_table.dim() != 2 or len(block_table) != N or key.dim() != 4
    ):
        raise ValueError(
            f"attention: block_table must be int32 or int64 [{N}, pages] with keys [pages, rows, K, D]; got "
            f"{given(block_table, key)}"
        )
    whole("attention", "the most keys of a document", longest, "at least 0", least=0)
    cu = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(lens.dtype)
    total = N * longest if block_table is not None else min(N * longest, len(key))
    row = torch.arange(total if len(key) else 0, device=key.device, dtype=cu.dtype)
    document = (torch.searchsorted(cu, row, right=True) - 1).clamp(max=N - 1)
    place = row - cu[document]
    if block_table is None:
        assert starts is not None
        index = (starts[document] + place).clamp(0, len(key) - 1)
        return key[index], value[index], cu
    P = key.shape[1]
    page = page_of(block_table, document, place // P).clamp(0, len(key) - 1)
    return key[page, place % P], value[page, place % P], cu


def page_of(block_table: Tensor, document: Tensor, nth: Tensor) -> Tensor:
    """Where the nth page of a document lies, int64. Any nth beyond the table reads its last column."""
    return block_table[document, nth.clamp(0, block_table.shape[1] - 1)].long()
