"""Attention on CUDA: which kernels serve a call."""

from torch import Tensor

from . import portable


def _plain(left, right, k_lens, bias, sinks, seed, softcap, kv_grad_start=0) -> bool:
    """causal; refuses by name what the kernels lack."""
    given = dict(k_lens=k_lens, bias=bias, sinks=sinks, dropout_p=seed, softcap=softcap or None, window=left,
                 kv_grad_start=kv_grad_start or None)  # fmt: skip
    lacking = [n for n, value in given.items() if value is not None] + ["window"] * (right not in (None, 0))
    if lacking:
        raise NotImplementedError(f"attention: no kernel yet for {', '.join(lacking)}")
    return right == 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float | None, left: int | None,
    right: int | None, softcap: float, dropout_p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    causal = _plain(left, right, k_lens, bias, sinks, seed, softcap)
    return portable.forward(q, k, v, cu_q, cu_k, causal, scale)


def backward(
    d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_q: Tensor | None, cu_k: Tensor | None, k_lens: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float | None, left: int | None, right: int | None, softcap: float, dropout_p: float,
    kv_grad_start: int, deterministic: bool, need_q: bool, need_k: bool, need_v: bool, need_bias: bool,
    need_sinks: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    causal = _plain(left, right, k_lens, bias, sinks, seed, softcap, kv_grad_start)
    return portable.backward(d_out, d_lse, q, k, v, out, lse, cu_q, cu_k, causal, scale, need_q, need_k, need_v)
