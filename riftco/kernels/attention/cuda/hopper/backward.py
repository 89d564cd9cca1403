"""The Hopper backward: which tile a program works on, and the launches (see backward_walk.py and preprocess.py)."""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...._launch import cdiv, on
from ...spec import softmax_scale
from . import descriptors, preprocess, schedule
from .backward_tiles import FIELDS, RING, Form, Shared, producer
from .backward_walk import consumer
from .backward_wide import rows_gradient

KEYS = 128
ROWS = 64  # query rows of a step
SIDE_BY_SIDE = 128  # tiles of keys at work at once: whole heads of them, which read the same rows of q from L2
LOG2E = 1.4426950408889634
FAR = 1 << 30  # a window that reaches over everything
INTS = (
    "T", "S", "key_start", "B", "H", "K", "docs", "n_tiles", "head_tiles", "group", "right", "left",
    "k_step", "v_step", "spare",
)  # fmt: skip
_KEYS = gl.constexpr(KEYS)


@gluon.jit
def _allocate(k_desc, v_desc, q_desc, do_desc, stats_desc, F):
    dt: gl.constexpr = q_desc.dtype
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    S: gl.constexpr = F.STAGES
    N: gl.constexpr = F.DS
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_KEYS, F.M], dt)
    sh = Shared(
        gl.allocate_shared_memory(dt, [2] + k_desc.block_type.shape, k_desc.layout),
        gl.allocate_shared_memory(dt, [2] + v_desc.block_type.shape, v_desc.layout),
        gl.allocate_shared_memory(dt, [S] + q_desc.block_type.shape, q_desc.layout),
        gl.allocate_shared_memory(dt, [S] + do_desc.block_type.shape, do_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2 * S] + stats_desc.block_type.shape, stats_desc.layout),
        gl.allocate_shared_memory(dt, [N, _KEYS, F.M], ds_layout),
        gl.allocate_shared_memory(gl.int32, [RING * FIELDS, 1], ring_layout),
        gl.allocate_shared_memory(gl.int64, [RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [RING, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [S, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [S, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [S, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [N, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [N, 1], barrier),
    )
    for i in gl.static_range(RING):
        mbarrier.init(sh.ring_full.index(i), count=1)
        mbarrier.init(sh.ring_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(sh.kv_full.index(i), count=1)
        mbarrier.init(sh.kv_empty.index(i), count=2)
    for i in gl.static_range(S):
        mbarrier.init(sh.q_full.index(i), count=1)
        mbarrier.init(sh.do_full.index(i), count=1)
        mbarrier.init(sh.empty.index(i), count=2)
    for i in gl.static_range(N):
        mbarrier.init(sh.ds_full.index(i), count=2)
        mbarrier.init(sh.ds_empty.index(i), count=2)
    fence_async_shared()
    return sh


@gluon.jit(do_not_specialize=INTS)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, stats_desc, acc_ptr, counter_ptr, top_ptr,
    table_ptr, cu_k_ptr, k_lens_ptr, T, S, key_start, B, H, K, docs, n_tiles, head_tiles, k_step, v_step,
    spare, group, softmax_scale, scale, softcap, right, left, M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    RIGHT: gl.constexpr, LEFT: gl.constexpr, SOFTCAP: gl.constexpr, SCALED: gl.constexpr,
    NEED_Q: gl.constexpr, NEED_K: gl.constexpr, NEED_V: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dK and dV of tiles of KEYS keys of one key head, and their share of dQ."""
    F = Form(M, D, STAGES, 2 if NEED_Q else 1, RIGHT, LEFT, SOFTCAP, SCALED, NEED_Q, NEED_K, NEED_V)
    sh = _allocate(k_desc, v_desc, q_desc, do_desc, stats_desc, F)
    gl.warp_specialize(
        [
            (producer, (
                q_desc, k_desc, v_desc, do_desc, stats_desc, sh, table_ptr, cu_k_ptr, k_lens_ptr, counter_ptr, T, S,
                key_start, B, H, K, docs, n_tiles, head_tiles, k_step, v_step, spare, group, right, left, F)),
            (consumer, (
                0, dk_desc, dv_desc, acc_ptr, top_ptr, sh, H // K, head_tiles, spare, softmax_scale, scale, softcap,
                right, left, F)),
            (consumer, (
                1, dk_desc, dv_desc, acc_ptr, top_ptr, sh, H // K, head_tiles, spare, softmax_scale, scale, softcap,
                right, left, F)),
        ],
        [4, 4],
        [240, 240],
    )  # fmt: skip


@functools.cache
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_q, d_k, d_v, d_bias, d_sinks, delta, exponent); the gradient of sinks follows from delta and lse.

    One walk makes all gradients, with dQ summed in no fixed order. Where that order matters, or dK and dV are not
    wanted for all keys, dQ has a kernel of its own.
    """
    if bias is not None or seed is not None:
        raise ValueError("the Hopper backward does not serve a bias or dropout")
    T, H, D = q.shape[-3:]
    S, K = k.shape[-3:-1]
    lead, none = q.shape[:-3], q.new_empty(0)
    d_q = q.new_empty((*lead, T, H, D) if need_q else 0)
    d_k, d_v = (k.new_empty((*lead, S - kv_grad_start, K, D) if need else 0) for need in (need_k, need_v))
    if cu_q is not None:
        cu_q = cu_q.contiguous()
        cu_k = cu_q if cu_k is None else cu_k.contiguous()
    docs = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if q.numel() == 0 or k.numel() == 0 or docs == 0:
        delta = torch.zeros((*lead, H, T), dtype=torch.float32, device=q.device)
        exponent = torch.zeros((docs, H) if q.dtype == torch.float16 else 0, dtype=torch.int32, device=q.device)
        return d_q.zero_(), d_k.zero_(), d_v.zero_(), none, none, delta, exponent
    if d_out.stride(-1) != 1 or descriptors.why_not(d_out):
        d_out = d_out.contiguous()  # a broadcast gradient, as sum() sends back: TMA needs rows
    scale, lse = softmax_scale(q, scale), lse.contiguous()
    keys = (need_k or need_v) and kv_grad_start < S
    one_walk = need_q and keys and not deterministic and kv_grad_start == 0
    with on(q):
        rows = preprocess.prepare(d_out, d_lse, out, lse, cu_q, ROWS, one_walk)
        if keys:
            _walk(
                rows, q, k, v, d_out, d_k, d_v, cu_q, cu_k, k_lens, scale, left, right, softcap, kv_grad_start,
                one_walk, need_k, need_v,
            )  # fmt: skip
        if one_walk:
            preprocess.convert(rows, d_q, cu_q, scale)
        elif need_q:
            rows_gradient(q, k, v, d_out, d_q, lse, rows, cu_q, cu_k, k_lens, scale, left, right, softcap)
    return d_q, d_k, d_v, none, none, rows.delta, rows.exponent


def together(keys: int) -> int:
    """Key heads whose tiles are worked on together, of sequences of so many keys, one by one or packed."""
    return max(1, SIDE_BY_SIDE // max(cdiv(keys, KEYS), 1))


def _walk(
    rows, q, k, v, d_out, d_k, d_v, cu_q, cu_k, k_lens, scale, left, right, softcap, start, need_q, need_k,
    need_v,
) -> None:  # fmt: skip
    """dK and dV of the keys from `start` on (packed: of those packed rows), and dQ into the scratch."""
    T, H, D = q.shape[-3:]
    S, K = k.shape[-3:-1]
    B = 1 if cu_q is not None else q.shape[0]
    table = None
    n_tiles, docs = cdiv(S - start, KEYS), 1
    if cu_q is not None:
        docs = max(cu_q.shape[0] - 1, 1)
        table = schedule.table((cu_k - start).clamp(min=0) if start else cu_k, cu_q, S - start, T, KEYS, False)
        n_tiles = table.shape[0]
    k_step = v_step = 1
    if k_lens is not None:
        (k, k_step), (v, v_step) = descriptors.as_packed(k), descriptors.as_packed(v)
    d = descriptors.describe
    width = descriptors.width(D)
    heads = together((S - start) // docs)
    backward_kernel[(min(n_tiles * B * K, _programs(q.device)),)](
        d(q, rows.M), d(k, KEYS), d(v, KEYS), d(d_out, rows.M), d(d_k if need_k else k, 64),
        d(d_v if need_v else v, 64), rows.descriptor(), rows.scratch, rows.counter, rows.top, table, cu_k, k_lens,
        T, S, start, B, H, K, rows.docs, n_tiles, rows.tiles, k_step, v_step, rows.spare, heads, scale,
        scale / softcap if softcap else scale * LOG2E, softcap * LOG2E, min(right or 0, FAR), min(left or 0, FAR),
        M=rows.M, D=width, STAGES=2 if width == 128 else 3, RIGHT=right is not None, LEFT=left is not None,
        SOFTCAP=softcap > 0, SCALED=q.dtype == torch.float16, NEED_Q=need_q, NEED_K=need_k, NEED_V=need_v, num_warps=4,
    )  # fmt: skip
