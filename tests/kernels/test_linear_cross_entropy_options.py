"""The sliced head's options: adapters, NF4, top-k labels, metrics, class weights, softcap; each against plain torch."""

import dataclasses
import importlib
import math

import plain_slices as plain
import pytest
import support
import torch
import torch.nn.functional as F
from test_linear_cross_entropy import Live, grads, make, problem
from torch.utils.flop_counter import FlopCounterMode

from riftco.functional import (
    GGUFWeight,
    dequantize_gguf,
    dequantize_nf4,
    linear_cross_entropy,
    lora_linear,
    quantize_nf4,
)
from riftco.kernels.gguf_linear.cases import random_blocks
from riftco.kernels.gguf_linear.formats import FORMATS
from riftco.kernels.linear_cross_entropy import cpu, head, slices, spec, vocabulary

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
OPTIONS = {
    "label_smoothing": dict(label_smoothing=0.2),
    "z_loss": dict(z_loss=0.3),
    "softcap": dict(softcap=3.0),
    "logit_scale": dict(logit_scale=0.6),
    "class_weight": dict(class_weight=torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.5])),
    "all": dict(
        label_smoothing=0.1, z_loss=0.1, softcap=4.0, logit_scale=1.7, class_weight=torch.linspace(0.1, 2.0, 7),
        row_weight=torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0]),
    ),
    "topk": dict(topk=torch.tensor([[0.5, 0.3, 0.2]]).expand(5, 3), softcap=4.0, logit_scale=0.8),
    "checkpoint": dict(checkpoint=True),
}  # fmt: skip


def labels(k=0):
    y = torch.tensor([3, 1, 0, -100, 6])
    return y if not k else torch.stack([y, torch.tensor([3, 2, 5, -1, 0]), torch.tensor([-100, 1, 6, -1, 6])], -1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_gradcheck(name, reduction):
    """x, weight, bias and the adapter, each option."""
    options = OPTIONS[name]
    y = labels(3 if "topk" in options else 0)
    sizes = ((5, 3), (7, 3), (7,), (2, 3), (7, 2))
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]

    def fn(x, weight, bias, a, b):
        return linear_cross_entropy(x, weight, y, bias, lora=(a, b, 0.7), reduction=reduction, **options)

    assert torch.autograd.gradcheck(fn, leaves)


@pytest.mark.parametrize("slice_bytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize("name", [n for n in OPTIONS if n != "checkpoint"])
def test_slices_in_float64(name, slice_bytes):
    """The sliced code itself, which float64 inputs of the public function bypass, against the meaning."""
    options = {**OPTIONS[name]}
    many = options.pop("topk", None)
    y = labels(0 if many is None else 3)
    x, weight, bias, a, b = (torch.randn(s, dtype=torch.float64) for s in ((5, 3), (7, 3), (7,), (2, 3), (7, 2)))
    p = problem(
        x, weight, y, bias, lora_a=a, lora_b=b, lora_scale=0.7, metrics=True, label_weight=many,
        slice_bytes=slice_bytes, **options,
    )  # fmt: skip
    module = plain
    for d_loss in (None, torch.randn(5, dtype=torch.float64)):
        got = module.backward(d_loss, *p, torch.float32, [True] * 5)
        want = spec.backward(d_loss, *p, torch.float32, [True] * 5)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-12)
    for g, w in zip(module.forward(*p), spec.forward(*p), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-12)


def test_options_are_pytorchs():
    x, weight, y = make(11)
    y[3] = -100
    w, bias = torch.rand(33), torch.randn(33)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    for reduction in ("mean", "sum", "none"):
        for more in (dict(label_smoothing=0.1), dict(weight=w), dict(weight=w, label_smoothing=0.3)):
            ours = {("class_weight" if k == "weight" else k): v for k, v in more.items()}
            got = linear_cross_entropy(x, weight, y, bias, reduction=reduction, slice_bytes=3000, **ours)
            want = F.cross_entropy(F.linear(x, weight, bias), y, reduction=reduction, **more)
            torch.testing.assert_close(got, want)
            for a, b in zip(grads(got.sum(), *leaves), grads(want.sum(), *leaves), strict=True):
                torch.testing.assert_close(a, b)
    z = 5 * torch.tanh(F.linear(x, weight) / 5)
    torch.testing.assert_close(linear_cross_entropy(x, weight, y, softcap=5.0), F.cross_entropy(z, y))
    lse = (F.linear(x, weight) * 0.5).logsumexp(-1)[y >= 0]
    want = F.cross_entropy(F.linear(x, weight) * 0.5, y) + 0.1 * lse.square().mean()
    torch.testing.assert_close(linear_cross_entropy(x, weight, y, logit_scale=0.5, z_loss=0.1), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [True, False])
