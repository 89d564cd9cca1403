"""Taking and replacing rows beyond the conformance cases: order, torch's twin, strides, ids outside, planted bugs."""

import copy
import pickle

import pytest
import support
import torch

from riftco import nn
from riftco.functional import embedding, gather_rows, scatter_rows
from riftco.kernels.embedding import cases, op

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))


def gradient(x, ids, d_out, **options):
    x = x.detach().clone().requires_grad_()
    embedding(ids, x, **options).backward(d_out)
    return x.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_sums_run_in_the_order_of_the_ids(device, dtype, kind):
    """Bit-equal to adding one row after the other in float32: values of very different size show the order."""
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(5, (3, 67), generator=gen)
    d_out = (torch.randn(3, 67, 18, generator=gen) * 10.0 ** torch.randint(-3, 4, (3, 67, 1), generator=gen)).to(dtype)
    want = torch.zeros(5, 18)
    for i, row in zip(ids.reshape(-1).tolist(), d_out.reshape(-1, 18).float()):
        want[i] += row
    there = device.torch_device
    with device.use():
        got = gradient(torch.zeros(5, 18, dtype=dtype, device=there), ids.to(there, kind), d_out.to(there))
    if dtype == torch.float32:
        assert torch.equal(got.cpu(), want)
    else:  # the interpreter truncates
        torch.testing.assert_close(got.cpu().float(), want, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"padding_idx": -2}, {"scale_grad_by_freq": True}, {"max_norm": 0.9}])
def test_is_torchs_embedding(device, options):
    there = device.torch_device
    ours = nn.Embedding(9, 12, **options, device=there)
    theirs = torch.nn.Embedding(9, 12, **options, device=there)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ids = torch.tensor([[1, 7, 7], [0, 3, 7]], device=there)
    d_out = torch.randn(2, 3, 12, device=there)
    for m in (ours, theirs):
        with device.use():
            out = m(ids)
            out.backward(d_out)
        if m is ours:
            mine = out
    assert torch.equal(mine, out) and torch.equal(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-6, atol=1e-6)
    assert ours.weight.grad.count_nonzero() > 0


def test_the_module_around_it():
    m = nn.Embedding.from_pretrained(torch.randn(5, 3), freeze=False, padding_idx=1)
    assert isinstance(m, torch.nn.Embedding) and m.padding_idx == 1
    ids = torch.tensor([0, 4])
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(twin(ids), m(ids))
    with pytest.raises(ValueError, match="sparse=True"):
        nn.Embedding(5, 3, sparse=True)


@pytest.mark.parametrize("device", DEVICES)
def test_scatter_gives_its_destination_the_gradient_but_at_replaced_rows(device):
    there = device.torch_device
    x = torch.randn(6, 4, device=there, requires_grad=True)
    rows = torch.randn(4, 4, device=there, requires_grad=True)
    ids = torch.tensor([5, 1, 5, 2], device=there)
    with device.use():
        out = scatter_rows(x, ids, rows)
        d = torch.randn(6, 4, device=there)
        out.backward(d)
    want = x.detach().clone()
    want[[1, 5, 2]] = rows.detach()[[1, 2, 3]]  # the last of the two that go to row 5
    assert torch.equal(out.detach(), want)
    d_x = d.clone()
    d_x[[1, 2, 5]] = 0
    d_rows = d[ids].clone()
    d_rows[0] = 0
    assert torch.equal(x.grad, d_x) and torch.equal(rows.grad, d_rows)


