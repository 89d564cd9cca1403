"""What the tests of both Hopper backwards of attention share: float64 results by autograd, inputs, a judge."""

import math

import torch

BUDGET = 1e-5
DEV = "cuda"


def sequence(q, k, v, d_out, d_lse=None, scale=None, left=None, right=None, softcap=0.0):
    """(out, lse, dq, dk, dv) of one sequence [T, H, D]."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    (T, H, D), (S, K) = q.shape, k.shape[:2]
    if T == 0 or S == 0:
        zeros = [torch.zeros_like(x) for x in (q, q, k, v)]
        return zeros[0], q.new_full((H, T), -math.inf), *zeros[1:]
    s = torch.einsum("thd,shd->hts", q, k.repeat_interleave(H // K, 1)) * (D**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at = torch.arange(T, device=q.device)[:, None] + S - T
    j = torch.arange(S, device=q.device)
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device)
    if right is not None:
        seen &= j <= at + right
    if left is not None:
        seen &= j >= at - left
    live = seen.any(1)
    p = torch.where(live[:, None], s.masked_fill(~seen, -math.inf), 0.0).softmax(-1) * live[:, None]
    out = torch.einsum("hts,shd->thd", p, v.repeat_interleave(H // K, 1))
    lse = s.masked_fill(~seen, -math.inf).logsumexp(-1)
    loss = (out * d_out.double()).sum()
    if d_lse is not None:
        loss = loss + (torch.where(live, lse, 0.0) * d_lse.double()).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))


def dense(q, k, v, d_out, k_lens=None, d_lse=None, **options):
    """Of every sequence of a batch, in full-sized tensors; keys beyond its length get zeros."""
    parts = []
    for b in range(q.shape[0]):
        n = k.shape[1] if k_lens is None else k_lens[b]
        got = list(sequence(q[b], k[b, :n], v[b, :n], d_out[b], None if d_lse is None else d_lse[b], **options))
        got[3:] = [torch.cat([x, x.new_zeros(k.shape[1] - n, *x.shape[1:])]) for x in got[3:]]
        parts.append(got)
    return [torch.stack(x) for x in zip(*parts)]


def packed(q, k, v, d_out, cu_q, cu_k, d_lse=None, **options):
    """Of every document; rows of none hold zeros (lse: -inf)."""
    out, dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, q, k, v))
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64, device=q.device)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        g = None if d_lse is None else d_lse[:, a:b]
        out[a:b], lse[:, a:b], dq[a:b], dk[c:d], dv[c:d] = sequence(q[a:b], k[c:d], v[c:d], d_out[a:b], g, **options)
    return out, lse, dq, dk, dv


def noise(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, device=DEV) * scale).to(dtype)


def launched(backward, q, k, v, d_out, out, lse, cu_q=None, cu_k=None, k_lens=None, d_lse=None, deterministic=False,
             start=0, need=(True, True, True), scale=None, left=None, right=None, softcap=0.0):  # fmt: skip
    """(dq, dk, dv, delta, exponent) of a launcher; bounds and lengths may be lists."""
    cu_q, cu_k, k_lens = (
        torch.tensor(x, device=DEV, dtype=torch.int32) if isinstance(x, list) else x for x in (cu_q, cu_k, k_lens)
    )
    d_q, d_k, d_v, _, _, delta, exponent = backward(
        d_out, d_lse, q, k, v, out, lse, cu_q, cu_k, k_lens, None, None, None, scale, left, right, softcap, 0.0, start,
        deterministic, *need, False, False,
    )  # fmt: skip
    return d_q, d_k, d_v, delta, exponent


def nmse(got, want):
    want = want.double()
    assert got.shape == want.shape
    return ((got.double() - want).square().sum() / want.square().sum().clamp(min=1e-300)).item()


def check(got, want, rows=(slice(None),)):
    """`rows` picks those of dK and dV that were asked for."""
    for name, g, w in zip(("dq", "dk", "dv"), got, (want[2], want[3][rows], want[4][rows])):
        assert torch.isfinite(g).all(), name
        assert nmse(g, w) <= BUDGET, (name, nmse(g, w))
