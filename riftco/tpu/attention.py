"""Attention for XLA: blocks of keys with an online softmax, unrolled into one graph; no T x S matrix at once.

Every block is computed for every row: which keys a row sees is not known when the graph is built. Masks are comparisons
inside the fusion. Sums are taken in float32.
"""

import torch
from torch import Tensor

from ..kernels.attention import spec

KEYS = 512
LOWEST = -1e30  # hidden scores; finite, so that a row without keys needs no special case in the softmax


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    causal = _plain(left, right, k_lens, bias, sinks, seed, softcap)
    problem = _Blocks(q, k, v, cu_q, cu_k, causal, scale)
    x = problem.queries(q)
    top = x.new_full((*x.shape[:-1], 1), LOWEST)
    total, out = torch.zeros_like(top), x.new_zeros((*x.shape[:-1], v.shape[-1]))
    for keys, values, see in problem.blocks():
        s = torch.where(see, x @ keys.mT * problem.scale, LOWEST)
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        p = torch.where(see, (s - new_top).exp(), 0.0)
        shrink = (top - new_top).exp()
        total, out, top = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ values, new_top
    out = torch.where(problem.live, out / total, 0.0)
    lse = torch.where(problem.live, top + total.log(), -torch.inf)
    return problem.rows(out).to(q.dtype), problem.rows(lse).squeeze(-1).transpose(-1, -2).contiguous()


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    causal = _plain(left, right, k_lens, bias, sinks, seed, softcap, kv_grad_start)
    problem = _Blocks(q, k, v, cu_q, cu_k, causal, scale)
    x, g, o = problem.queries(q), problem.queries(d_out), problem.queries(out)
    log_sum = problem.queries(lse.transpose(-1, -2).unsqueeze(-1))
    log_sum = torch.where(problem.live, log_sum, 0.0)
    delta = (g * o).sum(-1, keepdim=True)
    if d_lse is not None:
        delta = delta - torch.where(problem.live, problem.queries(d_lse.transpose(-1, -2).unsqueeze(-1)), 0.0)
    d_x, d_keys, d_values = torch.zeros_like(x), [], []
    for keys, values, see in problem.blocks():
        p = torch.where(see, (x @ keys.mT * problem.scale - log_sum).exp(), 0.0)
        if need_v:
            d_values.append(p.mT @ g)
        if need_q or need_k:
            d_s = torch.where(see, p * (g @ values.mT - delta), 0.0) * problem.scale
            d_x = d_x + d_s @ keys if need_q else d_x
            if need_k:
                d_keys.append(d_s.mT @ x)
    d_q = problem.rows(d_x).to(q.dtype) if need_q else q.new_empty(0)
    d_k = problem.key_rows(d_keys, k) if need_k else k.new_empty(0)
    d_v = problem.key_rows(d_values, v) if need_v else v.new_empty(0)
    exponent = spec.dout_exponent(d_out, cu_q) if q.dtype == torch.float16 else q.new_empty(0, dtype=torch.int32)
    delta = problem.rows(delta).squeeze(-1).transpose(-1, -2).contiguous()
    return d_q, d_k, d_v, q.new_empty(0), q.new_empty(0), delta, exponent


def _plain(left, right, k_lens, bias, sinks, seed, softcap, kv_grad_start=0) -> bool:
    """causal; refuses by name what is not there."""
    given = dict(k_lens=k_lens, bias=bias, sinks=sinks, dropout_p=seed, softcap=softcap or None, window=left,
                 kv_grad_start=kv_grad_start or None)  # fmt: skip
    lacking = [n for n, value in given.items() if value is not None] + ["window"] * (right not in (None, 0))
    if lacking:
        raise NotImplementedError(f"attention: no XLA code yet for {', '.join(lacking)}")
    return right == 0


class _Blocks:
    """[B, K, T * G, D] queries against [B, K, S, D] keys: the heads of a group are rows of one matmul."""

    def __init__(self, q, k, v, cu_q, cu_k, causal, scale):
        self.T, self.S, self.K = q.shape[-3], k.shape[-3], k.shape[-2]
        self.G = q.shape[-2] // max(self.K, 1)
        self.packed = q.dim() == 3
        self.scale = spec.softmax_scale(q, scale)
        self.acc = torch.promote_types(q.dtype, torch.float32)
        self.cu_q, self.cu_k = cu_q, cu_q if cu_k is None else cu_k
        lo, hi = spec.key_range(self.T, self.S, cu_q, cu_k, None, None, 0 if causal else None, q.device, _document_of)
        self.lo, self.hi = (t.int().repeat_interleave(self.G).unsqueeze(-1) for t in (lo, hi))
        self.live = self.hi > self.lo
        self.k, self.v = self._heads_first(k, self.cu_k), self._heads_first(v, self.cu_k)

    def queries(self, t: Tensor) -> Tensor:
        """[B, T, H, D] or [T, H, D] -> [B, K, T * G, D] in the accumulator's dtype."""
        t = self._inside(t, self.cu_q)
        t = t.unsqueeze(0) if self.packed else t
        return t.to(self.acc).unflatten(2, (self.K, self.G)).movedim(2, 1).flatten(2, 3)

    def rows(self, t: Tensor) -> Tensor:
        t = t.unflatten(2, (self.T, self.G)).movedim(1, 2).flatten(2, 3)
        return (t.squeeze(0) if self.packed else t).contiguous()

    def key_rows(self, parts: list[Tensor], like: Tensor) -> Tensor:
        if not parts:
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        t = torch.cat(parts, 2).movedim(1, 2)
        return (t.squeeze(0) if self.packed else t).to(like.dtype).contiguous()

    def blocks(self):
        """(keys, values, which of them each query row sees), block by block."""
        for start in range(0, self.S, KEYS):
            stop = min(start + KEYS, self.S)
            j = torch.arange(start, stop, dtype=torch.int32, device=self.lo.device)
            yield self.k[:, :, start:stop], self.v[:, :, start:stop], (j >= self.lo) & (j < self.hi)

    def _heads_first(self, t: Tensor, cu: Tensor | None) -> Tensor:
        t = self._inside(t, cu)
        return (t.unsqueeze(0) if self.packed else t).to(self.acc).movedim(2, 1)

    def _inside(self, t: Tensor, cu: Tensor | None) -> Tensor:
        """Rows of no document become 0: whatever they hold, even NaN, must not reach a result."""
        if cu is None:
            return t
        row = torch.arange(t.shape[0], device=t.device)
        inside = (row >= cu[0]) & (row < cu[-1])
        return torch.where(inside[:, None, None], t, torch.zeros_like(t))


def _document_of(cu: Tensor, row: Tensor) -> Tensor:
    """By counting starts: torch_xla leaves searchsorted to the CPU."""
    return (cu <= row.unsqueeze(-1)).sum(-1) - 1
