"""Attention beyond the conformance cases: gradcheck, contract, strides, edges, accuracy, planted bugs."""

import dataclasses
import itertools

import pytest
import support
import torch
import torch.nn.functional as F
from support import nmse
from torch.utils._python_dispatch import TorchDispatchMode

from riftco.functional import attention
from riftco.kernels.attention import cases, cpu, op, spec

DEVICES = support.device_params(("cpu", "cpu-triton", "cuda"))
CUDA = "riftco.kernels.attention.cuda.portable_"
PLAIN = (None,) * 4  # k_lens, bias, sinks, seed
NEEDS = (True, True, True, False, False)


def scalars(causal=False, scale=None):
    """scale, left, right, softcap, dropout_p of an op."""
    return scale, None, 0 if causal else None, 0.0, 0.0


def qkv(B=2, T=9, S=9, H=4, K=2, D=8, Dv=None, dtype=torch.float32, device="cpu"):
    shapes = (B, T, H, D), (B, S, K, D), (B, S, K, D if Dv is None else Dv)
    return tuple(torch.randn(s, dtype=torch.float64).to(device, dtype) for s in shapes)


def packed(cu, H=4, K=2, D=8, spare=0, dtype=torch.float32, device="cpu"):
    total = cu[-1] + spare
    q, k, v = (t[0] for t in qkv(1, total, total, H, K, D, dtype=dtype, device=device))
    return q, k, v, torch.tensor(cu, dtype=torch.int32, device=device)


def run(q, k, v, d_out, **options):
    """(out, lse, d_q, d_k, d_v)."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


NAMES = ("out", "lse", "d_q", "d_k", "d_v")


@pytest.mark.parametrize("causal,T,S,K", [(False, 5, 3, 4), (True, 4, 6, 2), (True, 6, 4, 1)])
def test_gradcheck(causal, T, S, K):
    leaves = [t.requires_grad_() for t in qkv(1, T, S, 4, K, 3, 2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *t: attention(*t, causal=causal), leaves)


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck_packed(causal):
    q, k, v, cu = packed((0, 3, 3, 4, 8), 4, 2, 3, spare=1, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *t: attention(*t, causal=causal, cu_seqlens_q=cu), leaves)


@pytest.mark.parametrize("case", cases.OPTION_CASES, ids=lambda c: c.name)
def test_gradcheck_of_every_option(case):
    """Through the spec's autograd and its closed-form backward, lse's gradient included."""
    shape = {n: {"D": 3, "DV": 2}.get(n, size) for n, size in case.shape.items()}
    inputs = cases.make_inputs(dataclasses.replace(case, shape=shape), torch.Generator().manual_seed(0))
    names = [n for n in cases.GRADS if n in inputs]
    exists = {n: inputs[n].isfinite() for n in names}  # a step from NaN or -inf leads nowhere
    leaves = [inputs[n].where(exists[n], 0.0).requires_grad_() for n in names]

    def run(how, *tensors):
        full = {n: t.where(exists[n], inputs[n]) for n, t in zip(names, tensors)}
        return tuple(t.masked_fill(t.detach() == -torch.inf, 0.0) for t in how({**inputs, **full}, case).values())

    for how in (cases.call, cases.reference):
        if not case.options.get("kv_grad_start"):
            assert torch.autograd.gradcheck(lambda *t, how=how: run(how, *t), leaves, fast_mode=True)
    closed, by_autograd = (
        torch.autograd.grad([t.square().sum() for t in run(how, *leaves)], leaves)
        for how in (cases.reference, lambda i, c: cases.call(i, c, impl="spec"))
    )
    for name, a, b in zip(names, closed, by_autograd):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_is_each_document_alone(device, causal):
    cu_q, cu_k = (0, 5, 5, 6, 40), (0, 3, 9, 12, 90)
    q, k, v = (t[0] for t in qkv(1, 40, 90, 6, 2, 16, device=device.torch_device))
    d_out = torch.randn_like(q)
    options = {"cu_seqlens_q": torch.tensor(cu_q).to(q.device), "cu_seqlens_k": torch.tensor(cu_k).to(q.device)}
    with device.use():
        got = run(q, k, v, d_out, causal=causal, **options)
        for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k)):
            want = run(q[None, a:b], k[None, c:d], v[None, c:d], d_out[None, a:b], causal=causal)
            pieces = got[0][a:b], got[1][:, a:b], got[2][a:b], got[3][c:d], got[4][c:d]
            for name, x, y in zip(NAMES, pieces, want):
                torch.testing.assert_close(x, y[0], msg=lambda m, name=name, a=a: f"{name} of document at {a}: {m}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.float16, 1e-5), (torch.bfloat16, 5e-5)])
@pytest.mark.parametrize("D,H,K,S,T", [(128, 8, 2, 64, 16), (64, 4, 2, 75, 37), (256, 16, 4, 40, 24)])
def test_nmse(device, dtype, bound, D, H, K, S, T):
    """dO ~ 1e-3; the bfloat16 bound is the interpreter's, which truncates."""
    q, k, v = qkv(1, T, S, H, K, D, dtype=dtype, device=device.torch_device)
    d_out = (torch.randn(q.shape) * 1e-3).to(q)
    with device.use():
        got = run(q, k, v, d_out, causal=True)
    want = run(*(t.cpu().double() for t in (q, k, v, d_out)), causal=True)
    for name, x, y in zip(NAMES, got, want):
        assert nmse(x.cpu(), y) <= bound, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("documents", [None, (0, 20, 64)])
