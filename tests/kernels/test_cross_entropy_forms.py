"""Top-k labels, one interval a row, the log-probability of each token."""

import functools

import pytest
import support
import torch
import torch.nn.functional as F

from riftco.functional import (
    cross_entropy,
    cross_entropy_time_range,
    linear_cross_entropy,
    per_token_logprobs,
    topk_cross_entropy,
)

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))


def labels(*lead, V, k, device="cpu"):
    """logits, ids with duplicates and empty places, weights that do not sum to 1."""
    x = (3 * torch.randn(*lead, V)).to(device)
    ids = torch.randint(0, V, (*lead, k), device=device)
    ids[..., 1] = ids[..., 0]
    ids.view(-1, k)[0, -1] = -1
    return x, ids, torch.rand(*lead, k, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("ignore_index", [-100, 4])
def test_what_carries_no_loss(device, kind, ignore_index):
    """One predicate: ignore_index and every negative, in 32 bits and 64, on whole logits and on sliced ones."""
    V, on = 9, device.torch_device
    x = (3 * torch.randn(7, V)).to(on)
    target = torch.tensor([3, -1, 0, -100, 8, -7, ignore_index], dtype=kind, device=on)
    rows, results = torch.tensor([0, 2, 4], device=on), []
    with device.use():
        for some, y in ((x, target), (x[rows], target[rows])):
            plain, head = some.clone().requires_grad_(), some.clone().requires_grad_()
            losses = [
                cross_entropy(plain, y, ignore_index=ignore_index),
                linear_cross_entropy(head, torch.eye(V, device=on), y, ignore_index=ignore_index),
            ]
            grads = [*torch.autograd.grad(losses[0], plain), *torch.autograd.grad(losses[1], head)]
            results.append((losses, grads))
    (losses, grads), (wanted, want) = results
    for loss, other in zip(losses, wanted):
        torch.testing.assert_close(loss, other)
    for got, rest in zip(grads, want):
        torch.testing.assert_close(got[rows], rest)
        assert not got[[1, 3, 5, 6]].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignore_index", [2**32, -(2**33), 2**40 + 8])
def test_a_label_of_more_bits_than_the_labels_have_is_none_of_them(device, ignore_index):
    """Its low bits are: 0 and 8, which carry loss."""
    on = device.torch_device
    x, target = torch.randn(2, 3, 9, device=on), torch.tensor([[0, 8, 3], [0, -1, 8]], dtype=torch.int32, device=on)

    def losses(**options):
        yield cross_entropy(x, target, **options)
        for shift in (False, True):
            yield linear_cross_entropy(x, torch.eye(9, device=on), target, shift=shift, **options)

    with device.use():
        for got, want in zip(losses(ignore_index=ignore_index), losses()):
            assert torch.equal(got, want)


def dense(x, ids, weights, softcap=None, logit_scale=1.0):
    """The loss against labels as wide as the vocabulary."""
    z = x * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    w = torch.where(ids >= 0, weights, 0.0)
    wide = torch.zeros_like(z).scatter_add(-1, ids.clamp(min=0), w.to(z.dtype))
    return -(wide * z.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, dict(softcap=4.0, logit_scale=0.6)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_is_the_dense_loss(device, options, dtype):
    x, ids, w = labels(3, 4, V=60, k=5, device=device.torch_device)
    x = x.to(dtype)
    up = torch.randn(3, 4, device=x.device)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    with device.use(), support.poisoned():
        loss = topk_cross_entropy(a, ids, w, reduction="none", **options)
        loss.backward(up)
    want = dense(b, ids, w, **options)
    want.backward(up.double())
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    tight = dict(rtol=1e-4, atol=1e-6) if dtype == torch.float32 else dict(rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(a.grad.double(), b.grad, **tight)


@pytest.mark.parametrize("device", DEVICES)
def test_topk_of_one_id_is_cross_entropy(device):
    """One id of weight 1, twice 1/2: the plain loss; confident rows keep their digits."""
    x = torch.randn(4, 40, device=device.torch_device)
    y = torch.randint(0, 40, (4,), device=x.device)
    x[torch.arange(4), y] = 25.0
    a, b, c = (x.clone().requires_grad_() for _ in range(3))
    with device.use():
        for reduction in ("mean", "sum"):
            losses = (
                topk_cross_entropy(a, y[:, None], torch.ones(4, 1, device=x.device), reduction=reduction),
                topk_cross_entropy(
                    b, y[:, None].expand(4, 2), torch.full((4, 2), 0.5, device=x.device), reduction=reduction
                ),
                cross_entropy(c, y, reduction=reduction),
            )
            for loss in losses:
                loss.backward()
                torch.testing.assert_close(loss, losses[-1], rtol=1e-5, atol=0)
    others = torch.ones_like(x, dtype=torch.bool).scatter(-1, y[:, None], False)
    for t in (a, b):
        torch.testing.assert_close(t.grad, c.grad, rtol=1e-4, atol=0)
        assert (t.grad[others] > 0).all()


def test_topk_gradcheck():
    x, ids, w = labels(5, V=7, k=3)
    row_weight = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0])
    w[3] = 0
    x = x.double().requires_grad_()
    for impl in (None, "spec"):
        options = dict(row_weight=row_weight, softcap=3.0, impl=impl)
        for reduction in ("mean", "sum", "none"):
            loss = functools.partial(topk_cross_entropy, ids=ids, weights=w, reduction=reduction, **options)
            assert torch.autograd.gradcheck(loss, x)
    assert torch.equal(topk_cross_entropy(x, ids, w, denominator=8), topk_cross_entropy(x, ids, w, reduction="sum") / 8)


@pytest.mark.parametrize("device", DEVICES)
def test_topk_edges(device):
    """Rows of weight 0 are not read and give 0; an id past the vocabulary gives NaN in its row alone."""
    x, ids, w = labels(4, V=20, k=3, device=device.torch_device)
    w[1] = 0
    x[1] = torch.nan
    ids[2, 2] = 20
    a = x.clone().requires_grad_()
    with device.use(), support.poisoned():
        loss = topk_cross_entropy(a, ids, w, reduction="none")
        loss.sum().backward()
        assert topk_cross_entropy(a, ids, w.zero_()).item() == 0
    assert loss.isnan().tolist() == [False, False, True, False] and loss[1] == 0
    assert a.grad.isnan().any(-1).tolist() == [False, False, True, False] and a.grad[1].abs().sum() == 0


def test_topk_fullgraph_and_errors(monkeypatch):
    torch._dynamo.reset()
    x, ids, w = labels(4, V=20, k=3)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    topk_cross_entropy(a, ids, w).backward()
    torch.compile(topk_cross_entropy, fullgraph=True, backend="aot_eager")(b, ids, w).backward()
    torch.testing.assert_close(a.grad, b.grad)
    for bad, text in [
        (lambda: topk_cross_entropy(x, ids[:2], w), "ids must be int32 or int64"),
        (lambda: topk_cross_entropy(x, ids, w[:, :2]), "weights must be floating"),
        (lambda: topk_cross_entropy(x, ids, w.requires_grad_()), "weights are not differentiable"),
        (lambda: topk_cross_entropy(x, ids, w.detach(), softcap=-1.0), "softcap"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    ids[0, 0] = 20
    with pytest.raises(IndexError, match="an id is 20, but there are 20 classes"):
        topk_cross_entropy(x, ids, w.detach())


@pytest.mark.parametrize("device", DEVICES)
def test_time_range(device):
    """One interval for all, one a row, an empty one; outside it the gradient is exactly 0."""
    x = torch.randn(3, 6, 11, device=device.torch_device)
    y = torch.randint(0, 11, (3, 6), device=x.device)
    lo, hi = torch.tensor([0, 2, 3], device=x.device), torch.tensor([1, 6, 3], device=x.device)
    t = torch.arange(6, device=x.device)
    for start, end in ((1, 4), (0, 6), (2, 2), (lo, hi), (1, hi)):
        first, last = (v[:, None] if isinstance(v, torch.Tensor) else v for v in (start, end))
        inside = ((t >= first) & (t < last)).expand(3, 6)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with device.use():
            loss = cross_entropy_time_range(a, y, start, end)
            loss.backward()
        want = F.cross_entropy(b[inside], y[inside], reduction="sum") / inside.sum().clamp(min=1)
        want.backward()
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(a.grad, b.grad)
        assert a.grad[~inside].abs().sum() == 0
    for bad in ((4, 2), (0, 7), (-1, 2), (0.5, 2), (lo[:2], hi), (lo.float(), hi)):
        with pytest.raises((TypeError, ValueError), match="cross_entropy_time_range"):
            cross_entropy_time_range(x, y, *bad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_per_token_logprobs(device, temperature):
    x = 3 * torch.randn(2, 5, 30, device=device.torch_device)
    y = torch.randint(0, 30, (2, 5), device=x.device)
    y[0, 3] = -100
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    up = torch.randn(2, 5, device=x.device)
    with device.use():
        got = per_token_logprobs(a, y, temperature=temperature)
        got.backward(up)
    want = (b / temperature).log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * (y >= 0)
    want.backward(up)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(a.grad, b.grad)
    with pytest.raises(ValueError, match="temperature"):
        per_token_logprobs(x, y, temperature=0.0)
