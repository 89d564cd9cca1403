"""The contract of attention: schemas, shapes, devices, gradient. Torch-only; imports no kernel.

B batch, T query length, S key length, H query heads, K key/value heads, D and Dv head dims.
"""

import itertools

import torch
from torch import Tensor

from .._arguments import check_impl, flags, floating, given, indices, number, whole
from .._contract import Function, autocast, checks_enabled, define, needs_grad, once_differentiable, same_device
from . import materialized, spec

IMPLS = ("flash", "materialized", "spec")
HERE = "riftco.kernels.attention"
OPTIONS = "float? scale, int? left, int? right, float softcap, float dropout_p"
TENSORS = "Tensor? cu_q, Tensor? cu_k, Tensor? k_lens, Tensor? bias, Tensor? sinks, Tensor? seed"


def _fake_fwd(q, k, v, cu_q, cu_k, k_lens, bias, sinks, seed, scale, left, right, softcap, dropout_p):
    acc = torch.promote_types(q.dtype, torch.float32)
    *lead, T, H, _ = q.shape
    return q.new_empty((*lead, T, H, v.shape[-1])), q.new_empty((*lead, H, T), dtype=acc)


def _fake_bwd(
    d_out, d_lse, q, k, v, out, lse, cu_q, cu_k, k_lens, bias, sinks, seed, scale, left, right, softcap, dropout_p,
    kv_grad_start, deterministic, need_q, need_k, need_v, need_bias, need_sinks,
):  # fmt: skip
    docs = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    exponents = (docs, q.shape[-2]) if q.dtype == torch.float16 else (0,)
    return (
        q.new_empty(q.shape if need_q else 0),
        *(t.new_empty(tail_shape(t, kv_grad_start) if need else 0) for t, need in ((k, need_k), (v, need_v))),
        q.new_empty(0) if bias is None or not need_bias else bias.new_empty(bias.shape),
        q.new_empty(0) if sinks is None or not need_sinks else sinks.new_empty(sinks.shape),
        torch.empty_like(lse),
        q.new_empty(exponents, dtype=torch.int32),
    )


def tail_shape(t: Tensor, kv_grad_start: int) -> tuple[int, ...]:
    """Shape of the gradient of k or v: key rows from kv_grad_start on."""
    return (*t.shape[:-3], t.shape[-3] - kv_grad_start, *t.shape[-2:])


fwd = define(
    "attention_fwd",
    f"(Tensor q, Tensor k, Tensor v, {TENSORS}, {OPTIONS}) -> (Tensor out, Tensor lse)",
    fake=_fake_fwd,
    spec=f"{HERE}.spec:forward",
    launchers={
        "cpu": f"{HERE}.cpu:forward",
        "cuda": f"{HERE}.cuda:forward",
        "mps": "riftco.metal.attention:forward",
        "xla": "riftco.tpu.attention:forward",
    },
    routes={"cuda": f"{HERE}.route:forward_routes", "mps": "riftco.metal.attention_route:routes"},
)
bwd = define(
    "attention_bwd",
    f"(Tensor d_out, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {TENSORS}, {OPTIONS}, "
    "int kv_grad_start, bool deterministic, bool need_q, bool need_k, bool need_v, bool need_bias, bool need_sinks) -> "
    "(Tensor d_q, Tensor d_k, Tensor d_v, Tensor d_bias, Tensor d_sinks, Tensor delta, Tensor exponent)",
    fake=_fake_bwd,
    spec=f"{HERE}.spec:backward",
    launchers={
        "cpu": f"{HERE}.cpu:backward",
        "cuda": f"{HERE}.cuda:backward",
        "mps": "riftco.metal.attention:backward",
        "xla": "riftco.tpu.attention:backward",
    },
    routes={"cuda": f"{HERE}.route:backward_routes", "mps": "riftco.metal.attention_route:routes"},
)


