"""Keys and values already read, as plain tensors: one layer is [slots, W, K, D], or pages and a block table.

Quantised rows are GGUF's Q8_0: blocks of 32 values along D, a float16 scale max|x| / 127 and int8 codes, held as two
tensors so that each keeps its own alignment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._arguments import floating, given, indices, whole
from .._contract import define, same_device
from .._contract import write as write_into
from . import spec

HERE = "riftco.kernels.cached_attention"

STORED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "q8_0": torch.int8}


write = define(
    "cached_attention_write",
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor rows, Tensor k, "
    "Tensor v) -> ()",
    fake=lambda *_: None,
    spec=f"{HERE}.write:write",
    launchers={
        "cuda": f"{HERE}.cuda:write",
        "mps": f"{HERE}.write:write",
        "xla": "riftco.tpu.cached_attention:write",
    },
)


@dataclass(frozen=True)
class CacheLayer:
    """Keys and values of one layer, any strides but for the head dim.

    Attributes:
        k, v: [slots, W, K, D] or [n_pages, page, K, D], float32, float16, bfloat16 or, of q8_0, int8.
        k_scale, v_scale: float16 [.., D / 32] of q8_0, else None.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class Cache:
    """The layers of all slots.

    Attributes:
        layers: one a layer of the model.
        block_table: int32 [slots, max_pages], the pages of each slot; None where a slot is one piece.
        arrived: int32 [slots, K], 0 between calls: scratch of decode_with_cache on CUDA, which makes its own if None.
    """

    layers: tuple[CacheLayer, ...]
    block_table: Tensor | None = None
    arrived: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        n_layers: int,
        slots: int,
        window: int,
        K: int,
        D: int,
        *,
        dtype: str = "float16",
        page_size: int | None = None,
        n_pages: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Cache:
        """Room for `window` rows of each of `slots` slots; what it holds at first is undefined.

        Args:
            dtype: "float32", "float16", "bfloat16" or "q8_0" (D a multiple of 32).
            page_size: rows of a page; None for one piece a slot. The block table starts with the slots' pages in
                order; its owner may point it elsewhere.
            n_pages: pages in all, default what the slots need.

        Raises:
            ValueError: a dtype that is not one of these, D that q8_0 cannot hold, sizes below 1.
        """
        sizes = {"slots": slots, "window": window, "K": K, "D": D, "page_size": page_size, "n_pages": n_pages}
        for name, size in sizes.items():
            if size is not None or name in ("slots", "window", "K", "D"):
                whole("Cache", name, size, "at least 1", least=1)
        whole("Cache", "n_layers", n_layers, "at least 0", least=0)
        if dtype not in STORED:
            raise ValueError(f"Cache: dtype must be one of {', '.join(STORED)}; got {dtype!r}")
        if dtype == "q8_0" and D % spec.BLOCK:
            raise ValueError(
                f"Cache: q8_0 has blocks of {spec.BLOCK} along the head dim; got head dim {D}; float16 takes any"
            )
        table, shape = None, (slots, window)
        if page_size is not None:
            each = -(-window // page_size)
            need = slots * each
            shape = (need if n_pages is None else n_pages, page_size)
            table = (torch.arange(need, dtype=torch.int32, device=device) % shape[0]).view(slots, each)

        def rows(last: int, kind: torch.dtype) -> Tensor:
            return torch.empty((*shape, K, last), dtype=kind, device=device)

        layers = []
        for _ in range(n_layers):
            k, v = rows(D, STORED[dtype]), rows(D, STORED[dtype])
            scales = (rows(D // spec.BLOCK, torch.float16) for _ in range(2 if dtype == "q8_0" else 0))
            layers.append(CacheLayer(k, v, *scales))
        return cls(tuple(layers), table, torch.zeros((slots, K), dtype=torch.int32, device=device))

    @property
    def window(self) -> int:
        """Rows of a slot."""
        return self.layers[0].k.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def slots(self) -> int:
        return len(self.layers[0].k if self.block_table is None else self.block_table)

    @property
    def dtype(self) -> str:
        return next(name for name, kind in STORED.items() if kind == self.layers[0].k.dtype)

    def rows(self, slots: Tensor, positions: Tensor, total: int, cu_seqlens: Tensor | None = None) -> Tensor:
        """Physical rows [total] int64 of a packed set of runs, made once a batch for all layers.

        slots, positions, cu_seqlens as attention_with_cache has them. -1 for rows of no live run and for positions
        outside the window. No host synchronisation.
        """
        of = spec.rows_of(total, slots, cu_seqlens, self.slots)
        at = positions.long()[of.run] + of.local if len(slots) else of.run
        fits = of.live & (at >= 0) & (at < self.window)
        at = at.clamp(0, self.window - 1)
        slot = slots.long()[of.run].clamp(0, self.slots - 1) if len(slots) else of.run
        if self.block_table is None:
            row = slot * self.window + at
        else:
            page = self.layers[0].k.shape[1]
            row = self.block_table[slot, at // page].long() * page + at % page
        return row.where(fits, -1)

    def rows_of_tokens(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Physical rows [n] int64 of one token of each slot, in few launches, where `rows` has as many runs: slots
        [n] int64 of the cache, or -1, whose row is below 0 and never written; positions [n] int64 within the window."""
        if self.block_table is None:
            return torch.add(positions, slots, alpha=self.window)
        page = self.layers[0].k.shape[1]
        pages = self.block_table[slots.clamp(min=0), positions // page]
        return torch.add(positions % page, pages, alpha=page).where(slots >= 0, -1)

    def write(self, layer: int, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [total, K, D] at physical rows [total]; rows of -1 are left out. Not recorded by autograd.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit, each named.
        """
        to = self.layers[layer]
        _check_rows(to.k, rows, k, v)
        with torch.no_grad():
            write_into(write, rows.device, to.k, to.v, to.k_scale, to.v_scale, rows, k, v)

    def dequantized(self, layer: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """All rows of a layer by slot [slots, W, K, D], as a copy: for tests and inspection."""
        of = self.layers[layer]
        k, ks, v, vs = (spec.by_slot(t, self.block_table) for t in (of.k, of.k_scale, of.v, of.v_scale))
        assert k is not None and v is not None
        return spec.dequantized(k, ks, dtype), spec.dequantized(v, vs, dtype)


def _check_rows(cache: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
    if not (floating(k) and floating(v)):
        raise ValueError(f"Cache.write: k and v must be floating; got {given(k, v)}")
    if k.shape != v.shape or k.dim() != 3 or k.shape[1:] != cache.shape[2:]:
        raise ValueError(
            f"Cache.write: k and v must be [total, {', '.join(map(str, cache.shape[2:]))}]; "
            f"got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not indices(rows) or rows.shape != k.shape[:1]:
        raise ValueError(f"Cache.write: rows must be int32 or int64 [{len(k)}]; got {given(rows)}")
    same_device("Cache.write", cache=cache, rows=rows, k=k, v=v)