def test_float16_gradients_of_a_tiny_upstream(device, documents):
    """dO ~ 1e-6 is a handful of float16's smallest steps; heads far apart in size must not spoil each other."""
    q, k, v = qkv(1, 64, 64, 4, 2, 32, dtype=torch.float16, device=device.torch_device)
    q, k = q * 0.25, k * 4
    d_out = torch.randn(q.shape, device=q.device) * 1e-6
    d_out[:, :, 1] *= 1e5
    options = {"scale": 1.0}
    if documents:
        q, k, v, d_out = q[0], k[0], v[0], d_out[0]
        options["cu_seqlens_q"] = torch.tensor(documents, device=q.device)
    d_out = d_out.half()
    with device.use():
        got = run(q, k, v, d_out, **options)
    cu = None if documents is None else options["cu_seqlens_q"].cpu()
    want = run(*(t.cpu().double() for t in (q, k, v, d_out)), scale=1.0, cu_seqlens_q=cu)
    for name, x, y in list(zip(NAMES, got, want))[2:]:
        for head in range(x.shape[-2]):  # a head by itself: the large one would hide the others
            a, b = (t[..., head, :].cpu().half().double().flatten() for t in (x, y))
            assert F.cosine_similarity(a, b, 0) > 0.99995, (name, head)
            assert abs(a.norm() / b.norm() - 1) < 2e-4, (name, head)