def test_an_adapted_head_is_the_unfused_one(device, frozen):
    x, weight, y = make(4, 7, C=24, V=50, device=device.torch_device)
    y[0, :3] = -100
    a, b = torch.randn(5, 24, device=x.device) / 5, torch.randn(50, 5, device=x.device)
    leaves = [t.requires_grad_() for t in ((x, a, b) if frozen else (x, weight, a, b))]
    with device.use():
        logits = lora_linear(x, weight, a, b, scale=0.5)
        assert isinstance(logits, torch.Tensor)
        want = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        theirs = grads(want, *leaves)
        for slice_bytes in (1, 2000, 1 << 20):
            got = linear_cross_entropy(x, weight, y, lora=(a, b, 0.5), slice_bytes=slice_bytes)
            torch.testing.assert_close(got, want)
            for g, w in zip(grads(got, *leaves), theirs, strict=True):
                torch.testing.assert_close(g, w, rtol=2e-5, atol=2e-6)


def test_adapter_alone_trains():
    """x and W frozen: gradients of A and B only; float32 adapters on a bfloat16 head stay float32."""
    x, weight, y = make(9, C=16, dtype=torch.bfloat16)
    a, b = torch.randn(3, 16, requires_grad=True), torch.randn(33, 3, requires_grad=True)
    d_a, d_b = grads(linear_cross_entropy(x, weight, y, lora=(a, b, 1.5)), a, b)
    assert d_a.dtype == d_b.dtype == torch.float32
    wide = [t.detach().double().requires_grad_() for t in (a, b)]
    want = F.cross_entropy(x.double() @ weight.double().t() + 1.5 * (x.double() @ wide[0].t()) @ wide[1].t(), y)
    for g, w in zip((d_a, d_b), grads(want, *wide), strict=True):
        assert (g - w).norm() < 0.02 * w.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [6, 90])
def test_an_nf4_head_is_the_dequantised_one(device, rows):
    x, weight, y = make(rows, C=64, V=70, device=device.torch_device)
    y[1] = -100
    bias = torch.randn(70, device=x.device)
    leaves = [t.requires_grad_() for t in (x, bias)]
    with device.use():
        q = quantize_nf4(weight)
        dense = dequantize_nf4(q, torch.float32)
        for slice_bytes in (5000, 1 << 20):
            got, want = (linear_cross_entropy(x, w, y, bias, slice_bytes=slice_bytes) for w in (q, dense))
            torch.testing.assert_close(got, want)
            for g, w in zip(grads(got, *leaves), grads(want, *leaves), strict=True):
                torch.testing.assert_close(g, w)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["Q8_0", "Q4_1", "Q6_K"])
def test_a_gguf_head_is_the_dequantised_one(device, format):
    """Its adapter, softcap and metrics too; the packed bytes get no gradient."""
    C = FORMATS[format].block * 2
    packed = random_blocks(format, 70 * 2, torch.Generator().manual_seed(0)).view(70, -1)
    q = GGUFWeight(packed, format, (70, C)).to(device.torch_device)
    x, _, y = make(40, C=C, V=70, device=device.torch_device)
    y[1] = -100
    x = x / C
    a, b, bias = (torch.randn(s, device=x.device) / 4 for s in ((3, C), (70, 3), (70,)))
    leaves = [t.requires_grad_() for t in (x, bias, a, b)]
    options = {"lora": (a, b, 0.5), "softcap": 6.0, "return_metrics": True}
    with device.use(), support.poisoned():
        dense = dequantize_gguf(q, torch.float32)
        for slice_bytes, reduction in ((9000, "mean"), (1 << 20, "none")):
            more = {**options, "slice_bytes": slice_bytes, "reduction": reduction}
            (got, metrics), (want, _) = (linear_cross_entropy(x, w, y, bias, **more) for w in (q, dense))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
            assert metrics.argmax.shape == y.shape
            for g, w in zip(grads(got.sum(), *leaves), grads(want.sum(), *leaves), strict=True):
                torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5 * float(w.abs().max().clamp(min=1)))