@pytest.mark.parametrize("device", DEVICES)
def test_other_rows_keep_their_bytes(device):
    """NaN with a payload, inf, -0.0 and subnormals outside of the replaced rows, and inside of what replaces them."""
    bits = torch.tensor([0x7FC00123, 0x7F800000, -0x80000000, 0x00000001, -0x00400000], dtype=torch.int32)
    x = bits.view(torch.float32).repeat(4, 1).to(device.torch_device)
    ids = torch.tensor([2], device=x.device)
    with device.use():
        out = scatter_rows(x, ids, torch.zeros(1, 5, device=x.device))
        back = scatter_rows(torch.zeros_like(x), ids, x[:1])
        taken = gather_rows(x, ids)
    assert torch.equal(out.view(torch.int32)[[0, 1, 3]], x.view(torch.int32)[[0, 1, 3]]) and not out[2].any()
    assert torch.equal(back[2].view(torch.int32), x[2].view(torch.int32)) and not back[[0, 1, 3]].any()
    assert torch.equal(taken[0].view(torch.int32), x[2].view(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_strides_of_the_ids(device, kind):
    """Every other id of a row, a column and an expanded id: read where they are, what lies between is not."""
    there = device.torch_device
    x, d_out = (torch.randn(n, 5, device=there) for n in (6, 4))
    wide = torch.full((8, 3), 99, dtype=kind, device=there)
    wide[::2, 1] = torch.tensor([3, 1, 5, 3], dtype=kind, device=there)
    for ids in (wide[::2, 1], wide[:, 1][::2].view(2, 2), wide[2, 1].expand(4)):
        flat = ids.reshape(-1).tolist()
        with device.use():
            assert torch.equal(gather_rows(x, ids).reshape(4, 5), x[flat])
            got = gradient(x, ids, d_out.view(*ids.shape, 5))
            if ids.dim() == 1:
                a, b = x.clone().requires_grad_(), d_out.clone().requires_grad_()
                out = scatter_rows(a, ids, b)
                d_a, d_b = torch.autograd.grad(out, (a, b), x)
        want = torch.zeros_like(x).index_add_(0, torch.tensor(flat, device=there), d_out)
        torch.testing.assert_close(got, want)
        if ids.dim() == 1:
            last = {row: i for i, row in enumerate(flat)}
            for row in range(6):
                assert torch.equal(out[row], d_out[last[row]] if row in last else x[row])
                assert torch.equal(d_a[row], 0 * x[row] if row in last else x[row])
            for i, row in enumerate(flat):
                assert torch.equal(d_b[i], x[row] if last[row] == i else 0 * x[row])


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    there = device.torch_device
    base, rows, d = (torch.randn(n, 6, device=there) for n in (8, 3, 8))
    ids = torch.tensor([4, 4, 0], device=there)
    lays = {
        "contiguous": lambda t: t,
        "transposed": lambda t: t.t().contiguous().t(),
        "rows apart": lambda t: torch.cat((t, t), 1)[:, 6:],
    }
    results = []
    for lay in lays.values():
        x, r = lay(base).detach().requires_grad_(), lay(rows).detach().requires_grad_()
        with device.use():
            got = gather_rows(x, torch.stack((ids, ids), -1)[:, 0])
            out = scatter_rows(x, ids, r)
            (a,) = torch.autograd.grad(got, x, lay(d[:3]))
            b, c = torch.autograd.grad(out, (x, r), lay(d))
            (e,) = torch.autograd.grad(gather_rows(x, ids), x, torch.ones(1, 1, device=there).expand(3, 6))
        results.append([t.detach() for t in (got, out, a, b, c, e)])
    for row in results[1:]:
        assert all(torch.equal(s, t) for s, t in zip(row, results[0]))


@pytest.mark.parametrize("device", support.device_params(("cpu-triton", "cuda")))
def test_ids_outside_touch_nothing(device):
    x = torch.randn(4, 3, device=device.torch_device, requires_grad=True)
    ids = torch.tensor([1, -1, 4, 2**40, 1], device=x.device)
    rows = torch.randn(5, 3, device=x.device)
    with device.use():
        out = gather_rows(x, ids)
        out.backward(torch.ones_like(out))
        placed = scatter_rows(x.detach(), ids, rows)
    assert out[1:4].isnan().all() and torch.equal(out[0], x[1])
    assert torch.equal(x.grad, torch.tensor([0.0, 2, 0, 0], device=x.device).unsqueeze(1).expand(4, 3))
    assert torch.equal(placed[1], rows[4]) and torch.equal(placed[[0, 2, 3]], x.detach()[[0, 2, 3]])


def test_checked_ids(monkeypatch):
    x = torch.randn(4, 3)
    with pytest.raises(IndexError):
        gather_rows(x, torch.tensor([4]))
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    for call in (gather_rows, lambda x, i: embedding(i, x), lambda x, i: scatter_rows(x, i, x[:2])):
        with pytest.raises(IndexError, match="id -3 at 1 is outside of the 4 rows"):
            call(x, torch.tensor([0, -3]))


@pytest.mark.parametrize("impl", ["spec", None])
def test_gradcheck(impl):
    ids = torch.tensor([[0, 3], [3, 3]])
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    at = torch.tensor([1, 4, 1])
    assert torch.autograd.gradcheck(lambda x: embedding(ids, x, impl=impl), x)
    assert torch.autograd.gradcheck(lambda x, r: scatter_rows(x, at, r, impl=impl), (x, rows))
    if impl == "spec":
        assert torch.autograd.gradgradcheck(lambda x: gather_rows(x, ids, impl=impl).square(), x)
        assert torch.autograd.gradgradcheck(lambda x: embedding(ids, x, 0, impl=impl).square(), x)
        assert torch.autograd.gradgradcheck(lambda x, r: scatter_rows(x, at, r, impl=impl).square(), (x, rows))
        return
    for call in (lambda x: embedding(ids, x), lambda x: scatter_rows(x, at, rows)):
        (g,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()


def test_opcheck():
    x, ids = torch.randn(5, 3), torch.tensor([0, 4, 4])
    torch.library.opcheck(op.fwd, (x, ids))
    torch.library.opcheck(op.bwd, (torch.randn(3, 3), ids, 5, 1, True))
    torch.library.opcheck(op.scatter, (x, ids, torch.randn(3, 3)))
    torch.library.opcheck(op.scatter_bwd, (x, ids, torch.tensor([0, -1, -1, -1, 2]), True, True))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()

    def both(x, ids, rows):
        return embedding(ids, x, 1).sum() + scatter_rows(x, ids, rows).square().sum()

    fn = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (3, 5):
        x, rows = torch.randn(6, 4, device=device.torch_device), torch.randn(n, 4, device=device.torch_device)
        ids = torch.randint(6, (n,), device=x.device)
        runs = []
        with device.use():
            for f in (both, fn):
                a, b = x.clone().requires_grad_(), rows.clone().requires_grad_()
                loss = f(a, ids, b)
                runs.append((loss.detach(), *torch.autograd.grad(loss, (a, b))))
        assert all(torch.equal(s, t) for s, t in zip(*runs))


def test_nothing_is_kept_but_ids():
    """No values, and nothing at all without gradients."""
    x, ids = torch.randn(50, 8, requires_grad=True), torch.tensor([3, 1])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        embedding(ids, x)
        scatter_rows(x, ids, torch.randn(2, 8))
        assert {t.dtype for t in saved} == {torch.int64}
        saved.clear()
        with torch.no_grad():
            assert not embedding(ids, x).requires_grad
    assert not saved


def test_errors():
    x, ids = torch.randn(4, 3), torch.tensor([0])
    for call, text in [
        (lambda: embedding(ids, x, sparse=True), "sparse=True is not supported"),
        (lambda: embedding(ids, x, 4), "padding_idx must be within the 4 rows; got 4"),
        (lambda: embedding(ids.float(), x), "ids must be int32 or int64; got torch.float32"),
        (lambda: embedding(ids, x[0]), r"weight must be floating \[rows, C\]"),
        (lambda: embedding(ids, x.long()), "weight must be floating"),
        (lambda: gather_rows(x, ids.to("meta")), "ids on meta"),
        (lambda: gather_rows(x, ids, impl="fast"), "'fast'"),
        (lambda: scatter_rows(x, ids, x), r"rows \[n, 3\]; got \(1,\) and \(4, 3\)"),
        (lambda: scatter_rows(x, ids, x[:1].half()), "rows must be torch.float32 as x; got torch.float16"),
    ]:
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("end = tl.where(r == padding, first, last)", "end = last", "padding"),
        ("for start in range(first, end, AHEAD):", "for start in range(first, end, 2 * AHEAD):", "one id many times"),
        ("total /= tl.maximum(last - first, 1)", "total /= tl.maximum(last - first + 1, 1)", "by frequency"),
        ("order_ptr + start + k, mask=live", "order_ptr + first + k, mask=live", "one id many times"),
        ("if owner >= 0:", "if owner > 0:", "replaced rows"),
        ("keep = tl.load(owner_ptr + i) < 0", "keep = tl.load(owner_ptr + i) < 1", "replaced rows"),
        ("mask=there, other=-1) == i)", "mask=there, other=-1) >= 0)", "replaced rows"),
    ],
)  # fmt: skip
def test_planted_bugs(old, new, case):
    support.assert_caught(cases, "riftco.kernels.embedding.cuda", old, new, case)
