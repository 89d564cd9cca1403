"""The contract of a decoding step of a layer: schema, shapes, devices. Torch-only; imports no kernel.

R runs of T // R rows each, H query heads, K key/value heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._arguments import flags, floating, given, indices
from .._contract import define, needs_grad, same_device, write
from . import compose
from .op import check, layer_of

if TYPE_CHECKING:
    from .cache import Cache

HERE = "riftco.kernels.cached_attention"

step = define(
    "cached_attention_decode",
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor(e!)? arrived, Tensor? block_table, Tensor slots, "
    "Tensor positions, Tensor rows, Tensor? sinks, bool interleaved, float? scale, int? left, float softcap) -> Tensor",
    fake=lambda q, *_: q.new_empty(q.shape),
    spec=f"{HERE}.compose:spec",
    launchers={
        "cpu": f"{HERE}.compose:decode",
        "cuda": f"{HERE}.decode_cuda:decode",
        "mps": "riftco.metal.cached_attention:decode",
        "xla": f"{HERE}.compose:decode",
    },
)


def decode_with_cache(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache: Cache,
    layer: int,
    slots: Tensor,
    positions: Tensor,
    rows: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """A layer's part of a decoding step: `rope` of q and k_new, `attention_with_cache` of both and v_new, and
    `Cache.write` of the turned k_new and of v_new, in this order; on CUDA in one launch. For serving: no gradient.

    Args:
        q: [T, H, D]; float16/bfloat16/float32/float64, any strides (head dim contiguous is fastest).
        k_new: [T, K, D], H % K == 0.
        v_new: [T, K, D].
        cache: a Cache of any dtype and layout.
        layer: which layer of it.
        slots: [R] int32 or int64, R dividing T: as attention_with_cache has them, no slot twice.
        positions: [R] int32 or int64: the position of each run's first new row, which is its prefix length.
        rows: [T] int32 or int64: where the new rows are stored, as Cache.rows makes them; -1: nowhere. A row that a
            run of this call sees may be replaced by a new one of the same run.
        cos: [T, P] float32, P pairs of the head dim that turn, 2 P <= D: `rope_tables`' row of each token's position,
            so cos[positions] with a row a run. None: q and k_new are turned already.
        sin: as cos.
        interleaved, scale, window, softcap, sinks: as rope and attention_with_cache have them.
        impl: "spec" runs the plain-torch meaning.

    Returns:
        out [T, H, D] in q's dtype.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named; a gradient that would be lost.

    Nothing waits for the host; fixed shapes can be captured in a CUDA graph. `cache.arrived` counts which programs of a
    slot have ended and is 0 again when the launch ends: two steps over one slot at the same time are an error anyway.
    Devices: cpu (the three ops' own), cuda (Triton; more than 64 rows times heads of a group in a run, or head dims
        that no tile has, in three launches), mps (the three ops' shaders), xla (composed).
    Numerics: as the three ops; the rotation is rounded to the inputs' dtype. No float atomics: equal between runs. A
        row's result depends on its own slot and on the window of a slot alone, bit for bit.
    """
    name = "decode_with_cache"
    flags(name, interleaved=interleaved)
    of = layer_of(name, cache, layer)
    held = (of.k, of.v, of.k_scale, of.v_scale, cache.block_table)
    check(name, q, k_new, v_new, held, slots, positions, None, None, scale, window, softcap, sinks, impl)
    _check(q, k_new, rows, slots, cos, sin)
    _check_arrived(cache.arrived, of.k if cache.block_table is None else cache.block_table, k_new)
    if needs_grad(q, k_new, v_new, sinks):
        raise ValueError(f"{name}: records no gradient; use torch.no_grad(), or rope and attention_with_cache")
    places = (cache.block_table, slots, positions, rows, sinks)
    args = (q, k_new, v_new, cos, sin, *held[:4], cache.arrived, *places, interleaved, scale, window[0], softcap)
    with torch.no_grad():
        return compose.spec(*args) if impl == "spec" else write(step, q.device, *args)


def _check(q, k, rows, slots, cos, sin) -> None:
    name = "decode_with_cache"
    if len(q) != len(k) or (len(q) and not len(slots)):
        raise ValueError(
            f"{name}: every run has as many rows of q as of k_new; got {len(q)} and {len(k)} of {len(slots)} runs"
        )
    if not indices(rows) or rows.shape != q.shape[:1]:
        raise ValueError(f"{name}: rows must be int32 or int64 [{len(q)}]; got {given(rows)}")
    if (cos is None) != (sin is None):
        raise ValueError(f"{name}: cos and sin come together; got {given(cos, sin)}")
    for at, table in (("cos", cos), ("sin", sin)):
        if table is None:
            continue
        if not floating(table) or table.dtype != torch.float32 or table.dim() != 2 or len(table) != len(q):
            raise ValueError(
                f"{name}: {at} must be float32 [{len(q)}, P], a row of rope_tables for each of q; got {given(table)}"
            )
        if table.shape != cos.shape or 2 * table.shape[1] > q.shape[2] or (table.shape[1] > 1 and table.stride(1) != 1):
            raise ValueError(
                f"{name}: cos and sin must be [{len(q)}, P] with 2 P <= {q.shape[2]}, rows contiguous; "
                f"got {tuple(cos.shape)} and {tuple(sin.shape)}"
            )
    same_device(name, q=q, rows=rows, cos=cos, sin=sin)


def _check_arrived(t: Tensor | None, by_slot: Tensor, k: Tensor) -> None:
    """Programs count themselves there, by slot and head: in a smaller one they would write foreign memory."""
    shape = len(by_slot), k.shape[1]
    if t is None:
        return
    if t.dtype != torch.int32 or t.shape != shape or not t.is_contiguous():
        raise ValueError(
            f"decode_with_cache: the cache's `arrived` must be int32 {list(shape)}, contiguous, or None; got {given(t)}"
        )
    same_device("decode_with_cache", k_new=k, arrived=t)