def test_a_head_that_is_no_weight_is_refused():
    x, _, y = make(3)
    with pytest.raises(ValueError, match=r"weight must be floating \[V, C\], an NF4Weight or a GGUFWeight; got list"):
        linear_cross_entropy(x, [1.0], y)


@pytest.mark.parametrize("device", DEVICES)
def test_topk(device):
    """Equal labels add; labels that are ignored carry nothing; one label is plain cross-entropy."""
    x, weight, y = make(3, 5, device=device.torch_device)
    ids = torch.randint(0, 33, (3, 5, 4), device=x.device)
    ids[..., 3] = ids[..., 0]
    ids[0, 0, 1], ids[1, 2] = -100, -1
    w = torch.rand(3, 5, 4, device=x.device)
    w[2, 2] = 0
    leaves = [t.requires_grad_() for t in (x, weight)]
    with device.use(), support.poisoned():
        log_p = F.linear(x, weight).log_softmax(-1)
        picked = log_p.gather(-1, ids.clamp(min=0)) * torch.where(ids >= 0, w, 0.0)
        want = -picked.sum(-1)
        got = linear_cross_entropy(x, weight, ids, topk=w, reduction="none", slice_bytes=900)
        torch.testing.assert_close(got, want)
        mean = linear_cross_entropy(x, weight, ids, topk=w, slice_bytes=900)
        torch.testing.assert_close(mean, want.sum() / 13)
        for g, h in zip(grads(mean, *leaves), grads(want.sum() / 13, *leaves), strict=True):
            torch.testing.assert_close(g, h)
        one = linear_cross_entropy(x, weight, y.unsqueeze(-1), topk=torch.ones_like(w[..., :1]))
        torch.testing.assert_close(one, linear_cross_entropy(x, weight, y))
        moved = linear_cross_entropy(x, weight, ids, topk=w, shift=True, reduction="none")
        ids[1, 1, 0] = 33
        bad = linear_cross_entropy(x, weight, ids, topk=w, reduction="none")
        assert bad.isnan().nonzero().tolist() == [[1, 1]]
        (d_x,) = grads(bad.sum(), x)
        assert d_x.isnan().any(-1).nonzero().tolist() == [[1, 1]]
    assert moved.shape == (3, 5) and (moved[:, -1] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [True, False])
def test_metrics(device, trained):
    x, weight, y = make(4, 6, device=device.torch_device)
    y[1, :3] = -100
    x.requires_grad_(trained)
    with device.use(), support.poisoned():
        loss, lse, m = linear_cross_entropy(
            x, weight, y, slice_bytes=4000, return_lse=True, return_metrics=True
        )  # fmt: skip
    log_p = F.linear(x, weight).log_softmax(-1).detach()
    live = y >= 0
    torch.testing.assert_close(m.loss.sum() / 21, loss.detach())
    torch.testing.assert_close(m.lse, torch.where(live, F.linear(x, weight).detach().logsumexp(-1), 0.0))
    assert torch.equal(m.lse, lse)
    torch.testing.assert_close(m.log_prob, torch.where(live, log_p.gather(-1, y.clamp(min=0)[..., None])[..., 0], 0.0))
    torch.testing.assert_close(m.entropy, torch.where(live, -(log_p.exp() * log_p).sum(-1), 0.0))
    assert torch.equal(m.argmax, torch.where(live, log_p.argmax(-1), -1))
    assert m.accuracy == ((log_p.argmax(-1) == y) & live).sum() / 21
    assert not any(t.requires_grad for t in m) and loss.requires_grad == trained


