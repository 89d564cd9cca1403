"""Cross-entropy's options against PyTorch and float64, its exactness, and what the fast route promises."""

import math

import pytest
import support
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import cross_entropy, torch_cross_entropy
from riftco.kernels.cross_entropy import op

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
DEVICE_NAMES = pytest.mark.parametrize("device", DEVICES)


def make(*shape, dtype=torch.float32, device="cpu"):
    x = (3 * torch.randn(*shape, dtype=torch.float64)).to(device, dtype)
    return x, torch.randint(0, shape[-1], shape[:-1], device=device)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        dict(label_smoothing=0.2), dict(z_loss=0.3), dict(softcap=2.5), dict(logit_scale=0.4),
        dict(label_smoothing=1.0, weight=True), dict(weight=True, row_weight=True),
        dict(label_smoothing=0.1, z_loss=0.1, softcap=3.0, logit_scale=1.3, weight=True, row_weight=True),
    ],
    ids=str,
)  # fmt: skip
def test_gradcheck(options, reduction):
    x, y = make(5, 7, dtype=torch.float64)
    y[1] = -100
    options = dict(options)
    if options.pop("weight", False):
        options["weight"] = torch.rand(7, dtype=torch.float64)
    if options.pop("row_weight", False):
        options["row_weight"] = torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0])
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: cross_entropy(t, y, reduction=reduction, **options), x)
    assert torch.autograd.gradcheck(
        lambda t: cross_entropy(t, y, reduction=reduction, return_lse=True, **options)[:2], x
    )


