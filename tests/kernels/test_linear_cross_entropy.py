"""Linear + cross-entropy beyond the conformance cases: memory, slices, dropped rows, gradients, modes, planted bugs."""

import plain_slices as plain
import pytest
import support
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from riftco import nn
from riftco.functional import linear_cross_entropy, quantize_nf4
from riftco.kernels.linear_cross_entropy import cases, cpu, op, spec
from riftco.kernels.linear_cross_entropy.problem import Problem
from riftco.metal import linear_cross_entropy as on_metal

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
EMULATED = support.device_params(("mps-emulated",))


def make(*shape, C=8, V=33, dtype=torch.float32, device="cpu"):
    x = torch.randn(*shape, C, dtype=torch.float64).to(device, dtype)
    weight = (torch.randn(V, C, dtype=torch.float64) / 2).to(device, dtype)
    return x, weight, torch.randint(0, V, shape, device=device)


def problem(x, weight, target, bias=None, row_weight=None, slice_bytes=1 << 20, n_labelled=None, **fields) -> Problem:
    none = dict.fromkeys(("absmax", "class_weight", "label_weight", "lora_a", "lora_b"))
    plain = dict(
        kind="dense", block_size=0, lora_scale=1.0, label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0
    )
    plain |= dict(ignore_index=-100, metrics=False, V=weight.shape[0], slice_bytes=slice_bytes, n_labelled=n_labelled)
    given = dict(x=x, weight=weight, target=target, bias=bias, row_weight=row_weight)
    return Problem(**{**none, **plain, **given, **fields})


def grads(loss, *leaves, **options):
    return torch.autograd.grad(loss, leaves, **options)


def plain_torch(x, weight, target, bias=None, **options):
    return F.cross_entropy(F.linear(x, weight, bias).movedim(-1, 1), target, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(reduction, weighted):
    x, weight, y = make(5, C=3, V=7, dtype=torch.float64)
    y[1] = -100
    w = torch.tensor([1.0, 2.0, 0.0, 0.5, 3.0]) if weighted else None
    leaves = [t.requires_grad_() for t in (x, weight, torch.randn(7, dtype=torch.float64))]
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: linear_cross_entropy(x, weight, y, bias, row_weight=w, reduction=reduction), leaves
    )