class Attention(Function):
    """Saves q, k, v, out and lse (and the caller's own small tensors): scores are recomputed."""

    @staticmethod
    def forward(q, k, v, bias, sinks, cu_q, cu_k, k_lens, seed, kv_grad_start, deterministic, *options):
        return fwd(q, k, v, cu_q, cu_k, k_lens, bias, sinks, seed, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, bias, sinks, cu_q, cu_k, k_lens, seed, ctx.kv_grad_start, ctx.deterministic, *ctx.options = inputs
        ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, k_lens, bias, sinks, seed)
        ctx.set_materialize_grads(False)  # lse is rarely used: no zeros for its gradient

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        need = ctx.needs_input_grad[:5]
        *_, out, lse, _, _, _, bias, sinks, _ = saved = ctx.saved_tensors  # checkpointing lets it be read once
        d_out = torch.zeros_like(out) if d_out is None else d_out
        start, of_rows = ctx.kv_grad_start, need[3] and bias.shape[-1] == 1
        asked = (*need[:3], need[3] and not of_rows, need[4])
        *grads, delta, _ = bwd(d_out, d_lse, *saved, *ctx.options, start, ctx.deterministic, *asked)
        d_q, d_k, d_v, d_bias, d_sinks = (g if n else None for g, n in zip(grads, asked))
        if of_rows:
            d_bias = spec.row_bias_gradient(bias, sinks, lse, delta, d_lse)
        if start:  # autograd wants the shape of k and v
            d_k, d_v = (g if g is None else torch.cat([_head_rows(g, start), g], -3) for g in (d_k, d_v))
        return d_q, d_k, d_v, d_bias, d_sinks, *(None,) * (6 + len(ctx.options))


