"""Cross-entropy in Triton. One program per row: the row is read once forward and once backward, in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import as_rows, on

BLOCK_V = 4096


@triton.jit
def _max_and_sum(row_ptr, stride_v, V, BLOCK: tl.constexpr):
    """(m, sum of exp(x - m)) with m the largest of a row, or 0 where all of it is -inf."""
    m = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(row_ptr + v * stride_v, mask=v < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # a block of -inf alone must not give inf - inf
        total = total * tl.exp(m - shift) + tl.sum(tl.exp(x - shift), 0)
        m = m_new
    return tl.where(m == -float("inf"), 0.0, m), total


@triton.jit
def _ce_fwd(
    logits_ptr, target_ptr, weight_ptr, loss_ptr, lse_ptr, inner, stride_o, stride_i, stride_v, V, ignore_index,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(target_ptr + n).to(tl.int64)
    w = tl.load(weight_ptr + n) if HAS_WEIGHT else 1.0
    loss = 0.0
    lse = 0.0
    if (y != ignore_index) & (y >= 0) & (w != 0.0):
        row_ptr = logits_ptr + (n // inner) * stride_o + (n % inner) * stride_i
        m, total = _max_and_sum(row_ptr, stride_v, V, BLOCK)
        lse = m + tl.log(total)
        # log(0) is -inf for a row of -inf alone, and -inf - -inf below is NaN, as in the spec
        picked = tl.load(row_ptr + y * stride_v, mask=y < V, other=float("nan")).to(tl.float32)
        loss = (lse - picked) * w
    tl.store(loss_ptr + n, loss)
    tl.store(lse_ptr + n, lse)


@triton.jit
def _ce_bwd(
    d_logits_ptr, d_loss_ptr, logits_ptr, target_ptr, weight_ptr, lse_ptr,
    stride_d, inner, stride_o, stride_i, stride_v, V, ignore_index, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(target_ptr + n).to(tl.int64)
    w = tl.load(weight_ptr + n) if HAS_WEIGHT else 1.0
    out_ptr = d_logits_ptr + n * V
    if (y != ignore_index) & (y >= 0) & (w != 0.0):
        row_ptr = logits_ptr + (n // inner) * stride_o + (n % inner) * stride_i
        scale = tl.load(d_loss_ptr + n * stride_d).to(tl.float32) * w
        scale = tl.where(y < V, scale, float("nan"))
        lse = tl.load(lse_ptr + n)
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK).to(tl.int64)
            x = tl.load(row_ptr + v * stride_v, mask=v < V, other=-float("inf")).to(tl.float32)
            d = (tl.exp(x - lse) - tl.where(v == y, 1.0, 0.0)) * scale
            tl.store(out_ptr + v, d, mask=v < V)
    else:
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK).to(tl.int64)
            tl.store(out_ptr + v, tl.zeros([BLOCK], tl.float32), mask=v < V)


@triton.jit
def _ce_fwd_bwd(
    logits_ptr, target_ptr, weight_ptr, d_loss_ptr, loss_ptr, lse_ptr, stride_n, stride_d, V, ignore_index,
    HAS_WEIGHT: tl.constexpr, HAS_D_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    y = tl.load(target_ptr + n).to(tl.int64)
    w = tl.load(weight_ptr + n) if HAS_WEIGHT else 1.0
    row_ptr = logits_ptr + n * stride_n
    loss = 0.0
    lse = 0.0
    if (y != ignore_index) & (y >= 0) & (w != 0.0):
        # read before the reductions, whose barriers keep it ahead of the stores that overwrite it
        picked = tl.load(row_ptr + y, mask=y < V, other=float("nan")).to(tl.float32)
        m, total = _max_and_sum(row_ptr, 1, V, BLOCK)
        log_total = tl.log(total)
        lse = m + log_total
        # m and log_total stay apart: x - m is exact where lse would absorb a small log_total
        loss = (log_total - (picked - m)) * w
        upstream = tl.load(d_loss_ptr + n * stride_d).to(tl.float32) if HAS_D_LOSS else 1.0
        scale = tl.where(y < V, upstream * w, float("nan"))
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK).to(tl.int64)
            x = tl.load(row_ptr + v, mask=v < V, other=-float("inf")).to(tl.float32)
            p = tl.exp((x - m) - log_total)
            tl.store(row_ptr + v, (p - tl.where(v == y, 1.0, 0.0)) * scale, mask=v < V)
    else:
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK).to(tl.int64)
            tl.store(row_ptr + v, tl.zeros([BLOCK], tl.float32), mask=v < V)
    tl.store(loss_ptr + n, loss)
    tl.store(lse_ptr + n, lse)


def _block(V: int) -> tuple[int, int]:
    """(vocabulary columns a program holds at once, warps)."""
    block = min(BLOCK_V, triton.next_power_of_2(max(V, 16)))
    return block, 8 if block >= 2048 else 4


def forward(logits: Tensor, target: Tensor, row_weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    V, N = logits.shape[-1], target.numel()
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    if N == 0:
        return loss, lse
    x, inner, stride_o, stride_i = as_rows(logits)
    weight = None if row_weight is None else row_weight.contiguous()
    block, warps = _block(V)
    with on(logits):
        _ce_fwd[(N,)](
            x, target.contiguous(), weight, loss, lse, inner, stride_o, stride_i, x.stride(-1), V, ignore_index,
            HAS_WEIGHT=weight is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return loss, lse


def backward(
    d_loss: Tensor, logits: Tensor, target: Tensor, row_weight: Tensor | None, lse: Tensor, ignore_index: int
) -> Tensor:
    V, N = logits.shape[-1], target.numel()
    d_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if d_logits.numel() == 0:
        return d_logits
    x, inner, stride_o, stride_i = as_rows(logits)
    weight = None if row_weight is None else row_weight.contiguous()
    one_value = all(s == 0 for s in d_loss.stride())  # the expanded scalar that a sum or mean sends back
    block, warps = _block(V)
    with on(logits):
        _ce_bwd[(N,)](
            d_logits, d_loss if one_value else d_loss.contiguous(), x, target.contiguous(), weight, lse.contiguous(),
            0 if one_value else 1, inner, stride_o, stride_i, x.stride(-1), V, ignore_index,
            HAS_WEIGHT=weight is not None, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return d_logits


def forward_backward_(
    logits: Tensor, target: Tensor, row_weight: Tensor | None, d_loss: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """`forward`, and logits [n, V] with contiguous rows become d_logits of sum(d_loss * loss); None means ones."""
    N, V = logits.shape
    loss = torch.empty(N, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(loss)
    if N == 0:
        return loss, lse
    weight = None if row_weight is None else row_weight.contiguous()
    one_value = d_loss is not None and d_loss.stride(0) == 0
    upstream = d_loss if d_loss is None or one_value else d_loss.contiguous()
    block, warps = _block(V)
    with on(logits):
        _ce_fwd_bwd[(N,)](
            logits, target.contiguous(), weight, upstream, loss, lse, logits.stride(0), 0 if one_value else 1,
            V, ignore_index, HAS_WEIGHT=weight is not None, HAS_D_LOSS=d_loss is not None,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return loss, lse