@pytest.mark.parametrize("n_labelled", [None, -1, 9])
def test_slices_in_float64(n_labelled):
    """The sliced code itself, which float64 inputs of the public function bypass, to float64's precision."""
    module = plain
    x, weight, y = make(3, 4, dtype=torch.float64)
    y[0, 1] = y[2, 3] = -100
    y[1, 1] = -1
    bias, w, d_loss = (
        torch.randn(33, dtype=torch.float64),
        torch.rand(3, 4),
        torch.randn(3, 4, dtype=torch.float64),
    )
    w[1, 2] = 0
    rows = problem(x, weight, y, bias, w, 3000, n_labelled)
    for got, want in zip(module.forward(*rows), spec.forward(*rows), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    options = (*rows, torch.float32, [True, True, True, False, False])
    for upstream in (None, d_loss):
        for got, want in zip(module.backward(upstream, *options), spec.backward(upstream, *options), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_is_pytorch():
    x, weight, y = make(4, 6)
    y[0, 0] = -100
    bias = torch.randn(33)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    for reduction in ("mean", "sum", "none"):
        want = plain_torch(x, weight, y, bias, reduction=reduction)
        got = linear_cross_entropy(x, weight, y, bias, reduction=reduction, slice_bytes=700)
        torch.testing.assert_close(got, want)
        for a, b in zip(grads(got.sum(), *leaves), grads(want.sum(), *leaves), strict=True):
            torch.testing.assert_close(a, b)


def test_module_is_pytorchs():
    ours = nn.LinearCrossEntropyLoss(8, 33, bias=True)
    theirs = torch.nn.Linear(8, 33)
    theirs.load_state_dict(ours.linear.state_dict())
    x, _, y = make(11)
    a, b = ours(x, y), F.cross_entropy(theirs(x), y)
    a.backward()
    b.backward()
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(ours.linear.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.linear.bias.grad, theirs.bias.grad)


def test_opcheck():
    x, weight, y = make(7)
    y[2] = -100
    for bias, w in ((None, None), (torch.randn(33), torch.rand(7))):
        rows = problem(x, weight, y, bias, w, 400)
        torch.library.opcheck(op.fwd, rows)
        for needs in ([True, True, bias is not None, False, False], [False, True, False, False, False]):
            torch.library.opcheck(op.bwd, (None, *rows, torch.float32, needs))
        torch.library.opcheck(op.bwd, (torch.randn(7), *rows, torch.float32, [True, False, False, False, False]))
    codes = quantize_nf4(weight)
    everything = problem(
        x, codes.codes, y, torch.randn(33), lora_a=torch.randn(3, 8), lora_b=torch.randn(33, 3), absmax=codes.scale,
        V=33, kind="nf4_linear", block_size=64, metrics=True, softcap=3.0, z_loss=0.1, class_weight=torch.rand(33),
    )  # fmt: skip
    torch.library.opcheck(op.fwd, everything)
    torch.library.opcheck(op.bwd, (None, *everything, torch.float32, [True, False, True, True, True]))
    torch.library.opcheck(op.scale_, (torch.randn(3, 2), torch.tensor(0.5)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic, reduction):
    torch._dynamo.reset()

    def fn(x, weight, y, n=None):
        return linear_cross_entropy(x, weight, y, reduction=reduction, slice_bytes=2000, n_labelled=n, shift=True)

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for T in (7, 12):
            x, weight, y = make(2, T, device=device.torch_device)
            y[0, 3] = -100
            a, b = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
            la, lb, lc = fn(*a, y), compiled(*b, y), compiled(*b, y, 2 * T - 3)
            for loss in (lb, lc):
                torch.testing.assert_close(loss, la)
            want = grads(la.square().sum(), *a)
            for loss in (lb, lc):
                for g, w in zip(grads(loss.square().sum(), *b), want, strict=True):
                    torch.testing.assert_close(g, w)


class Live(TorchDispatchMode):
    """The most bytes of tensors, made under this mode, that were alive at once."""

    def __init__(self):
        super().__init__()
        self.peak, self.made = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        foreign = {StorageWeakRef(a.untyped_storage()) for a in args if isinstance(a, torch.Tensor)} - self.made.keys()
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and (ref := StorageWeakRef(t.untyped_storage())) not in foreign:
                self.made[ref] = t.untyped_storage().nbytes()
        self.made = {ref: n for ref, n in self.made.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.made.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("module", [cpu, plain, *(pytest.param(on_metal, marks=p.marks) for p in EMULATED)])
def test_memory(module, dtype, needs):
    """At most slice_bytes, the gradients asked for and 100 bytes a row; the logits alone would be far more."""
    N, C, V, slice_bytes = 512, 16, 4000, 1 << 20
    x, weight, y = make(N, C=C, V=V, dtype=dtype)
    y[::7] = -100
    wanted = needs[0] * x.nbytes + needs[1] * weight.numel() * 4
    with Live() as live, torch.no_grad():
        rows = problem(x, weight, y, slice_bytes=slice_bytes)
        module.backward(None, *rows, torch.float32, [*needs, False, False, False])
    widened = 2 * (8 << 20) if dtype == torch.bfloat16 and needs[1] else 0  # see head.accumulate
    assert slice_bytes / 2 < live.peak - wanted <= slice_bytes + 100 * N + min(widened, 4 * slice_bytes)
    with Live() as live, torch.no_grad():
        module.forward(*rows)
    assert slice_bytes / 10 < live.peak <= slice_bytes + 100 * N
    assert N * V * dtype.itemsize > 3 * slice_bytes


def test_frozen_inputs_get_no_gradient():
    x, weight, y = make(6)
    for leaf, frozen in ((x, weight), (weight, x)):
        a = leaf.detach().requires_grad_()
        args = (a, frozen) if leaf is x else (frozen, a)
        loss = linear_cross_entropy(*args, y)
        loss.backward()
        assert a.grad is not None and frozen.grad is None
    for need in ([True, False], [False, True], [False, False]):
        out = op.bwd(None, *problem(x, weight, y), torch.float32, [*need, False, False, False])
        assert [t.numel() > 0 for t in out[5:7]] == need


@pytest.mark.parametrize("device", DEVICES)
def test_any_slice_size_gives_the_same_loss(device):
    x, weight, y = make(3, 13, C=16, V=130, device=device.torch_device)
    y[0, 5:9] = -100
    x.requires_grad_(), weight.requires_grad_()
    with device.use():
        whole = linear_cross_entropy(x, weight, y)
        want = grads(whole, x, weight)
        for slice_bytes in (1, 1000, 4096, 20_000):
            loss = linear_cross_entropy(x, weight, y, slice_bytes=slice_bytes)
            torch.testing.assert_close(loss, whole, rtol=5e-7, atol=0)
            for a, b in zip(grads(loss, x, weight), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_rows_without_a_label_are_not_read(device, reduction):
    """NaN in them reaches nothing, whether they are dropped (eager), padded to a bound, or masked (compiled)."""
    x, weight, y = make(4, 6, device=device.torch_device)
    y[1, 2:] = -100
    w = torch.ones(4, 6, device=x.device)
    w[3, 0] = 0
    dead = (y < 0) | (w == 0)
    clean = x.masked_fill(dead.unsqueeze(-1), 0.0)
    x = x.masked_fill(dead.unsqueeze(-1), torch.nan)

    def run(x, weight, n_labelled=None):
        return linear_cross_entropy(
            x, weight, y, row_weight=w, reduction=reduction, slice_bytes=700, n_labelled=n_labelled
        )

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    leaves = [t.requires_grad_() for t in (x, weight)]
    with device.use(), support.poisoned():
        want = grads(plain_torch(clean.requires_grad_(), weight, y, reduction="none").mul(w).sum(), clean, weight)
        for loss in (run(*leaves), run(*leaves, 20), run(*leaves, 24), compiled(*leaves)):
            assert loss.isfinite().all()
            for a, b in zip(grads(loss.sum(), *leaves), want, strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_too_small_a_count_is_no_silent_loss(device):
    x, weight, y = make(9, device=device.torch_device)
    with device.use():
        if device.name == "cpu":
            with pytest.raises(ValueError, match="n_labelled=4, but 9 rows"):
                linear_cross_entropy(x, weight, y, n_labelled=4)
        else:
            assert linear_cross_entropy(x, weight, y, n_labelled=4).isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Views of x, target and weight give what contiguous copies give; shift reads x where it lies."""
    d = device.torch_device
    wide, weight, _ = make(4, 9, C=40, device=d)
    views = {
        "shifted": (wide[:, :-1, :8], weight[:, :8]),
        "columns": (wide[..., 3:20], weight[:, 3:20]),
        "transposed": (wide.transpose(0, 1), weight.t().contiguous().t()),
        "hidden stride": (wide.movedim(0, -1), weight[:, ::10]),
        "expanded": (wide[:1].expand(3, 9, 40), weight[:1].expand(33, 40)),
        "four dimensions": (wide.view(2, 2, 9, 40)[:, :, 1::2], weight),
    }
    with device.use():
        for name, (x, w) in views.items():
            y = torch.randint(0, 33, x.shape[:-1][::-1], device=d).permute(*range(x.dim() - 2, -1, -1))
            for reduction in ("none", "mean"):
                a = [t.detach().requires_grad_() for t in (x, w)]
                b = [t.detach().contiguous().requires_grad_() for t in (x, w)]
                la, lb = (linear_cross_entropy(*t, y, reduction=reduction, slice_bytes=3500) for t in (a, b))
                torch.testing.assert_close(la, lb, msg=lambda text, name=name: f"{name}: {text}")
                for g, h in zip(grads(la.square().sum(), *a), grads(lb.square().sum(), *b), strict=True):
                    torch.testing.assert_close(
                        g, h, rtol=2e-5, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}"
                    )


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device):
    """No rows, one row, no label, a target past the vocabulary."""
    d = device.torch_device
    with device.use(), support.poisoned():
        _, weight, _ = make(1, device=d)
        weight.requires_grad_()
        x = torch.randn(0, 3, 8, device=d, requires_grad=True)
        loss = linear_cross_entropy(x, weight, torch.zeros(0, 3, dtype=torch.long, device=d), shift=True)
        for g in (loss, *grads(loss, x, weight)):
            assert g.abs().sum() == 0
        x = torch.randn(8, device=d, requires_grad=True)
        y = torch.tensor(5, device=d)
        torch.testing.assert_close(linear_cross_entropy(x, weight, y), F.cross_entropy(weight @ x, y))
        x, _, y = make(3, device=d)
        x.requires_grad_()
        for reduction in ("mean", "sum", "none"):
            loss = linear_cross_entropy(x, weight, torch.full_like(y, -100), reduction=reduction).sum()
            assert loss == 0 and all(g.abs().max() == 0 for g in grads(loss, x, weight))
        y[1] = 33
        loss = linear_cross_entropy(x, weight, y, reduction="none")
        (d_x,) = grads(loss.sum(), x)
        assert loss.isnan().tolist() == [False, True, False] == d_x.isnan().all(-1).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_none_takes_any_upstream(device):
    """A gradient a row, 0 in row 0 included; weights 2, 2 double it, of 1, 0 only the first row is left."""
    x, weight, y = make(6, device=device.torch_device)
    up = torch.randn(6, device=x.device)
    up[0] = 0
    leaves = [t.requires_grad_() for t in (x, weight)]
    with device.use():
        got = grads(linear_cross_entropy(x, weight, y, reduction="none", slice_bytes=400), *leaves, grad_outputs=up)
    want = grads(plain_torch(x, weight, y, reduction="none"), *leaves, grad_outputs=up)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    assert got[0][0].abs().sum() == 0 and got[0][1].abs().sum() > 0

    def step(rows, weights):
        w = torch.tensor(weights, device=x.device)
        with device.use():
            return grads(linear_cross_entropy(x[:rows], weight, y[:rows], row_weight=w), weight)[0]

    torch.testing.assert_close(step(2, [2.0, 2.0]), 2 * step(2, [1.0, 1.0]))
    torch.testing.assert_close(step(2, [1.0, 0.0]), step(1, [1.0]) / 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,bad", [(torch.int32, 2**31 - 1), (torch.int64, 2**40), (torch.int64, 33)])
def test_labels_outside_touch_nothing(device, dtype, bad):
    """NaN for their row and for what is summed over rows; the other rows' losses and d_x are what they were."""
    x, weight, y = make(5, device=device.torch_device)
    y = y.to(dtype)
    x.requires_grad_()
    with device.use(), support.poisoned():
        want = linear_cross_entropy(x, weight, y, reduction="none", slice_bytes=300)
        (d_want,) = grads(want.sum(), x)
        y[2] = bad
        got = linear_cross_entropy(x, weight, y, reduction="none", slice_bytes=300)
        (d_got,) = grads(got.sum(), x)
        assert linear_cross_entropy(x, weight, y, slice_bytes=300).isnan()
    assert got[2].isnan() and d_got[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(got[kept], want[kept]) and torch.equal(d_got[kept], d_want[kept])


@pytest.mark.parametrize("device", DEVICES)
def test_two_backward_passes_share_nothing(device):
    """With retain_graph each pass has gradients of its own, whatever became of the first ones."""
    x, weight, y = make(5, device=device.torch_device)
    leaves = [t.requires_grad_() for t in (x, weight, torch.randn(33, device=x.device))]
    with device.use():
        loss = linear_cross_entropy(x, weight, y, leaves[2])
        first = grads(3 * loss, *leaves, retain_graph=True)
        kept = [g.clone() for g in first]
        for g in first:
            g.zero_()
        second = grads(loss, *leaves, retain_graph=True)
        third = grads(loss, *leaves)
    for a, b, c in zip(kept, second, third, strict=True):
        torch.testing.assert_close(a, 3 * b)
        assert torch.equal(b, c) and b.data_ptr() != c.data_ptr()


def test_weight_gradient_accumulates_in_float32():
    """Many slices of bfloat16 summed in float32 are as good as one; summed in bfloat16 they are not."""
    x, weight, y = make(600, C=4, V=9, dtype=torch.bfloat16)
    weight.requires_grad_()

    def error(**options):
        loss = linear_cross_entropy(x, weight, y, slice_bytes=1, reduction="sum", **options)
        return (grads(loss, weight)[0].double() - exact).abs().max() / exact.abs().max()

    wide = weight.detach().double().requires_grad_()
    (exact,) = grads(plain_torch(x.double(), wide, y, reduction="sum"), wide)
    assert error() < 0.005 < 2 * error() + error(accum_dtype=torch.bfloat16) / 2


@pytest.mark.parametrize("device", DEVICES)
def test_the_upstream_scale_is_not_rounded(device):
    """Upstream gradients scale 16-bit gradients by their float32 value, not by bfloat16's nearest number."""
    x, weight, y = make(16, dtype=torch.bfloat16, device=device.torch_device)
    x.requires_grad_()
    with device.use():
        (g,) = grads(linear_cross_entropy(x, weight, y, reduction="sum"), x)
        (h,) = grads(linear_cross_entropy(x, weight, y, reduction="sum") * 0.3, x)
    exact = g.double() * torch.tensor(0.3).double()
    if device.name == "cpu-triton":  # the interpreter truncates
        assert ((h.double() - exact).abs() <= exact.abs() / 128).all()
    else:
        assert torch.equal(h, exact.bfloat16()) and not torch.equal(h, g * torch.tensor(0.3).bfloat16())


def test_modes():
    x, weight, y = make(4, 6)
    with torch.inference_mode():
        a = linear_cross_entropy(x, weight, y)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x.requires_grad_(), weight, y), a)
    x = x.detach()
    for argnums in (0, 1, (0, 1)):
        got = torch.func.grad(lambda x, w: linear_cross_entropy(x, w, y), argnums)(x, weight)
        want = torch.func.grad(lambda x, w: plain_torch(x, w, y), argnums)(x, weight)
        torch.testing.assert_close(got, want)
    d = x.double().requires_grad_()
    (g,) = grads(linear_cross_entropy(d, weight.double(), y), d, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
    assert torch.autograd.gradgradcheck(lambda t: linear_cross_entropy(t, weight.double(), y, impl="spec"), d)


def test_autocast_casts_like_linear():
    x, weight, y = make(4, 6)
    leaves = [t.requires_grad_() for t in (x, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, y, slice_bytes=500)
        inside = grads(loss, *leaves, retain_graph=True)
        again = grads(loss, *leaves)
        mixed = linear_cross_entropy(x.bfloat16(), weight, y, slice_bytes=500)
    rounded = linear_cross_entropy(x.bfloat16(), weight.bfloat16(), y, slice_bytes=500)
    assert loss == rounded == mixed and loss.dtype == torch.float32
    for a, b, c in zip(inside, again, grads(rounded, *leaves), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-4)


def test_checkpoint():
    x, weight, y = make(6)
    leaves = [t.requires_grad_() for t in (x, weight)]
    want = grads(linear_cross_entropy(x, weight, y), *leaves)
    loss = checkpoint(linear_cross_entropy, x, weight, y, use_reentrant=False)
    for a, b in zip(grads(loss, *leaves), want, strict=True):
        assert torch.equal(a, b)


def test_errors(monkeypatch):
    x, weight, y = make(4)
    bias = torch.randn(33)
    for bad, text in [
        (lambda: linear_cross_entropy(x, weight, y[:3]), r"\(4,\); got \(3,\)"),
        (lambda: linear_cross_entropy(x, weight, y.float()), "int32 or int64"),
        (lambda: linear_cross_entropy(x.long(), weight, y), "floating"),
        (lambda: linear_cross_entropy(x, weight[:, :3], y), "C = 8"),
        (lambda: linear_cross_entropy(x.bfloat16(), weight, y), "one dtype .* torch.bfloat16, torch.float32"),
        (lambda: linear_cross_entropy(x, weight, y, bias[:3]), r"bias must be torch.float32 \(33,\)"),
        (lambda: linear_cross_entropy(x, weight, y, reduction="avg"), "'avg'"),
        (lambda: linear_cross_entropy(x, weight, y, row_weight=torch.ones(3)), "row_weight must be float32"),
        (lambda: linear_cross_entropy(x, weight, y, reduction="sum", denominator=3), "denominator"),
        (lambda: linear_cross_entropy(x, weight, y, denominator=torch.ones((), requires_grad=True)), "denominator is"),
        (
            lambda: linear_cross_entropy(x, weight, y, lora=(weight[:2], weight[:, :2])),
            "lora must be",
        ),
        (lambda: linear_cross_entropy(x, weight, y, lora=(None, weight[:, :2], 1.0)), "lora must be .* NoneType"),
        (lambda: linear_cross_entropy(x, weight, y, slice_bytes=0), "slice_bytes"),
        (lambda: linear_cross_entropy(x, weight, y, accum_dtype=torch.float16), "accum_dtype"),
        (lambda: linear_cross_entropy(x, weight, y, n_labelled=-1), "n_labelled"),
        (lambda: linear_cross_entropy(x[0], weight, y[0], shift=True), "time dimension"),
        (lambda: linear_cross_entropy(x, weight, y.to("meta")), "target on meta"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()
    monkeypatch.setenv("RIFTCO_CHECK", "1")
    y[2] = 33
    with pytest.raises(IndexError, match="target 33 in row 2, but there are 33"):
        linear_cross_entropy(x, weight, y)


SLICES = "riftco.kernels.linear_cross_entropy.slices"
HEAD, ROWS = "riftco.kernels.linear_cross_entropy.head", "riftco.kernels.linear_cross_entropy.rows"
LABELS, KERNEL = "riftco.kernels.linear_cross_entropy.labels", "riftco.kernels.cross_entropy.cuda.rows"


@pytest.mark.parametrize(
    "module,old,new,case",
    [
        (HEAD, "self.begun = True", "self.begun = False", "many slices"),
        (ROWS, "where, self._rows_of_x(where)\n", "where, self._rows_of_x(where).roll(1, 0)\n", "many slices"),
        (SLICES, "d_bias += g.sum", "d_bias = g.sum", "row weights and bias"),
        (ROWS, "out.index_copy_(0, where, value)", "out[: len(where)].copy_(value)", "shift"),
        (ROWS, "self.dead.byte()", "self.live.byte()", "n_labelled"),
        (ROWS, "self.first = first", "self.first = 0", "labels lie together"),
        (HEAD, "(p.lora_b.to(p.acc) * p.lora_scale)", "(p.lora_b.to(p.acc))", "adapter"),
        (HEAD, "out.addmm_(d_inner, self.a)", "out.addmm_(d_inner, self.a, beta=0)", "adapter on NF4"),
        (HEAD, "out.addmm_(_cut(g, part), _cut(w, part).t())", "matmul(g, w, out=out)", "adapter"),
        (SLICES, "d_a.add(d_inner, xs)", "d_a.add(d_inner, xs * 1.01)", "adapter"),
        (SLICES, "d_b.add(g, inner)", "d_b.add(g, inner * p.lora_scale)", "adapter"),
        (LABELS, "mass * log_p.expm1()", "self.weights * log_p.expm1()", "top-k"),
        (LABELS, ") * self.slope", ")", "top-k, softcap, none"),
        (KERNEL, "tl.store(g_row + y * stride_g, hot", "tl.store(g_row + y * stride_g, a", "many slices"),
        (KERNEL, "lse * lse)) * row_weight", "lse * lse))", "row weights and bias"),
        (KERNEL, "else 1.0) * row_weight * scale", "else 1.0) * scale", "row weights and bias"),
    ],
)  # fmt: skip
def test_planted_bugs(module, old, new, case):
    support.assert_caught(cases, module, old, new, case)