@pytest.mark.parametrize("shape", [(10, 5, 4, 3), (30000, 2, 1, 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_finite_differences_with_masked_rows(shape, weighted):
    """[V, rows...] of A2.4, masked rows among them, with and without row weights."""
    shape = (*shape[1:], shape[0])
    x, y = make(*shape, dtype=torch.float64)
    y.view(-1)[1:2] = -1
    w = torch.rand(y.shape) if weighted else None
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: cross_entropy(t, y, row_weight=w), x, fast_mode=True)


@pytest.mark.parametrize("device", support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda")))
@pytest.mark.parametrize("shape", [(10, 5, 4, 3), (30000, 2, 1, 1)])
def test_finite_differences_of_the_kernels(device, shape):
    """The same shapes in float32, as float64 goes past the kernels: along the gradient, a step each way."""
    x, y = make(*shape[1:], shape[0], device=device.torch_device)
    y.view(-1)[1:2] = -1
    w = torch.rand(y.shape, device=x.device) + 0.5
    x.requires_grad_()

    def loss(t):
        return cross_entropy(t, y, row_weight=w).double()

    with device.use(), support.poisoned():
        (g,) = torch.autograd.grad(loss(x), x)
        along = g / g.norm()
        for way in (along, torch.randn_like(x) * 0.1 / x[0].numel() ** 0.5 + along):
            slope = (loss(x + 0.03 * way) - loss(x - 0.03 * way)) / 0.06
            torch.testing.assert_close(slope, (g * way).sum().double(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("weighted", [False, True])
@DEVICE_NAMES
def test_is_pytorch(device, weighted, smoothing):
    """Class weights with PyTorch's denominator, label smoothing, both together; the twins take [N, C, ...]."""
    x, y = make(4, 6, 11, device=device.torch_device)
    y[0, 0] = -100
    w = torch.rand(11, device=x.device) if weighted else None
    for reduction in ("mean", "sum", "none"):
        options = dict(weight=w, reduction=reduction, label_smoothing=smoothing)
        a, b, c = (x.clone().requires_grad_() for _ in range(3))
        want = F.cross_entropy(a.movedim(-1, 1), y, **options)
        with device.use():
            got = cross_entropy(b, y, **options)
            twin = nn.CrossEntropyLoss(**options)(c.movedim(-1, 1), y)
            assert torch.equal(torch_cross_entropy(c.movedim(-1, 1), y, **options), twin)
            for loss in (want, got, twin):
                (2 * loss.square().sum()).backward()
        for loss, leaf in ((got, b), (twin, c)):
            torch.testing.assert_close(loss, want)
            torch.testing.assert_close(leaf.grad, a.grad, rtol=1e-4, atol=1e-6)
    assert cross_entropy(x[0, 1], y[0, 1]).shape == ()


def test_twins_have_torch_s_arguments():
    x, y = make(4, 6)
    w = torch.rand(6)
    with pytest.warns(UserWarning, match="reduction='sum'"):
        assert torch.equal(torch_cross_entropy(x, y, w, False), cross_entropy(x, y, w, reduction="sum"))
    module = nn.CrossEntropyLoss(w, label_smoothing=0.1)
    assert "weight" in module.state_dict() and "label_smoothing=0.1" in repr(module)
    with pytest.raises(ValueError, match="probabilities"):
        module(x, torch.rand(4, 6))


def test_liger_s_module():
    x, y = make(5, 9)
    y[2] = -100
    loss, z, accuracy, predicted = nn.LigerCrossEntropyLoss(
        lse_square_scale=0.1, return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True
    )(x, y)
    lse, live = x.logsumexp(-1), y >= 0
    torch.testing.assert_close(z, 0.1 * lse.square()[live].mean())
    torch.testing.assert_close(loss, F.cross_entropy(x, y) + z)
    torch.testing.assert_close(accuracy, (x.argmax(-1) == y)[live].float().mean())
    assert torch.equal(predicted[live], x.argmax(-1)[live]) and predicted[2] == -1
    assert nn.LigerCrossEntropyLoss(softcap=3.0)(x, y).shape == ()


@DEVICE_NAMES
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999, 1 - 1e-7])
def test_confident_rows_keep_their_digits(device, p, offset):
    """Rows of probability p, all logits near 0 or near 1e4: loss and gradient to float32's relative accuracy."""
    V = 5000
    x = torch.full((2, V), offset, dtype=torch.float64)
    x[:, 7] += math.log(p / (1 - p)) + math.log(V - 1)
    x = x.float()  # what the op is given; at 1e4 these are multiples of 2^-10
    y = torch.tensor([7, 9])
    for reduction in ("sum", "none"):
        a = x.double().requires_grad_()
        want = cross_entropy(a, y, reduction="none", impl="spec")
        want.sum().backward()
        b = x.clone().to(device.torch_device).requires_grad_()
        with device.use():
            got = cross_entropy(b, y.to(b.device), reduction=reduction)
            got.sum().backward()
        if reduction == "none":
            torch.testing.assert_close(got.detach().cpu().double(), want.detach(), rtol=2e-6, atol=0)
        torch.testing.assert_close(b.grad.cpu().double(), a.grad, rtol=4e-6, atol=1e-30)


@DEVICE_NAMES
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
def test_confident_rows_in_bf16(device, p):
    """p - 1 is not rounded to bfloat16 before it is scaled."""
    V = 3000
    x = torch.randn(4, V).bfloat16()
    others = x.double()[:, 1:].logsumexp(-1)
    x[:, 0] = (others + torch.logit(torch.tensor(p, dtype=torch.float64))).bfloat16()
    y = torch.zeros(4, dtype=torch.long)
    a, b = x.double().requires_grad_(), x.to(device.torch_device).requires_grad_()
    cross_entropy(a, y, impl="spec").backward()
    with device.use():
        cross_entropy(b, y.to(b.device)).backward()
    torch.testing.assert_close(b.grad.cpu().double(), a.grad, rtol=2**-7, atol=1e-30)


@DEVICE_NAMES
@pytest.mark.parametrize("labelled", ["all", "none", "some"])
@pytest.mark.parametrize("N", [1, 5])
def test_which_rows_are_labelled(device, labelled, N):
    x, y = make(N, 37, device=device.torch_device)
    if labelled != "all":
        y[0 if labelled == "some" else slice(None)] = -100
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with device.use(), support.poisoned():
        loss = cross_entropy(a, y)
        loss.backward()
    live = y >= 0
    want = F.cross_entropy(b, y, reduction="sum") / max(1, int(live.sum()))
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(a.grad, b.grad)
    assert a.grad[~live].abs().sum() == 0


@DEVICE_NAMES
def test_none_takes_any_upstream(device):
    """A gradient a row, 0 in row 0 included; linear in it."""
    x, y = make(6, 45, device=device.torch_device)
    up = torch.randn(6, device=x.device)
    up[0] = 0
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with device.use():
        cross_entropy(a, y, reduction="none").backward(up)
    F.cross_entropy(b, y, reduction="none").backward(up)
    torch.testing.assert_close(a.grad, b.grad)
    assert a.grad[0].abs().sum() == 0 and a.grad[1].abs().sum() > 0


@DEVICE_NAMES
@pytest.mark.parametrize("k", [1.0, 3.0, 0.0])
def test_backward_passes(device, k):
    """Upstream k; twice with retain_graph, the first gradient untouched by the second; autograd.grad."""
    x, y = make(4, 20, device=device.torch_device)
    x.requires_grad_()
    b = x.detach().clone().requires_grad_()
    F.cross_entropy(b, y).backward()
    with device.use():
        loss = cross_entropy(x, y)
        (first,) = torch.autograd.grad(k * loss, x, retain_graph=True)
        kept = first.clone()
        (second,) = torch.autograd.grad(loss, x, retain_graph=True)
        (third,) = torch.autograd.grad(2 * loss, x)
    assert torch.equal(first, kept) and first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(first, k * b.grad)
    torch.testing.assert_close(second, b.grad)
    torch.testing.assert_close(third, 2 * b.grad)


@DEVICE_NAMES
def test_gradients_may_be_changed_between_backward_passes(device):
    """Zeroed or clipped in place, the first gradient leaves the second pass as it was."""
    x, y = make(4, 20, device=device.torch_device)
    x.requires_grad_()
    with device.use():
        loss = cross_entropy(x, y)
        loss.backward(retain_graph=True)
        want = x.grad.clone()
        x.grad.zero_()
        loss.backward(retain_graph=True)
        torch.testing.assert_close(x.grad, want)
        other = cross_entropy(x, y)
        (got,) = torch.autograd.grad(other, x, retain_graph=True)
        got.mul_(7.0)
        (got,) = torch.autograd.grad(other, x)
    torch.testing.assert_close(got, want)


@DEVICE_NAMES
@pytest.mark.parametrize("shape", [(2, 0), (0, 2)], ids=str)
def test_no_rows_keep_their_shape(device, shape):
    """Losses, lse and metrics of no rows at all have the target's shape, with and without a gradient."""
    x = torch.randn(*shape, 5, device=device.torch_device)
    y = torch.zeros(shape, dtype=torch.long, device=device.torch_device)
    more = dict(return_lse=True, return_metrics=True) if device.name != "mps-emulated" else dict(return_lse=True)
    for leaf in (x, x.clone().requires_grad_()):
        with device.use():
            loss, lse, *metrics = cross_entropy(leaf, y, reduction="none", **more)
        assert loss.shape == lse.shape == shape
        assert all(m.shape == shape for m in (metrics[0][:5] if metrics else ()))


@DEVICE_NAMES
def test_inplace(device):
    """The gradient lies where the logits were; a second backward pass is refused; strided rows stay in their place."""
    whole, y = make(4, 40, device=device.torch_device)
    before = whole.clone()
    a = before[:, :23].clone().requires_grad_()
    with device.use():
        cross_entropy(a, y % 23).backward()
        leaf = whole[:, :23].requires_grad_()
        loss = cross_entropy(leaf, y % 23, inplace=True)
        assert not torch.equal(whole[:, :23], before[:, :23])
        (got,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert got.data_ptr() == leaf.data_ptr()
        with pytest.raises(RuntimeError, match="gave its gradient away"):
            torch.autograd.grad(loss, leaf)
        with torch.no_grad():
            kept = before.clone()
            cross_entropy(kept, y, inplace=True)  # no gradient is asked for: nothing is written
    torch.testing.assert_close(got, a.grad)
    assert torch.equal(whole[:, 23:], before[:, 23:]) and torch.equal(kept, before)


def test_what_is_made(monkeypatch):
    """The forward alone where no gradient is wanted; one fused pass where one is; two for none and for lse."""
    called = []
    for name in ("fwd", "bwd", "fwd_bwd", "scale_"):
        real = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *a, name=name, real=real: (called.append(name), real(*a))[1])
    x, y = make(3, 8)
    cross_entropy(x, y)
    with torch.no_grad():
        cross_entropy(x.requires_grad_(), y)
    assert called == ["fwd", "fwd"]
    called.clear()
    cross_entropy(x, y).backward()
    assert called == ["fwd_bwd", "scale_"]
    called.clear()
    cross_entropy(x, y, reduction="none").sum().backward()
    assert called == ["fwd", "bwd"]


@DEVICE_NAMES
def test_lse_is_differentiable(device):
    x, y = make(5, 31, device=device.torch_device)
    y[3] = -100
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with device.use():
        loss, lse = cross_entropy(a, y, return_lse=True)
        (loss + 0.1 * lse.square().mean()).backward()
    want = b.logsumexp(-1)[y >= 0]
    (F.cross_entropy(b, y) + 0.1 * want.square().sum() / 5).backward()
    torch.testing.assert_close(lse[y >= 0], want)
    torch.testing.assert_close(a.grad, b.grad)


@DEVICE_NAMES
@pytest.mark.parametrize("grad", [False, True])
def test_metrics(device, grad):
    """From the same pass; skipped rows 0 and -1; a zero weight is skipped."""
    x, y = make(6, 300, device=device.torch_device)
    y[1], y[2] = -100, x[2].argmax()
    w = torch.tensor([1.0, 1, 1, 1, 0, 2], device=x.device)
    x.requires_grad_(grad)
    with device.use(), support.poisoned():
        loss, m = cross_entropy(x, y, row_weight=w, return_metrics=True)
    live = torch.tensor([True, False, True, True, False, True])
    log_p = x.detach().cpu().log_softmax(-1)
    want = log_p.gather(-1, y.cpu().clamp(min=0)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    zero = torch.zeros(())
    torch.testing.assert_close(m.log_prob.cpu(), torch.where(live, want, zero))
    torch.testing.assert_close(m.loss.cpu(), torch.where(live, -want * w.cpu(), zero))
    torch.testing.assert_close(m.entropy.cpu(), torch.where(live, entropy, zero))
    torch.testing.assert_close(m.lse.cpu(), torch.where(live, x.detach().cpu().logsumexp(-1), zero))
    assert torch.equal(m.argmax.cpu(), torch.where(live, x.detach().cpu().argmax(-1), -1))
    assert m.accuracy.item() == pytest.approx((m.argmax == y)[live.to(x.device)].float().mean().item())
    assert loss.requires_grad == grad and not any(t.requires_grad for t in m)


@DEVICE_NAMES
def test_rows_without_weight_are_not_read(device):
    """NaN in rows of weight 0 and in rows without a label reaches nothing, whatever the options."""
    x, y = make(4, 50, device=device.torch_device)
    w = torch.tensor([1.0, 0.0, 1.0, 1.0], device=x.device)
    y[2] = -100
    x[1:3] = torch.nan
    options = dict(label_smoothing=0.1, z_loss=0.1, softcap=4.0, weight=torch.rand(50, device=x.device))
    for more in ({}, options):
        for reduction in ("mean", "none"):
            a = x.clone().requires_grad_()
            with device.use(), support.poisoned():
                loss = cross_entropy(a, y, row_weight=w, reduction=reduction, **more)
                loss.sum().backward()
            assert loss.isfinite().all() and a.grad.isfinite().all() and a.grad[1:3].abs().sum() == 0


@pytest.mark.parametrize("device", support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda")))
@pytest.mark.parametrize("filler", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of the very values
def test_rows_that_are_not_finite(device, filler):
    """They say so as the spec does, in the loss, in lse and in the gradient's places, and reach no other row."""
    x, y = make(4, 40)
    x[1, 35], x[2, :36], y[2] = filler, filler, 36
    if filler < 0:
        x[3] = filler
    with device.use(), support.poisoned():
        a = x.to(device.torch_device).requires_grad_()
        loss, lse = cross_entropy(a, y.to(a.device), reduction="none", return_lse=True)
        (grad,) = torch.autograd.grad(loss.sum(), a)
        (summed,) = torch.autograd.grad(cross_entropy(a, y.to(a.device), reduction="sum"), a)
    b = x.double().requires_grad_()
    want, want_lse = cross_entropy(b, y, reduction="none", return_lse=True, impl="spec")
    (want_grad,) = torch.autograd.grad(want.sum(), b)
    for got, exact in ((loss, want), (lse, want_lse), (grad, want_grad), (summed, want_grad)):
        torch.testing.assert_close(got.detach().cpu(), exact.detach().float(), equal_nan=True)


@DEVICE_NAMES
def test_labels_outside_touch_nothing(device):
    """NaN for their row only, for int32 and int64, far outside too; the buffer around the gradient stays."""
    for dtype, bad in ((torch.int32, 2**31 - 1), (torch.int64, 2**40), (torch.int64, 33)):
        x, y = make(3, 33, device=device.torch_device)
        y = y.to(dtype)
        y[1] = bad
        buffer = torch.full((5, 33), 7.0, device=x.device)
        buffer[1:4] = x
        leaf = buffer[1:4].requires_grad_()
        with device.use():
            loss = cross_entropy(leaf, y, torch.ones(33, device=x.device), label_smoothing=0.1, inplace=True)
            (grad,) = torch.autograd.grad(loss, leaf)
        assert loss.isnan() and grad.isnan().all(-1).tolist() == [False, True, False]
        assert (buffer[0] == 7).all() and (buffer[4] == 7).all()


def test_denominators():
    """A number or a tensor; accumulation over micro-batches reports the true mean (A2.12)."""
    x, y = make(8, 20)
    want = F.cross_entropy(x, y)
    for eight in (8, torch.tensor(8), torch.tensor([8.0])):
        parts = [cross_entropy(x[i : i + 2], y[i : i + 2], denominator=eight) for i in range(0, 8, 2)]
        torch.testing.assert_close(sum(parts), want)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@DEVICE_NAMES
def test_without_gradients(device, mode):
    x, y = make(3, 20, device=device.torch_device)
    x.requires_grad_()
    with device.use():
        with mode():
            loss, lse, m = cross_entropy(x, y, return_lse=True, return_metrics=True)
        assert not loss.requires_grad and torch.equal(lse, m.lse)
        cross_entropy(x, y).backward()
    assert x.grad is not None


@pytest.mark.parametrize("enabled", [False, True])
def test_autocast(enabled):
    """Logits as they come, accumulation in float32: what F.cross_entropy's cast to float32 gives."""
    x, y = make(4, 20)
    a, b = x.bfloat16().requires_grad_(), x.bfloat16().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        loss = cross_entropy(a, y)
    want = F.cross_entropy(b, y)
    (g,) = torch.autograd.grad(want, b)
    loss.backward()
    torch.testing.assert_close(loss, want)
    assert loss.dtype == torch.float32 and a.grad.dtype == torch.bfloat16
    torch.testing.assert_close(a.grad, g.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@DEVICE_NAMES
def test_fullgraph_with_every_option(device, reduction):
    torch._dynamo.reset()

    def fn(x, y, w):
        loss, m = cross_entropy(
            x, y, w, label_smoothing=0.1, z_loss=0.1, softcap=5.0, logit_scale=0.5, reduction=reduction,
            return_metrics=True,
        )  # fmt: skip
        return loss.sum(), m.accuracy

    x, y = make(5, 33, device=device.torch_device)
    y[0] = -100
    w = torch.rand(33, device=x.device)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with device.use():
        (la, aa), (lb, ab) = fn(a, y, w), torch.compile(fn, fullgraph=True, backend="aot_eager")(b, y, w)
        la.backward()
        lb.backward()
    torch.testing.assert_close(la, lb)
    assert torch.equal(aa, ab)
    torch.testing.assert_close(a.grad, b.grad)


def test_checkpoint_and_func():
    x, y = make(4, 20)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.utils.checkpoint.checkpoint(lambda t: cross_entropy(t * 2, y), a, use_reentrant=False).backward()
    F.cross_entropy(b * 2, y).backward()
    torch.testing.assert_close(a.grad, b.grad)
    grad = torch.func.grad(lambda t: cross_entropy(t, y, inplace=True))(x)
    torch.testing.assert_close(grad, torch.func.grad(lambda t: F.cross_entropy(t, y))(x))


@pytest.mark.parametrize("device", support.device_params(("cuda",)))
def test_more_than_2_31_logits(device):
    x, y = torch.randn(17000, 131072, device="cuda", dtype=torch.bfloat16), torch.arange(17000, device="cuda")
    a = x.requires_grad_()
    cross_entropy(a, y, reduction="sum").backward()
    for rows in (slice(0, 2), slice(16998, 17000)):
        b = x.detach()[rows].double().requires_grad_()
        F.cross_entropy(b, y[rows], reduction="sum").backward()
        torch.testing.assert_close(a.grad[rows].double(), b.grad, rtol=2**-7, atol=1e-9)


@pytest.mark.parametrize("device", support.device_params(("cuda",)))
def test_a_step_is_captured(device):
    """Nothing waits for the device, not even for a denominator: the whole step goes into a CUDA graph."""
    x, y = make(64, 5000, device="cuda")
    x.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            (want,) = torch.autograd.grad(cross_entropy(x, y, denominator=7), x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (got,) = torch.autograd.grad(cross_entropy(x, y, denominator=7), x)
    graph.replay()
    assert torch.equal(got, want)