def _head_rows(g: Tensor, rows: int) -> Tensor:
    return g.new_zeros((*g.shape[:-3], rows, *g.shape[-2:]))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    k_lens: Tensor | None = None,
    kv_grad_start: int = 0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention that never holds a T x S matrix (but for float64, which runs the spec).

    out[t, h] = sum_s softmax_s(s[t, h, s])  v[s, h // G], with G = H // K query heads a key head and
    s[t, h, s] = cap(scale * q[t, h] . k[s, h // G]) + bias, cap(x) = softcap * tanh(x / softcap) or x.

    Args:
        q: [B, T, H, D], or packed [total, H, D] with cu_seqlens_q; float16/bfloat16/float32/float64, any strides
            (head dim contiguous is fastest). Differentiable.
        k: [B, S, K, D] or packed [total_k, K, D], H % K == 0. Differentiable.
        v: [B, S, K, Dv] or packed [total_k, K, Dv]. Differentiable.
        causal: query row t of a sequence sees the keys s <= t + S - T (aligned at the bottom right). A row that sees
            no key gives 0, lse -inf and zero gradients.
        scale: default D ** -0.5.
        window: (left, right): row t sees the keys from t + S - T - left to t + S - T + right, as in flash-attn; None
            or -1 is unlimited. causal makes the right side 0.
        softcap: > 0 caps the scaled scores at +-softcap.
        sinks: [H] floating: one more score a head, without a value (it takes its share of the softmax; lse includes
            it). Differentiable.
        bias: added to the scores after the softcap; or bool, False hides a key. Broadcastable to [B, H, T, S] (not
            packed), -inf allowed; -2**100 and below count as -inf. Differentiable if floating; its gradient has its own
            shape.
        dropout_p: probability of dropping a softmax weight; the rest grow by 1 / (1 - dropout_p). The mask is a
            function of a seed from torch's generator of q's device and of (head, row, key): the same under any tiling.
        cu_seqlens_q: [documents + 1], int32 or int64, ascending from 0: document n is the rows cu[n] to cu[n + 1].
            Empty documents are fine; rows from cu[-1] on give exactly 0, output and gradients, whatever they hold.
        cu_seqlens_k: the same for k and v; default cu_seqlens_q.
        max_seqlen_q: longest document, as callers of flash-attn have it; only RIFTCO_CHECK=1 reads it: the kernels
            find documents by cu_seqlens alone.
        max_seqlen_k: the same for k.
        k_lens: [B] int32 or int64, not packed: keys of each sequence, S at most; those beyond do not exist and may hold
            anything. Causal masks and windows end at k_lens.
        kv_grad_start: gradients of k and v are wanted for key rows from here on (packed: row numbers of k); those
            before get 0. Work and workspace shrink with it; out, lse and the gradient of q see every key.
        deterministic: the same gradients in every run. Default torch.are_deterministic_algorithms_enabled(). Without
            it the gradient of q may differ in its last bits between runs on GPUs with a kernel that is much faster
            that way; everything else never does.
        return_lse: also return the log-sum-exp of the scores, [B, H, T] or packed [H, total], float32 (float64 for
            float64). Differentiable.
        impl: None, "flash": the device's kernel, linear in memory. "materialized": matmul, masked softmax, matmul in
            plain torch under autograd, on every device: holds all scores and saves the probabilities, [B, H, T, S].
            "spec": the plain-torch meaning under autograd, slower still. Both take double backward.

    Returns:
        out [B, T, H, Dv] or [total, H, Dv] in q's dtype; with return_lse (out, lse).

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit, each named; with RIFTCO_CHECK=1 also
            cu_seqlens that do not ascend from 0 to at most the number of rows, a document above max_seqlen, or
            k_lens out of range.

    Under autocast q, k, v are cast to its dtype, as PyTorch does.
    Devices: cpu (blocked), cuda (Triton; Gluon on Hopper), mps (Metal; with a bias or dropout as on xla), xla (composed
        of PyTorch's operations, in tiles).
    Numerics: float32 accumulation and softmax; P and dS are rounded once to 16 bit on CUDA for 16-bit inputs, and for
    bfloat16 on CPUs that multiply it; in float16 dO is brought into range by a power of two a document and head, undone
    exactly.
    Source: Dao 2023, "FlashAttention-2", algorithms 1 and 2; Milakov & Gimelshein 2018 for the online softmax.
    """
    flags("attention", causal=causal, return_lse=return_lse)
    q, k, v = autocast(q, k, v)
    if cu_seqlens_k is cu_seqlens_q:
        cu_seqlens_k = None  # Dynamo takes a tensor once; launchers read None as cu_seqlens_q
    if k is q:  # nor twice into an autograd.Function
        k = k.view(k.shape)
    if v is q or v is k:
        v = v.view(v.shape)
    left, right = _window(window, causal)
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, impl)
    _check_options(q, k, cu_seqlens_q, k_lens, bias, sinks, scale, softcap, dropout_p, kv_grad_start)
    if deterministic is not None:
        flags("attention", deterministic=deterministic)
    if checks_enabled():
        check_documents("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        check_documents("cu_seqlens_k", cu_k, k.shape[0], max_seqlen_k)
        if k_lens is not None and not bool(((k_lens >= 0) & (k_lens <= k.shape[1])).all()):
            raise ValueError(f"attention: k_lens must be in [0, {k.shape[1]}]; got {k_lens.tolist()}")
    bias = bias if bias is None or bias.dim() == 4 else bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    seed = draw_seed(q.device) if dropout_p else None
    options = (scale, left, right, softcap, dropout_p)
    if impl in ("materialized", "spec"):
        if kv_grad_start:
            k, v = (
                torch.cat([t[..., :kv_grad_start, :, :].detach(), t[..., kv_grad_start:, :, :]], -3) for t in (k, v)
            )
        tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, k_lens, bias, sinks, seed)
        if impl == "spec":
            out, lse = spec.forward(*tensors, *options)
        else:
            out, lse = materialized.attend(*tensors, *options, return_lse)
    elif needs_grad(q, k, v, bias, sinks):
        deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        out, lse = Attention.apply(
            q, k, v, bias, sinks, cu_seqlens_q, cu_seqlens_k, k_lens, seed, kv_grad_start, deterministic, *options
        )
    else:
        out, lse = fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, k_lens, bias, sinks, seed, *options)
    return (out, lse) if return_lse else out


def draw_seed(device: torch.device) -> Tensor:
    """int64 [1], from torch's generator of the device: no synchronisation."""
    return torch.randint(1 << 62, (1,), device=device)


def _window(window: tuple[int | None, int | None], causal: bool) -> tuple[int | None, int | None]:
    accepted = "(left, right), each >= 0, or None or -1 for no limit"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"attention: window must be {accepted}; got {window!r}")
    for side in window:
        if side is not None:
            whole("attention", "window", side, accepted, least=-1)
    left, right = (None if side == -1 else side for side in window)
    return left, 0 if causal else right


def check_documents(name: str, cu: Tensor | None, rows: int, longest: int | None) -> None:
    """ValueError where cu_seqlens cannot be what it says, as RIFTCO_CHECK=1 asks. Costs a synchronisation."""
    if cu is None:
        return
    starts = cu.tolist()
    if starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)) or starts[-1] > rows:
        raise ValueError(f"attention: {name} must ascend from 0 to at most {rows} rows; got {starts}")
    found = max(b - a for a, b in itertools.pairwise(starts))
    if longest is not None and found > longest:
        raise ValueError(f"attention: {name} holds a document of {found} rows, above max_seqlen {longest}")


def _check(q, k, v, cu_q, cu_k, impl) -> None:
    dims = 4 if cu_q is None else 3
    if not (floating(q) and floating(k) and floating(v)) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: q, k, v must share a floating dtype; got {given(q, k, v)}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == dims:
        wanted = "[B, T, heads, head dim]" if dims == 4 else "[total, heads, head dim] with cu_seqlens"
        raise ValueError(f"attention: q, k, v must be {wanted}; got {shapes}")
    if cu_q is None and cu_k is not None:
        raise ValueError("attention: cu_seqlens_k needs cu_seqlens_q")
    if dims == 4 and not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"attention: batch sizes differ: {shapes}")
    if k.shape[-3] != v.shape[-3] or k.shape[-2] != v.shape[-2]:
        raise ValueError(f"attention: k and v must have the same length and heads; got {shapes}")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(f"attention: q and k must have the same head dim, at least 1; got {shapes}")
    H, K = q.shape[-2], k.shape[-2]
    if K == 0 or H % K:
        raise ValueError(f"attention: query heads must be a multiple of key heads; got {H} and {K}")
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu is not None and (not indices(cu) or cu.dim() != 1 or len(cu) < 2):
            raise ValueError(f"attention: {name} must be int32 or int64 [documents + 1]; got {given(cu)}")
    if cu_q is not None and cu_k is not None and len(cu_q) != len(cu_k):
        raise ValueError(f"attention: cu_seqlens_q and cu_seqlens_k differ in length: {len(cu_q)} and {len(cu_k)}")
    check_impl("attention", impl, *IMPLS)
    same_device("attention", q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def _check_options(q, k, cu_q, k_lens, bias, sinks, scale, softcap, dropout_p, kv_grad_start) -> None:
    T, S, H = q.shape[-3], k.shape[-3], q.shape[-2]
    if cu_q is not None and (bias is not None or k_lens is not None):
        raise ValueError("attention: bias and k_lens need [B, T, heads, head dim]; cu_seqlens was given")
    if k_lens is not None and (not indices(k_lens) or k_lens.shape != q.shape[:1]):
        raise ValueError(f"attention: k_lens must be int32 or int64 [{q.shape[0]}]; got {given(k_lens)}")
    if bias is not None:
        if not floating(bias) and not (isinstance(bias, Tensor) and bias.dtype == torch.bool):
            raise ValueError(f"attention: bias must be bool or floating; got {given(bias)}")
        full = (q.shape[0], H, T, S)
        padded = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        if len(padded) != 4 or any(b not in (1, f) for b, f in zip(padded, full)):
            raise ValueError(f"attention: bias must broadcast to [B, H, T, S] = {list(full)}; got {list(bias.shape)}")
    if sinks is not None and (not floating(sinks) or sinks.shape != (H,)):
        raise ValueError(f"attention: sinks must be floating [{H}]; got {given(sinks)}")
    if scale is not None:
        number("attention", "scale", scale, "finite, or None")
    number("attention", "softcap", softcap, ">= 0 and finite", least=0)
    number("attention", "dropout_p", dropout_p, "in [0, 1)", least=0, below=1)
    whole("attention", "kv_grad_start", kv_grad_start, f"in [0, {S}]", least=0, most=S)
    same_device("attention", q=q, k_lens=k_lens, bias=bias, sinks=sinks)
