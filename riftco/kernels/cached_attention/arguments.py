"""The arguments of one call, and what its kernels are launched with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import route

INTERPRETED_PROCESSORS = 4


@functools.cache
def of_device(device: torch.device) -> dict[str, int]:
    """Its processors, and the bytes of shared memory that a block may have."""
    if device.type != "cuda":
        return {"processors": INTERPRETED_PROCESSORS, "shared": 0}
    properties: Any = torch.cuda.get_device_properties(device)
    return {"processors": properties.multi_processor_count, "shared": properties.shared_memory_per_block_optin}


@dataclass(frozen=True)
class Inputs:
    """The op's arguments from q to longest, in the order of its schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor | None
    slots: Tensor
    positions: Tensor
    cu_q: Tensor | None
    cu_k: Tensor | None
    sinks: Tensor | None
    scale: float | None
    left: int | None
    softcap: float
    longest: int

    @property
    def runs(self) -> int:
        return len(self.slots)

    @property
    def K(self) -> int:
        return self.k.shape[1]

    @property
    def D(self) -> int:
        return self.q.shape[2]

    @property
    def PAD(self) -> int:
        return route.padded(self.D)

    @property
    def capacity(self) -> int:
        return self.k_cache.shape[1] * (1 if self.block_table is None else self.block_table.shape[1])

    @property
    def n_slots(self) -> int:
        return len(self.k_cache if self.block_table is None else self.block_table)

    @property
    def softmax_scale(self) -> float:
        return self.D**-0.5 if self.scale is None else self.scale

    def plan(self, kernel: str) -> route.Plan:
        return route.plan(
            kernel, self.q.dtype, self.D, rows=len(self.q), runs=self.runs, packed=self.cu_q is not None,
            longest=self.longest, K=self.K, G=self.q.shape[1] // self.K, prefix=self.capacity, left=self.left,
            quantized=self.k_scale is not None, **of_device(self.q.device),
        )  # fmt: skip

    def places(self) -> dict[str, Any]:
        """Where rows and keys are: what every kernel takes."""
        cu_q = None if self.cu_q is None else self.cu_q.contiguous()
        runs = max(self.runs, 1)
        return dict(
            slots_ptr=self.slots.contiguous(),
            positions_ptr=self.positions.contiguous(),
            cu_q_ptr=cu_q,
            cu_k_ptr=cu_q if self.cu_k is None else self.cu_k.contiguous(),
            total=len(self.q),
            total_k=len(self.k),
            n=self.runs,
            n_slots=self.n_slots,
            each=len(self.q) // runs,
            each_k=len(self.k) // runs,
            capacity=self.capacity,
        )

    def options(self) -> dict[str, Any]:
        return dict(
            left=0 if self.left is None else self.left,
            scale=self.softmax_scale,
            softcap=float(self.softcap),
            WINDOW=self.left is not None,
            CAPPED=self.softcap > 0,
            D=self.D,
            PAD=self.PAD,
        )

    def new_rows(self) -> dict[str, Any]:
        """q and the new keys, with their strides."""
        tensors = {"q": self.q, "k": self.k, "v": self.v}
        named: dict[str, Any] = {f"{name}_ptr": t for name, t in tensors.items()}
        for name, row in (("q", "t"), ("k", "s"), ("v", "s")):
            named |= dict(zip((f"stride_{name}{c}" for c in (row, "h", "d")), tensors[name].stride()))
        return named

    def arguments(self, plan: route.Plan) -> dict[str, Any]:
        """Of a kernel that walks prefix and new keys."""
        named: dict[str, Any] = {**self.places(), **self.options(), **self.new_rows()}
        table = self.block_table
        for short, rows, scale in (("k", self.k_cache, self.k_scale), ("v", self.v_cache, self.v_scale)):
            named |= {f"{short}c_ptr": rows, f"{short}s_ptr": scale}
            named |= dict(zip((f"stride_{short}c{c}" for c in "prh"), rows.stride()))
            named |= dict(zip((f"stride_{short}s{c}" for c in "prh"), (0, 0, 0) if scale is None else scale.stride()))
        return named | dict(
            table_ptr=table,
            stride_table=0 if table is None else table.stride(0),
            page_size=self.k_cache.shape[1],
            n_pages=len(self.k_cache),
            K=self.K,
            G=self.q.shape[1] // self.K,
            n_tiles=plan.n_tiles,
            pieces=plan.pieces,
            chunk=plan.chunk,
            M=plan.tile.M,
            N=plan.tile.N,
            PAGED=table is not None,
            QUANTIZED=self.k_scale is not None,
            num_warps=plan.tile.warps,
            num_stages=plan.tile.stages,
        )