@pytest.mark.parametrize("device", DEVICES)
def test_runs_are_bit_equal(device):
    q, k, v, cu = packed((0, 30, 31, 80), 6, 2, 16, device=device.torch_device, dtype=torch.float16)
    d_out = torch.randn(q.shape).to(q)
    with device.use():
        first, second = (run(q, k, v, d_out, causal=True, cu_seqlens_q=cu) for _ in range(2))
    for name, a, b in zip(NAMES, first, second):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Slices, transposes, expanded heads, offsets and strided head dims give what a contiguous copy gives."""
    wide = torch.randn(2, 20, 2, 48, device=device.torch_device)
    views = {
        "one projection": wide.split(16, -1),
        "heads first": tuple(t.transpose(1, 2) for t in qkv(2, 2, 2, 20, 20, 16, device=wide.device)),
        "expanded batch": tuple(t[:1].expand(2, -1, -1, -1) for t in wide.split(16, -1)),
        "expanded heads": tuple(t[:, :, :1].expand(-1, -1, 2, -1) for t in wide.split(16, -1)),
        "every third channel": tuple(wide[..., i::3] for i in range(3)),
        "odd rows": tuple(t[:, 1::2] for t in wide.split(16, -1)),
    }
    with device.use():
        for name, tensors in views.items():
            d_out = torch.randn(tensors[0].shape, device=wide.device).transpose(1, 2).contiguous().transpose(1, 2)
            got = run(*tensors, d_out, causal=True)
            want = run(*(t.contiguous() for t in tensors), d_out.contiguous(), causal=True)
            for what, a, b in zip(NAMES, got, want):
                torch.testing.assert_close(a, b, msg=lambda m, name=name, what=what: f"{name}, {what}: {m}")
                assert a.is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("B,T,S,H", [(0, 3, 3, 2), (2, 0, 3, 2), (2, 3, 0, 2), (1, 2, 2, 0)])
def test_zero_sizes(device, B, T, S, H):
    q, k, v = qkv(B, T, S, H, 1, 8, device=device.torch_device)
    with device.use(), support.poisoned():
        out, lse, *grads = run(q, k, v, torch.ones_like(q), causal=True)
    assert out.abs().sum() == 0 and (lse == -torch.inf).all()
    assert all(bool((g == 0).all()) for g in grads)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_no_document(device):
    """Spare rows that hold NaN give exactly 0 and reach nothing; so do documents without keys."""
    q, k, v, cu = packed((0, 7, 7, 20), spare=50, device=device.torch_device)
    d_out = torch.randn_like(q)
    with device.use(), support.poisoned():
        want = run(q[:20], k[:20], v[:20], d_out[:20], cu_seqlens_q=cu)
        for t in (q, k, v, d_out):
            t[20:] = torch.nan
        got = run(q, k, v, d_out, cu_seqlens_q=cu)
    for name, a, b in zip(NAMES, got, want):
        spare, a = (a[:, 20:], a[:, :20]) if name == "lse" else (a[20:], a[:20])
        assert bool((spare == (-torch.inf if name == "lse" else 0)).all()), name
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_only_gradients_that_are_needed(device):
    q, k, v = qkv(1, H=2, K=1, device=device.torch_device)
    d_out = torch.randn_like(q)
    with device.use():
        full = run(q, k, v, d_out)[2:]
        for need in itertools.product([False, True], repeat=3):
            if not any(need):
                continue
            leaves = [t.clone().requires_grad_(n) for t, n in zip((q, k, v), need)]
            attention(*leaves).backward(d_out)
            for leaf, n, want in zip(leaves, need, full):
                assert torch.equal(leaf.grad, want) if n else leaf.grad is None
            with torch.no_grad():
                out, lse = op.fwd(q, k, v, None, None, *PLAIN, *scalars())
                grads = op.bwd(
                    d_out, None, q, k, v, out, lse, None, None, *PLAIN, *scalars(), 0, False, *need, False, False
                )
            assert [g.numel() > 0 for g in grads[:5]] == [*need, False, False]


class Watch(TorchDispatchMode):
    """How many torch operations ran, and the elements of the largest tensor among their results."""

    def __init__(self):
        super().__init__()
        self.operations = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


def test_cpu_blocks():
    """More rows, keys and heads than one block holds, and not even one head's T x S scores at once."""
    T, S = 1500, 1400
    q, k, v = qkv(1, T, S, 10, 5, 8)
    d_out = torch.randn_like(q)
    with Watch() as watch:
        out, lse = cpu.forward(q, k, v, None, None, *PLAIN, *scalars(True))
        grads = cpu.backward(d_out, None, q, k, v, out, lse, None, None, *PLAIN, *scalars(True), 0, False, *NEEDS)
        got = out, lse, *grads[:3]
    assert watch.largest < T * S
    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    see = spec.visible(q, k, None, None, None, None, 0)
    out = F.scaled_dot_product_attention(*leaves, see, enable_gqa=True)
    seen = see.any(-1)  # PyTorch leaves the rows that see no key undefined
    grads = torch.autograd.grad(out[:, :, seen], leaves, d_out.transpose(1, 2)[:, :, seen])
    torch.testing.assert_close(got[0][:, seen], out.transpose(1, 2)[:, seen], atol=1e-5, rtol=1e-5)
    for name, a, b in zip(NAMES[2:], got[2:], grads):
        assert nmse(a, b.transpose(1, 2)) < 1e-10, name


def test_thousands_of_documents_cost_no_more_than_one():
    total = 4000
    q, k, v, one = packed((0, total), 2, 1, 8)
    counts = []
    for cu in (torch.arange(total + 1), one):
        with Watch() as watch:
            out, lse = cpu.forward(q, k, v, cu, None, *PLAIN, *scalars())
            grads = cpu.backward(
                torch.ones_like(q), None, q, k, v, out, lse, cu, None, *PLAIN, *scalars(), 0, False, *NEEDS
            )
        counts.append(watch.operations)
        if cu is not one:  # each token sees itself
            torch.testing.assert_close(out, v.expand_as(q))
            torch.testing.assert_close(grads[2], torch.full_like(v, 2.0))
    assert counts[0] < min(counts[1], total)


def test_opcheck():
    q, k, v = qkv(1, 5, 6, 4, 2, 8)
    args = (q, k, v, None, None, *PLAIN, *scalars(True))
    out, lse = op.fwd(*args)
    torch.library.opcheck(op.fwd, args)
    for need in (NEEDS, (False, True, False, False, False)):
        torch.library.opcheck(op.bwd, (torch.randn_like(out), None, *args[:3], out, lse, *args[3:], 0, False, *need))
    q, k, v, cu = packed((0, 2, 5))
    args = (q, k, v, cu, cu, *PLAIN, *scalars(False, 0.5))
    out, lse = op.fwd(*args)
    torch.library.opcheck(op.fwd, args)
    torch.library.opcheck(
        op.bwd, (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *args[3:], 0, True, *NEEDS)
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()

    def both(q, k, v, cu):
        x = attention(q, k, v, causal=True)
        return x, attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens_q=cu)

    fn = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for T in (5, 9):
            cu = torch.tensor([0, 4, 2 * T], device=device.torch_device)
            tensors = qkv(2, T, T, device=device.torch_device)
            a, b = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
            ya, yb = both(*a, cu), fn(*b, cu)
            for y in (ya, yb):
                (y[0].square().sum() + y[1].sum()).backward()
            assert all(torch.equal(s, t) for s, t in zip(ya, yb))
            assert all(torch.equal(s.grad, t.grad) for s, t in zip(a, b))


