"""Cross-entropy beyond the conformance cases: gradcheck, contract, strides, edges, planted bugs."""

import pytest
import support
import torch
import torch.nn.functional as F

from riftco import nn
from riftco.functional import cross_entropy
from riftco.kernels.cross_entropy import cases, op

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))


def logits_and_target(*shape, dtype=torch.float32, device="cpu"):
    x = (3 * torch.randn(*shape, dtype=torch.float64)).to(device, dtype)
    y = torch.randint(0, shape[-1], shape[:-1], device=device)
    return x, y


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(reduction, weighted):
    x, y = logits_and_target(5, 7, dtype=torch.float64)
    y[1] = -100
    w = torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0]) if weighted else None
    assert torch.autograd.gradcheck(
        lambda t: cross_entropy(t, y, row_weight=w, reduction=reduction), x.requires_grad_()
    )


@pytest.mark.parametrize("shape", [(10, 5), (30000, 2)])
def test_finite_differences_with_masked_rows(shape):
    x, y = logits_and_target(*shape, dtype=torch.float64)
    y[::3] = -1
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda t: cross_entropy(t, y), x, fast_mode=True)


def test_is_pytorch():
    x, y = logits_and_target(4, 6, 11)
    y[0, 0] = -100
    for reduction in ("mean", "sum", "none"):
        want = F.cross_entropy(x.movedim(-1, 1), y, reduction=reduction)
        torch.testing.assert_close(cross_entropy(x, y, reduction=reduction), want)
        torch.testing.assert_close(nn.CrossEntropyLoss(reduction=reduction)(x.movedim(-1, 1), y), want)


