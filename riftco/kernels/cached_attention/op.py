"""The contract of attention over a cache: schemas, shapes, devices, gradient. Torch-only; imports no kernel.

R runs, T query rows, S new keys, H query heads, K key/value heads, D head dim, W rows of a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._arguments import check_impl, flags, floating, given, indices, number, whole
from .._contract import Function, autocast, define, needs_grad, once_differentiable, same_device
from . import spec

if TYPE_CHECKING:
    from .cache import Cache, CacheLayer

HERE = "riftco.kernels.cached_attention"
CACHE = "Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale"
INPUTS = (
    f"Tensor q, Tensor k, Tensor v, {{}}{CACHE}, Tensor? block_table, Tensor slots, Tensor positions, Tensor? cu_q, "
    "Tensor? cu_k, Tensor? sinks, float? scale, int? left, float softcap, int longest"
)


def _fake_fwd(q, *_):
    acc = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=acc)


def _fake_bwd(d_out, d_lse, q, k, v, out, lse, *rest):
    sinks, needs = rest[9], rest[-4:]
    wanted = (*zip((q, k, v), needs), (lse if sinks is None else sinks, needs[3] and sinks is not None))
    return tuple(t.new_empty(t.shape if need else 0) for t, need in wanted)


fwd = define(
    "cached_attention_fwd",
    f"({INPUTS.format('')}) -> (Tensor out, Tensor lse)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={
        "cpu": f"{HERE}.cpu:forward",
        "cuda": f"{HERE}.cuda:forward",
        "mps": "riftco.metal.cached_attention:forward",
        "xla": "riftco.tpu.cached_attention:forward",
    },
)
bwd = define(
    "cached_attention_bwd",
    f"(Tensor d_out, Tensor? d_lse, {INPUTS.format('Tensor out, Tensor lse, ')}, bool need_q, bool need_k, "
    "bool need_v, bool need_sinks) -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_sinks)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={
        "cpu": f"{HERE}.cpu:backward",
        "cuda": f"{HERE}.cuda:backward",
        "mps": "riftco.metal.cached_attention:backward",
        "xla": "riftco.tpu.cached_attention:backward",
    },
)


class CachedAttention(Function):
    @staticmethod
    def forward(q, k, v, sinks, k_cache, v_cache, k_scale, v_scale, table, slots, positions, cu_q, cu_k, options):
        places = (k_cache, v_cache, k_scale, v_scale, table, slots, positions, cu_q, cu_k)
        return fwd(q, k, v, *places, sinks, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, sinks, *places, ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output, *places, sinks)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        need = ctx.needs_input_grad[:4]
        grads = bwd(d_out, d_lse, *ctx.saved_tensors, *ctx.options, *need)
        return *(g if n else None for g, n in zip(grads, need)), *(None,) * 10


def attention_with_cache(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache: Cache,
    layer: int,
    slots: Tensor,
    positions: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of new rows over what their slots hold in a cache, and over each other.

    The rows are a packed set of runs, one run a slot: decode rows, prefill chunks and a training chunk in one call.
    Run r has its new keys at positions[r], positions[r] + 1, ...; its last query row sits at its last new key. A row
    sees the cached rows of its slot below positions[r], a constant, and the run's new keys up to itself, read from
    k_new and v_new and not from the cache, so that gradients flow to them. The cache is read as it is stored and
    dequantised inside the kernel: no copy of it in another type exists, forward or backward.

    Args:
        q: [T, H, D]; float16/bfloat16/float32/float64, any strides (head dim contiguous is fastest). Differentiable.
        k_new: [S, K, D], H % K == 0. Differentiable. May hold more rows a run than q: earlier rows of the run whose
            gradients are wanted, at positions[r] on.
        v_new: [S, K, D]. Differentiable.
        cache: a Cache of any dtype and layout. Its rows below positions[r] must not change before the backward;
            others may (writing the run's own rows between forward and backward is fine).
        layer: which layer of it.
        slots: [R] int32 or int64: the slot of each run; -1 (or no slot of the cache) marks a run that is not there:
            its rows give exactly 0, output and gradients, whatever they hold.
        positions: [R] int32 or int64: the position of each run's first new key, which is its prefix length.
        cu_seqlens_q: [R + 1] int32 or int64, from 0: run r is the query rows cu[r] to cu[r + 1]. Rows from cu[-1] on
            give exactly 0. None: every run has T // R rows, as in decoding.
        cu_seqlens_k: the same for k_new and v_new; default cu_seqlens_q.
        max_seqlen_q: the longest run, where the host knows it: picks tiles, changes no meaning. On xla runs are padded
            to it, and rows of a longer one are NaN.
        scale: default D ** -0.5.
        window: (left, right) as flash-attn has it: a row at position p sees the positions >= p - left. Always causal,
            so right may be None or any number >= 0.
        softcap: > 0: scores become softcap * tanh(score / softcap).
        sinks: [H] float32 (float64 for float64): one more score a head, without value. Differentiable.
        return_lse: also return the log-sum-exp of each row's scores [H, T] float32, -inf where a row sees nothing.
            Differentiable.
        impl: "spec" runs the plain-torch meaning under autograd (double backward works).

    Returns:
        out [T, H, D] in q's dtype; with return_lse (out, lse).

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named.

    Slots, positions and bounds stay on the device: no host synchronisation, fixed shapes can be captured in a CUDA
    graph. Positions beyond the window and pages that are not there read other rows of the cache, never foreign memory.
    Under autocast q, k_new, v_new are cast to its dtype, as PyTorch does.
    Devices: cpu (blocked), cuda (Triton), mps (Metal), xla (composed of PyTorch's operations, a tile
        of keys at a time).
    Numerics: float32 accumulation and softmax; cached rows are rounded once to q's dtype, P and dS once to 16 bit; in
    float16 dO is brought into range by a power of two a run and head, undone exactly. No atomics: equal between runs.
    With one to eight rows a run a result does not depend on the other runs of the call, bit for bit.
    Source: Dao 2023, "FlashAttention-2"; Dao et al. 2023, "Flash-Decoding"; Milakov & Gimelshein 2018.
    """
    flags("attention_with_cache", return_lse=return_lse)
    q, k_new, v_new = autocast(q, k_new, v_new)
    if cu_seqlens_k is cu_seqlens_q:
        cu_seqlens_k = None  # launchers read None as cu_seqlens_q
    of = layer_of("attention_with_cache", cache, layer)
    # what a backward reads never changes, so other rows may be written before it runs: no shared version counter
    rows = tuple(None if t is None else t.data for t in (of.k, of.v, of.k_scale, of.v_scale, cache.block_table))
    options = (scale, window, softcap, sinks, impl)
    check("attention_with_cache", q, k_new, v_new, rows, slots, positions, cu_seqlens_q, cu_seqlens_k, *options)
    if max_seqlen_q is not None:
        whole("attention_with_cache", "max_seqlen_q", max_seqlen_q, "at least 0, or None", least=0)
    if max_seqlen_q is None or cu_seqlens_q is None:
        padded = cu_seqlens_q is not None and q.device.type == "xla"
        max_seqlen_q = q.shape[0] if padded else -(-q.shape[0] // max(len(slots), 1))
    places = (*rows, slots, positions, cu_seqlens_q, cu_seqlens_k)
    how = (scale, window[0], softcap, max_seqlen_q)
    args: tuple[Any, ...] = (q, k_new, v_new, *places, sinks, *how)
    if impl == "spec":
        out, lse = spec.forward(*args)
    elif needs_grad(q, k_new, v_new, sinks):
        out, lse = CachedAttention.apply(q, k_new, v_new, sinks, *places, how)
    else:
        out, lse = fwd(*args)
    return (out, lse) if return_lse else out


def layer_of(name: str, cache: Cache, layer: int) -> CacheLayer:
    """The cache's layer, or the refusal of what is none. name: the function that says so."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, (tuple, list)):
        raise ValueError(f"{name}: cache must be a riftco.functional.Cache; got {given(cache)}")
    count = len(layers)
    whole(name, "layer", layer, f"one of the cache's {count}", least=-count, most=count - 1)
    return layers[layer]


def check(name, q, k, v, rows, slots, positions, cu_q, cu_k, scale, window, softcap, sinks, impl) -> None:
    """Refuse what does not fit. name: the function that says so; rows: the layer's four tensors and the block table."""
    k_cache, v_cache, k_scale, v_scale, table = rows
    if not (floating(q) and floating(k) and floating(v)) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{name}: q, k_new, v_new must share a floating dtype; got {given(q, k, v)}")
    if not q.dim() == k.dim() == v.dim() == 3 or k.shape != v.shape or q.shape[2:] != k.shape[2:] or not q.shape[2]:
        raise ValueError(
            f"{name}: q must be [T, H, D], k_new and v_new [S, K, D]; got {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)}"
        )
    H, K = q.shape[1], k.shape[1]
    if K == 0 or H % K:
        raise ValueError(f"{name}: query heads must be a multiple of key heads; got {H} and {K}")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:]:
        raise ValueError(
            f"{name}: the cache must hold rows [{K}, {q.shape[2]}]; got {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    if not (floating(k_cache) or k_cache.dtype == torch.int8) or v_cache.dtype != k_cache.dtype:
        raise ValueError(f"{name}: the cache must be floating or int8 with scales; got {given(k_cache, v_cache)}")
    if table is not None and (not indices(table) or table.dim() != 2):
        raise ValueError(f"{name}: block_table must be int32 or int64 [slots, pages]; got {given(table)}")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError(f"{name}: the cache's head dim must be contiguous")
    if (k_cache.dtype == torch.int8) != (k_scale is not None) or (k_scale is None) != (v_scale is None):
        raise ValueError(f"{name}: an int8 cache has k_scale and v_scale, others have neither; got {k_cache.dtype}")
    for rows_at, of_rows in ((k_cache, k_scale), (v_cache, v_scale)):
        if of_rows is None:
            continue
        if rows_at.shape[3] % spec.BLOCK or of_rows.shape != (*rows_at.shape[:3], rows_at.shape[3] // spec.BLOCK):
            raise ValueError(
                f"{name}: a q8_0 cache {tuple(rows_at.shape)} has a scale for each {spec.BLOCK} values of D; "
                f"got scales {tuple(of_rows.shape)}"
            )
        if of_rows.stride(-1) != 1 or any(s % 4 for s in rows_at.stride()[:3]):
            raise ValueError(f"{name}: q8_0 rows must start at multiples of 4 bytes, their scales be contiguous")
    for at, t in (("slots", slots), ("positions", positions)):
        if not indices(t) or t.dim() != 1 or len(t) != len(slots):
            raise ValueError(f"{name}: {at} must be int32 or int64 [runs]; got {given(t)}")
    for at, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is not None and (not indices(cu) or cu.shape != (len(slots) + 1,)):
            raise ValueError(f"{name}: {at} must be int32 or int64 [{len(slots) + 1}]; got {given(cu)}")
    if cu_k is not None and cu_q is None:
        raise ValueError(f"{name}: cu_seqlens_k needs cu_seqlens_q")
    if cu_q is None and len(slots) and (q.shape[0] % len(slots) or k.shape[0] % len(slots)):
        raise ValueError(
            f"{name}: without cu_seqlens_q every run has as many rows; got {q.shape[0]} and {k.shape[0]} rows of "
            f"{len(slots)} runs"
        )
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"{name}: window must be (left, right), each None or >= 0; got {window!r}")
    for side in window:
        if side is not None:
            whole(name, "window", side, "(left, right), each None or >= 0", least=0)
    if scale is not None:
        number(name, "scale", scale, "finite, or None")
    number(name, "softcap", softcap, ">= 0 and finite", least=0)
    if sinks is not None:
        acc = torch.promote_types(q.dtype, torch.float32)
        if not floating(sinks) or sinks.shape != (H,) or sinks.dtype != acc:
            raise ValueError(f"{name}: sinks must be {str(acc)[6:]} [{H}]; got {given(sinks)}")
    check_impl(name, impl)
    same_device(
        name, q=q, k_new=k, v_new=v, cache=k_cache, block_table=table, slots=slots, positions=positions,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sinks=sinks,
    )  # fmt: skip