def test_modes():
    q, k, v = qkv()
    with torch.inference_mode():
        a = attention(q, k, v, causal=True)
    with torch.no_grad():
        b, lse = attention(q.requires_grad_(), k, v, causal=True, return_lse=True)
    assert torch.equal(a, b) and not b.requires_grad
    live, live_lse = attention(q, k, v, causal=True, return_lse=True)
    assert live.requires_grad and live_lse.requires_grad and torch.equal(lse, live_lse)
    q = q.detach()
    got = torch.func.grad(lambda t: attention(t, k, v).square().sum())(q)
    want = torch.func.grad(lambda t: attention(t, k, v, impl="spec").square().sum())(q)
    torch.testing.assert_close(got, want)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = attention(q, k.bfloat16(), v)
        assert mixed.dtype == torch.bfloat16
        assert torch.equal(mixed, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    d = [t.double().requires_grad_() for t in qkv(1, 3, 3, 2, 1, 2)]
    (g,) = torch.autograd.grad(attention(*d).sum(), d[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    assert torch.autograd.gradgradcheck(lambda *t: attention(*t, causal=True, impl="spec"), d)


def test_two_backward_passes_and_checkpoint():
    q, k, v = (t.requires_grad_() for t in qkv())
    out = attention(q, k, v, causal=True)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(out.sum(), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(lambda *t: attention(*t, causal=True), q, k, v, use_reentrant=False)
    third = torch.autograd.grad(again.sum(), (q, k, v))
    for a, b, c, d in zip(first, kept, second, third):
        assert torch.equal(a, b) and torch.equal(b, c) and torch.equal(c, d)


def test_errors(monkeypatch):
    q, k, v = qkv()
    cu = torch.tensor([0, 4, 9])
    one = tuple(t[0] for t in (q, k, v))
    for args, options, text in [
        ((q[0], k, v), {}, r"\[B, T, heads, head dim\]"),
        ((q, k, v), {"cu_seqlens_q": cu}, "total, heads"),
        ((q, k, v), {"cu_seqlens_k": cu}, "needs cu_seqlens_q"),
        ((q.half(), k, v), {}, "share a floating dtype"),
        ((q[:1], k, v), {}, "batch sizes"),
        ((q, k, v[:, :3]), {}, "same length"),
        ((q[..., :4], k, v), {}, "same head dim"),
        ((q[:, :, :3], k, v), {}, "multiple of key heads; got 3 and 2"),
        (one, {"cu_seqlens_q": cu.float()}, "cu_seqlens_q must be int32"),
        (one, {"cu_seqlens_q": cu, "cu_seqlens_k": cu[:2]}, "differ in length: 3 and 2"),
        ((q, k, v), {"impl": "fast"}, "'fast'"),
        ((q, k, v.to("meta")), {}, "v on meta"),
    ]:
        with pytest.raises(ValueError, match=text):
            attention(*args, **options)
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    attention(*one, cu_seqlens_q=cu, max_seqlen_q=5, max_seqlen_k=5)
    for starts, longest, text in [
        ([0, 5, 4], None, "ascend"),
        ([0, 4, 10], None, "9 rows"),
        ([0, 4, 9], 4, "of 5 rows"),
    ]:
        with pytest.raises(ValueError, match=text):
            attention(*one, cu_seqlens_q=torch.tensor(starts), max_seqlen_q=longest)


def test_planted_float16_range_bugs():
    """Without the power of two, or with one head's power used for another, a tiny dO is lost."""
    for module, old, new in [
        ("delta", "exponent = tl.where(largest > 0.0, exponent, 0)", "exponent = exponent * 0"),
        ("dkdv", "d_k *= (next_unit / unit)[:, None]", "d_k *= 1.0"),
        ("dq", "(softmax_scale / unit)", "(softmax_scale / (unit * 0 + 1.0))"),
    ]:
        device = next(d for d in support.DEVICES if d.name == ("cuda" if torch.cuda.is_available() else "cpu-triton"))
        with support.mutant(CUDA + module, old, new), pytest.raises(AssertionError):
            test_float16_gradients_of_a_tiny_upstream(device, None)


def test_bounds_that_are_not_there_touch_no_foreign_memory():
    device = next(d for d in support.DEVICES if d.name == "cpu-triton")
    if not device.available:
        pytest.skip(f"cpu-triton: {device.why_not}")
    q, k, v = (torch.randn(4, 1, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([-5, 90], dtype=torch.int32)
    with device.use():
        out = attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=9, max_seqlen_k=9)
        out.sum().backward()
    assert out.isfinite().all() and q.grad.isfinite().all()