def test_opcheck():
    x, y = logits_and_target(7, 33)
    w = torch.rand(7)
    options = (-100, 0.1, 0.01, 5.0, 0.7)
    for weight, class_weight, metrics in ((None, None, False), (w, torch.rand(33), True)):
        rows = (y, weight, class_weight)
        _, top, log_total, *_ = op.fwd(x, *rows, *options, metrics)
        torch.library.opcheck(op.fwd, (x, *rows, *options, metrics))
        torch.library.opcheck(op.bwd, (torch.randn(7), torch.randn(7), x, *rows, top, log_total, *options))
        torch.library.opcheck(op.fwd_bwd, (x, *rows, torch.randn(7), *options, metrics))
        torch.library.opcheck(op.fwd_bwd_, (x.clone(), *rows, torch.randn(7), *options, metrics))
    torch.library.opcheck(op.scale_, (x.clone(), torch.tensor(2.0)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()
    fn = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for n in (7, 12):
            x, y = logits_and_target(n, 33, device=device.torch_device)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            la, lb = cross_entropy(a, y), fn(b, y)
            la.backward()
            lb.backward()
            if device.name in ("cpu-triton", "cuda"):  # the rows' losses are added in another order
                torch.testing.assert_close(la, lb, rtol=2.4e-7, atol=0)
            else:
                assert torch.equal(la, lb)
            torch.testing.assert_close(a.grad, b.grad)  # one pass here, two there


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Slices, transposes, expanded rows and offsets give what a contiguous copy gives."""
    wide, _ = logits_and_target(4, 9, 40, device=device.torch_device)
    views = {
        "shifted": wide[:, :-1],
        "columns": wide[..., 3:20],
        "transposed": wide.transpose(0, 1),
        "classes first": wide.movedim(-1, 1)[:, :5].movedim(1, -1).movedim(-1, 1).movedim(1, -1),
        "class stride": wide.movedim(0, -1),
        "expanded": wide[:1].expand(3, 9, 40),
        "four dimensions": wide.reshape(2, 2, 9, 40)[:, :, 1::2],
    }
    with device.use():
        for name, x in views.items():
            y = torch.randint(0, x.shape[-1], x.shape[:-1], device=x.device)
            a, b = x.detach().requires_grad_(), x.detach().contiguous().requires_grad_()
            la, lb = (cross_entropy(t, y, reduction="none") for t in (a, b))
            la.square().sum().backward()
            lb.square().sum().backward()
            assert torch.equal(la, lb) and torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device):
    """Zero rows, nothing labelled, a target past the vocabulary, -inf logits."""
    d = device.torch_device
    with device.use(), support.poisoned():
        empty = torch.randn(0, 5, device=d, requires_grad=True)
        cross_entropy(empty, torch.zeros(0, dtype=torch.long, device=d)).backward()
        assert empty.grad.shape == (0, 5)
        x, y = logits_and_target(3, 8, device=d)
        x.requires_grad_()
        loss = cross_entropy(x, torch.full_like(y, -100))
        loss.backward()
        assert loss.item() == 0 and x.grad.abs().max() == 0
        y[1] = 8
        x.grad = None
        loss = cross_entropy(x, y, reduction="none")
        loss.sum().backward()
        assert loss.isnan().tolist() == [False, True, False]
        assert x.grad.isnan().all(-1).tolist() == [False, True, False]
        masked, y = logits_and_target(2, 9000, device=d)
        masked[0, :5000] = -torch.inf
        y[0] = 6000
        torch.testing.assert_close(cross_entropy(masked, y), F.cross_entropy(masked, y))


@pytest.mark.parametrize("device", DEVICES)
def test_row_weight_is_a_step_size(device):
    """Weights 2,2 are twice the step; 1,0 is half of row 0's own step; a zero weight hides NaN logits."""
    x, y = logits_and_target(2, 12, device=device.torch_device)

    def grad(rows, weights):
        t = x[rows].clone().requires_grad_()
        w = None if weights is None else torch.tensor(weights, device=t.device)
        with device.use():
            cross_entropy(t, y[rows], row_weight=w).backward()
        return t.grad

    both = slice(0, 2)
    torch.testing.assert_close(grad(both, [2.0, 2.0]), 2 * grad(both, None))
    torch.testing.assert_close(grad(both, [1.0, 0.0])[:1], grad(slice(0, 1), None) / 2)
    x[1] = torch.nan
    assert grad(both, [1.0, 0.0]).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_two_backward_passes_and_a_saved_input(device):
    x, y = logits_and_target(4, 20, device=device.torch_device)
    x.requires_grad_()
    with device.use():
        loss = cross_entropy(x, y)
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        kept = first.clone()
        (second,) = torch.autograd.grad(3 * loss, x)
    assert torch.equal(first, kept)
    torch.testing.assert_close(second, 3 * first)


def test_modes():
    x, y = logits_and_target(4, 20)
    with torch.inference_mode():
        a = cross_entropy(x, y)
    with torch.no_grad():
        assert torch.equal(cross_entropy(x, y), a) and not cross_entropy(x.requires_grad_(), y).requires_grad
    grad = torch.func.grad(lambda t: cross_entropy(t, y))(x.detach())
    torch.testing.assert_close(grad, torch.func.grad(lambda t: F.cross_entropy(t, y))(x.detach()))
    with torch.autocast("cpu", torch.bfloat16):
        assert cross_entropy(x.bfloat16(), y).dtype == torch.float32
    d = x.detach().double().requires_grad_()
    (g,) = torch.autograd.grad(cross_entropy(d, y), d, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    assert torch.autograd.gradgradcheck(lambda t: cross_entropy(t, y, impl="spec"), d)


def test_errors(monkeypatch):
    x, y = logits_and_target(4, 20)
    for bad, text in [
        (lambda: cross_entropy(x, y[:3]), r"\(4,\); got \(3,\)"),
        (lambda: cross_entropy(x, y.float()), "probabilities"),
        (lambda: cross_entropy(x, y.to(torch.int16)), "int32 or int64"),
        (lambda: cross_entropy(x, y, torch.ones(3)), r"weight must be floating \(20,\)"),
        (lambda: cross_entropy(x, y, label_smoothing=1.5), "label_smoothing"),
        (lambda: cross_entropy(x, y, softcap=-1.0), "softcap"),
        (lambda: cross_entropy(x, y, logit_scale=0.0), "logit_scale"),
        (lambda: cross_entropy(x, y, z_loss=float("nan")), "z_loss"),
        (lambda: cross_entropy(x, y, denominator=torch.ones(4)), "denominator must be one value"),
        (lambda: cross_entropy(x, y, torch.ones(20, requires_grad=True)), "weight is not differentiable"),
        (lambda: cross_entropy(x, y, inplace=True, reduction="none"), "inplace=True belongs"),
        (lambda: cross_entropy(x, y, inplace=True, return_lse=True), "inplace=True leaves no logits"),
        (lambda: cross_entropy(x[:1].expand(4, 20), y, inplace=True), "expanded"),
        (lambda: cross_entropy(x.long(), y), "floating"),
        (lambda: cross_entropy(x, y, reduction="avg"), "'avg'"),
        (lambda: cross_entropy(x, y, row_weight=torch.ones(4, dtype=torch.float16)), "row_weight must be float32"),
        (lambda: cross_entropy(x, y, reduction="sum", denominator=3), "denominator"),
        (lambda: cross_entropy(x, y.to("meta")), "target on meta"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    y[2] = 20
    with pytest.raises(IndexError, match="target 20 in row 2, but there are 20"):
        cross_entropy(x, y)


@pytest.mark.parametrize(
    "module,old,new,case",
    [
        ("rows", "d = tl.where(v == y, hot, d)", "d = tl.where(v == y, -hot, d)", "odd sizes"),
        ("rows", "tl.store(g_row + y * stride_g, hot", "tl.store(g_row + y * stride_g, a", "own denominator"),
        ("pieces", "    s = s * decay + tl", "    s = s + tl", "several blocks of V"),
        ("pieces", "LEAN and here:  #", "LEAN and y < 0:  #", "odd sizes"),
        ("pieces", "e = tl.where(v == y, 0.0, e)", "e = e", "smoothing"),
        ("rows", "lse * lse)) * row_weight", "lse * lse))", "row weights, none"),
        ("rows", "up = (tl.load(up_ptr + n * stride_up).to(tl.float32) if HAS_UP else 0.0)",
         "up = (tl.load(up_ptr).to(tl.float32) if HAS_UP else 0.0)", "odd sizes"),
        ("pieces", "g -= even * class", "g += even * class", "smoothing and class weights"),
        ("pieces", "g *= 1 - (u / cap) * (u / cap)", "g *= 1 + (u / cap) * (u / cap)", "softcap"),
        ("pieces", "at = tl.where(top > best, first, at)", "at = first", "metrics, several blocks"),
        ("pieces", "h = (h + s * tl.where(s > 0, m - new, 0.0)) * decay", "h = h * decay", "metrics, several blocks"),
        ("pieces", "over += 2 * z_loss", "over += z_loss", "z_loss"),
        ("pieces", "- a * rest_p", "- a", "own denominator"),
        ("rows", "V, smoothing, CLASS, SMOOTH)\n        if", "V, 0.0, CLASS, SMOOTH)\n        if", "smoothing"),
    ],
)  # fmt: skip
def test_planted_bugs(module, old, new, case):
    support.assert_caught(cases, f"riftco.kernels.cross_entropy.cuda.{module}", old, new, case)


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("others, e_y = u.scatter_(-1, at, -torch.inf)", "others, e_y = u", "odd sizes"),
        ("2 * call.z_loss * lse", "call.z_loss * lse", "z_loss, none"),
        ("1 - call.label_smoothing) * w * up", "1 - call.label_smoothing) * up", "class weights"),
        ("u.sub_(even if call", "u.add_(even if call", "smoothing"),
        ("call.dropped.unsqueeze(-1), 0.0", "call.dropped.unsqueeze(-1), 1.0", "row weights, none"),
    ],
)
def test_planted_bugs_cpu(old, new, case):
    support.assert_caught(cases, "riftco.kernels.cross_entropy.cpu", old, new, case, device="cpu")