@pytest.mark.parametrize("device", DEVICES)
def test_float16_gradients_of_a_mean_do_not_vanish(device):
    """Loss scaling works: a mean over many rows, its gradient scaled by 2^16, once and again with retain_graph."""
    x, weight, y = make(64, C=16, V=300, dtype=torch.float16, device=device.torch_device)
    leaves = [t.requires_grad_() for t in (x, weight)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = grads(F.cross_entropy(F.linear(*wide), y, reduction="sum") / 2**20 * 2**16, *wide)
    with device.use():
        for options in (dict(), dict(checkpoint=True)):
            loss = linear_cross_entropy(x, weight, y, denominator=2**20, **options) * 2**16
            first = grads(loss, *leaves, retain_graph=True)
            again = grads(loss, *leaves)
            for a, b, w in zip(first, again, want, strict=True):
                assert torch.equal(a, b)
                assert (a - w).norm() < 0.004 * w.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_confident_rows(device):
    """p = 0.9, 0.99, 0.999 of the target: p - 1 and the loss to float32's precision."""
    gap = torch.tensor([math.log(p / (1 - p)) for p in (0.9, 0.99, 0.999, 0.5)], device=device.torch_device)
    weight = torch.tensor([[1.0], [0.0]], device=gap.device)
    x = (gap[:, None] + 0.0).requires_grad_()
    y = torch.zeros(4, dtype=torch.long, device=gap.device)
    with device.use():
        loss = linear_cross_entropy(x, weight, y, reduction="none", z_loss=1e-9)
    (d_x,) = grads(loss.sum(), x)
    exact = x.detach().double()
    torch.testing.assert_close(loss.double(), F.softplus(-exact[:, 0]), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(d_x.double(), -torch.sigmoid(-exact), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
def test_confident_rows_in_bf16(device, p):
    """p - 1 is rounded to bfloat16 once, at the end: every element of the gradient within one rounding."""
    C = V = 70
    x = torch.randn(4, C).bfloat16()
    x[:, 0] = (x.double()[:, 1:].logsumexp(-1) + math.log(p / (1 - p))).bfloat16()
    weight = torch.eye(V, C).bfloat16().to(device.torch_device)  # the logits are x itself
    y = torch.zeros(4, dtype=torch.long)
    wide = x.double().requires_grad_()
    (want,) = grads(F.cross_entropy(wide, y), wide)
    a = x.to(weight.device).requires_grad_()
    with device.use():
        (got,) = grads(linear_cross_entropy(a, weight, y.to(a.device), slice_bytes=300), a)
    torch.testing.assert_close(got.cpu().double(), want, rtol=2**-6, atol=1e-30)


@pytest.mark.parametrize("name", ["many slices", "every option", "top-k", "adapter", "metrics"])
@pytest.mark.parametrize("device", support.device_params(("cpu", "cpu-triton", "cuda")))
def test_rows_of_the_buffer_may_lie_apart(device, name, monkeypatch):
    """An odd vocabulary's rows are padded; what lies between them is never read."""
    monkeypatch.setattr(head, "WORTH_FROM", 1)
    cases = support.rooms()["linear_cross_entropy"]
    case = next(c for c in cases.CASES if c.name == name)
    case = dataclasses.replace(case, options={k: v << 1 if k == "slice_bytes" else v for k, v in case.options.items()})
    with device.use():
        p = slices.Problem(*problem(*make(3, C=8, V=case.shape["V"])))
        made = head.Head(p)
        made.reserve(2)
    assert made.width % head.LINE == 0 and made.buffer.stride() == (made.width, 1) and made.buffer.shape[1] == p.V
    for dtype in (torch.float32, torch.bfloat16):
        support.check_case(cases, case, dtype, device)


def test_narrowing_in_place():
    for n in (1, 2, 3, 1000, 1023):
        wide = torch.randn(n, 3)
        for dtype in (torch.bfloat16, torch.float16):
            copy = wide.clone()
            narrow = head._narrowed(copy, dtype)
            assert torch.equal(narrow, wide.to(dtype)) and narrow.data_ptr() == copy.data_ptr()


def test_zero_weight_rows_are_not_multiplied():
    """Counted by the bytes of the matmuls: half of the rows, half of the work."""
    x, weight, y = make(64, C=8, V=40)
    w = torch.ones(64)
    w[::2] = 0

    def work(row_weight=None):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            cpu.backward(None, *problem(x, weight, y, None, row_weight), torch.float32, [True, True, *[False] * 3])
        return counter.get_total_flops()

    assert work(w) * 2 == work() == 3 * 2 * 64 * 8 * 40
    y[::2] = -100
    assert work() == 3 * 64 * 8 * 40


def test_errors():
    x, weight, y = make(4)
    a, b = torch.randn(2, 8), torch.randn(33, 2)
    w = torch.ones(4, 2)
    ids = y[:, None].expand(4, 2)
    for bad, text in [
        (dict(lora=(a[:, :3], b, 1.0)), r"lora must be \(A \[R, 8\]"),
        (dict(lora=(a, b[:5], 1.0)), r"B \[33, R\]"),
        (dict(lora=(a, b, math.nan)), "scale must be finite"),
        (dict(lora=(a.long(), b, 1.0)), "floating"),
        (dict(label_smoothing=1.5), "label_smoothing"),
        (dict(softcap=0.0), "softcap"),
        (dict(logit_scale=0.0), "logit_scale"),
        (dict(logit_scale=1e39), "logit_scale must be positive and finite in float32"),
        (dict(z_loss=math.inf), "z_loss"),
        (dict(class_weight=torch.ones(3)), r"class_weight must be floating \(33,\)"),
        (dict(class_weight=torch.ones(33, requires_grad=True)), "class_weight is not differentiable"),
        (dict(topk=w), "with topk, target"),
    ]:
        with pytest.raises(ValueError, match=text):
            linear_cross_entropy(x, weight, y, **bad)
    for more, text in [
        (dict(topk=w.double()), "topk must be float32"),
        (dict(topk=w, label_smoothing=0.1), "topk cannot be used with"),
    ]:
        with pytest.raises(ValueError, match=text):
            linear_cross_entropy(x, weight, ids, **more)
    with pytest.raises(ValueError, match=r"weight must be \[V, C\] with x's C = 8; got \(33, 9\)"):
        linear_cross_entropy(x, quantize_nf4(torch.randn(33, 9)), y)


@pytest.mark.parametrize("module", ["cpu", "plain", "cuda"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["plain", "z_loss", "softcap", "logit_scale", "class_weight", "weighted"])
def test_blocks_of_classes(name, masked, module):
    """The vocabulary-major order gives what slices of rows give, within bfloat16's rounding of float64."""
    options = {**OPTIONS, "plain": {}, "weighted": dict(row_weight=torch.rand(40))}[name]
    V = 700
    if "class_weight" in options:
        options = dict(class_weight=torch.rand(V))
    x, weight, y = make(40, C=24, V=V, dtype=torch.bfloat16)
    y[3] = -100
    if masked:
        y[10:20] = -100
    a, b = torch.randn(3, 24) / 5, torch.randn(V, 3)
    bias, d_loss = torch.randn(V).bfloat16(), torch.rand(40)
    name = "plain_slices" if module == "plain" else f"riftco.kernels.linear_cross_entropy.{module}"
    call = importlib.import_module(name).LOSS
    device = next(d for d in support.DEVICES if d.name == "cpu-triton")
    if module == "cuda" and not device.available:
        pytest.skip(device.why_not)
    p = problem(
        x, weight, y, bias, lora_a=a, lora_b=b, lora_scale=0.7, metrics=True, slice_bytes=40_000,
        n_labelled=-1 if masked else None, **options,
    )  # fmt: skip
    wide = p._replace(**{n: getattr(p, n).double() for n in ("x", "weight", "bias", "lora_a", "lora_b")})
    blocks = dataclasses.replace(call, vocabulary_below=1 << 30, most_bytes=None)
    count = 40 if masked else 39
    assert vocabulary.why_not(p, count, 2, 1 << 30, True, torch.float32) == ""
    for needs in ([True] * 5, [False, True, False, False, False]):
        want = spec.backward(d_loss.double(), *wide, torch.float32, needs)
        rows = slices.backward(call, d_loss, *p, torch.float32, needs)
        got = slices.backward(blocks, d_loss, *p, torch.float32, needs)
        for i, (g, r, w) in enumerate(zip(got, rows, want, strict=True)):
            assert g.dtype == r.dtype and g.shape == r.shape
            if i == 4:
                assert (g == w).float().mean() > 0.9  # argmax of rounded logits
            elif g.numel():
                error, usual = (g - w).norm() / w.norm(), (r - w).norm() / w.norm()
                assert error <= 2 * usual + 1e-6, (i, error, usual)


def test_blocks_of_classes_with_an_adapter_of_rank_0():
    x, weight, y = make(40, C=24, V=700, dtype=torch.bfloat16)
    blocks = dataclasses.replace(cpu.LOSS, vocabulary_below=1 << 30, most_bytes=None)
    p = problem(x, weight, y, lora_a=torch.randn(0, 24), lora_b=torch.randn(700, 0), slice_bytes=40_000)
    plain = p._replace(lora_a=None, lora_b=None)
    got = slices.backward(blocks, None, *p, torch.float32, [True] * 2 + [False] + [True] * 2)
    want = slices.backward(blocks, None, *plain, torch.float32, [True] * 2 + [False] * 3)
    assert torch.equal(got[5], want[5]) and torch.equal(got[6], want[6])
    assert got[8].shape == (0, 24) and got[9].shape == (700, 0)


def test_order_says_why():
    x, weight, y = make(40, C=24, V=700, dtype=torch.bfloat16)
    p = problem(x, weight, y)
    for changed, arguments, text in [
        (p, (40, 20, 512, False, torch.float32), "frozen"),
        (p, (1024, 2, 512, True, torch.float32), "1024 rows in 2 slices"),
        (p, (40, 20, 0, True, torch.float32), "40 rows in 20 slices"),
        (p._replace(label_smoothing=0.1), (40, 20, 512, True, torch.float32), "label_smoothing"),
        (p, (40, 20, 512, True, torch.bfloat16), "only a bfloat16 head"),
        (p, (4000, 20, 512, True, torch.float32), "larger than those of dW"),
    ]:
        assert text in vocabulary.why_not(changed, *arguments)


@pytest.mark.parametrize("module", [cpu, plain])
@pytest.mark.parametrize(
    "options",
    [dict(softcap=5.0), dict(metrics=True), dict(label_smoothing=0.1, z_loss=0.1), dict(R=4), dict(k=3)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_with_options(module, options, dtype):
    """The peak stays slice_bytes, the gradients and O(rows), whatever the loss needs beside the logits."""
    N, C, V, slice_bytes = 512, 16, 4000, 1 << 20
    x, weight, y = make(N, C=C, V=V, dtype=dtype)
    y[::7] = -100
    more = {k: v for k, v in options.items() if k not in ("R", "k")}
    needs = [True, False, False, "R" in options, "R" in options]
    if "R" in options:
        more |= dict(lora_a=torch.randn(4, C), lora_b=torch.randn(V, 4))
    if "k" in options:
        y = y[:, None].expand(N, 3).contiguous()
        more |= dict(label_weight=torch.rand(N, 3))
    p = problem(x, weight, y, slice_bytes=slice_bytes, **more)
    with Live() as live, torch.no_grad():
        module.backward(None, *p, torch.float32, needs)
    adapter = 4 * (V + C) * (4 + 2 * dtype.itemsize) if "R" in options else 0
    widened = slice_bytes if "R" in options and dtype == torch.bfloat16 else 0  # d_B's operands; see head.accumulate
    assert live.peak - x.nbytes <= slice_bytes + 300 * N + adapter + widened
    assert live.peak > slice_bytes / 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mib", [8, 64])
@pytest.mark.parametrize("frozen", [True, False])
def test_memory_on_a_gpu(mib, frozen):
    """slice_bytes, the gradients (weight's in float32 at most) and O(rows); small slices take blocks of classes."""
    N, C, V = 2048, 512, 64_000
    x, weight, y = make(N, C=C, V=V, dtype=torch.bfloat16, device="cuda")
    x.requires_grad_(), weight.requires_grad_(not frozen)
    for _ in range(2):  # the first call makes cuBLAS's workspace
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        linear_cross_entropy(x, weight, y, slice_bytes=mib << 20).backward()
    torch.cuda.synchronize()
    wanted = x.nbytes + (0 if frozen else 4 * V * C)
    assert torch.cuda.max_memory_allocated() - base <= wanted + (mib << 20) + 300 * N + (2 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_more_than_2_31_logits_on_a_gpu():
    """N x V past 2^31: the last rows' gradient is that of the same rows alone."""
    x, weight, y = make(16_500, C=16, V=131_072, dtype=torch.bfloat16, device="cuda")
    x.requires_grad_()
    (g,) = grads(linear_cross_entropy(x, weight, y, reduction="sum", slice_bytes=8 << 30), x)
    tail = x.detach()[-100:].requires_grad_()
    (h,) = grads(linear_cross_entropy(tail, weight, y[-100:], reduction="sum"), tail)
    torch.testing.assert_close(g[-100:], h, rtol=0.02, atol=1e-3)
