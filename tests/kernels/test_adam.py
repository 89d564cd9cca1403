"""Adam beyond the conformance cases: torch's numbers over many steps, its state_dict, transactions, planted bugs."""

import copy
import io

import pytest
import support
import torch

from riftco.functional import adam_step
from riftco.kernels.adam import cases, op
from riftco.optim import Adam

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
SHAPES = ((7, 5), (3,), (), (0, 4), (2, 3, 4))


def make(device="cpu", dtype=torch.float32, shapes=SHAPES):
    gen = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=gen).to(device, dtype)) for s in shapes]


def give_grads(params, seed, scale=1.0):
    gen = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=gen)).to(p.device, p.dtype)


def snapshot(params, optimizer):
    return [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["state"])


def assert_same_state(a, b):
    for x, y in zip(a[0], b[0]):
        assert torch.equal(x, y)
    assert a[1].keys() == b[1].keys()
    for i in a[1]:
        assert all(torch.equal(a[1][i][k], b[1][i][k]) for k in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_is_pytorch_over_fifty_steps(device, decoupled):
    """Groups with options of their own, a schedule, clipping, a parameter without a gradient now and then."""
    ours, theirs = make(device.torch_device), make(device.torch_device)

    def groups(p):
        return [
            {"params": p[:2], "lr": 0.03, "weight_decay": 0.1},
            {"params": p[2:], "betas": (0.8, 0.95)},
        ]

    a = Adam(groups(ours), lr=0.01, decoupled=decoupled, gradient_clip=5.0)
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    b = cls(groups(theirs), lr=0.01, weight_decay=0.0)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 60) for o in (a, b)]
    clipped = 0
    for i in range(50):
        for params in (ours, theirs):
            give_grads(params, i, scale=1.0 if i % 3 else 0.2)
            if i % 7 == 3:
                params[1].grad = None
        with device.use():
            norm, scale = a.step()
        want = torch.nn.utils.clip_grad_norm_(theirs, 5.0)
        b.step()
        torch.testing.assert_close(norm, want)
        torch.testing.assert_close(scale, (5.0 / want).clamp(max=1.0))
        clipped += bool(scale < 1)
        for s in schedules:
            s.step()
    assert 0 < clipped < 50
    for p, q in zip(ours, theirs):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a.state[p][key], b.state[q][key], rtol=2e-5, atol=1e-7)
        assert a.state[p]["step"].item() == b.state[q]["step"].item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_float32_moments(device, dtype):
    """One float32 update, rounded once a step: what float32 Adam gives for the rounded parameter."""
    params, reference = make(device.torch_device, dtype), make(device.torch_device, dtype)
    reference = [torch.nn.Parameter(p.detach().float()) for p in reference]
    a, b = Adam(params, lr=0.02, weight_decay=0.1), torch.optim.AdamW(reference, lr=0.02, weight_decay=0.1)
    for i in range(10):
        give_grads(params, i)
        for p, q in zip(params, reference):
            q.grad = p.grad.float()
        with device.use():
            a.step()
        b.step()
        for p, q in zip(params, reference):
            # rounding to nearest on a device; the interpreter truncates bfloat16, by up to one unit
            torch.testing.assert_close(p.float(), q.detach(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
            q.data.copy_(p.float())
    assert all(a.state[p]["exp_avg"].dtype == torch.float32 for p in params)


def test_float64_and_several_dtypes_in_one_optimizer():
    params = [torch.nn.Parameter(torch.randn(4, 3).to(d)) for d in (torch.float64, torch.float32, torch.bfloat16)]
    twins = [torch.nn.Parameter(p.detach().double()) for p in params]
    a, b = Adam(params, lr=0.1, gradient_clip=1.0), torch.optim.AdamW(twins, lr=0.1, weight_decay=0.0)
    for i in range(3):
        give_grads(params, i)
        for p, q in zip(params, twins):
            q.grad = p.grad.double()
        norm, _ = a.step()
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twins, 1.0))
        b.step()
    for p, q, tol in zip(params, twins, (1e-6, 1e-5, 2e-2)):
        torch.testing.assert_close(p.double(), q.detach(), rtol=tol, atol=tol)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e25])
@pytest.mark.parametrize("when", ["first step", "later"])
def test_a_refused_step_changes_nothing(device, bad, when):
    """NaN, inf, or a number whose square is inf, in the last element of one gradient; the next step is as if never."""
    runs = []
    for interrupted in (True, False):
        params = make(device.torch_device)
        optimizer = Adam(params, lr=0.1, weight_decay=0.1)
        with device.use():
            if when == "later":
                give_grads(params, 0)
                optimizer.step()
            if interrupted:
                give_grads(params, 1)
                before = snapshot(params, optimizer)
                params[0].grad.view(-1)[-1] = bad
                norm, scale = optimizer.step()
                after = snapshot(params, optimizer)
                assert scale.item() == 0
                assert norm.isfinite().item() == (bad == 1e25)
                if when == "later":
                    assert_same_state(before, after)
                else:
                    assert all(torch.equal(x, y) for x, y in zip(before[0], after[0]))
                    assert all(not s[k].any() for s in after[1].values() for k in s)
            give_grads(params, 2)
            optimizer.step()
        runs.append(snapshot(params, optimizer))
    assert_same_state(*runs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1e38, 1e-30, 0.0])
def test_the_norm_neither_overflows_nor_vanishes(device, size):
    params = make(device.torch_device, shapes=((40,), (5, 5), (0,)))
    optimizer = Adam(params, lr=0.1, gradient_clip=1.0)
    give_grads(params, 0)
    direction = [p.grad.clone() for p in params]
    exact = torch.cat([d.flatten() for d in direction]).double()
    exact = exact / exact.abs().max() * size
    for p, d in zip(params, direction):
        p.grad = (d / torch.cat([x.flatten() for x in direction]).abs().max()) * size
    with device.use():
        norm, scale = optimizer.step()
    want = min(1.0, 1.0 / exact.norm().item()) if size else 1.0
    torch.testing.assert_close(norm.double(), exact.norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(scale.double().cpu(), torch.tensor(want, dtype=torch.float64), rtol=1e-5, atol=0)
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_beyond_float32_still_clips(device):
    """Finite gradients whose norm is not: the clip scale is exact, and clipping makes the step safe."""
    p = torch.nn.Parameter(torch.zeros(16, device=device.torch_device))
    optimizer = Adam([p], lr=0.1, gradient_clip=4.0)
    p.grad = torch.full_like(p, 3e38)
    with device.use():
        norm, scale = optimizer.step()
    assert norm.isinf() and scale.item() == pytest.approx(4.0 / (3e38 * 4), rel=1e-5)
    torch.testing.assert_close(p.detach(), torch.full_like(p, -0.1))


FORMS = {
    "contiguous": {},
    "paged": {"state": "paged", "page_size": 256, "device_bytes": 0},
    "8-bit pages": {"state": "paged-8bit", "page_size": 256, "device_bytes": 0},
}


@pytest.mark.parametrize("form", FORMS)
def test_nothing_waits_for_the_host(monkeypatch, form):
    """The whole step without reading one number back."""
    params = make()
    optimizer = Adam(params, gradient_clip=1.0, **FORMS[form])
    give_grads(params, 0)
    if form == "8-bit pages":  # whose first step makes the tables of codes, once a process
        optimizer.step()

    def refuse(*_):
        raise AssertionError("a number was read back")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    optimizer.step()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("form", FORMS)
def test_nothing_waits_for_the_gpu(form):
    params = make("cuda")
    optimizer = Adam(params, gradient_clip=1.0, **FORMS[form])
    give_grads(params, 0)
    optimizer.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", ["contiguous", "paged"])
def test_a_state_that_does_not_fit_changes_nothing(form):
    """Refused by name before anything is touched: the next step is the one that it would have been."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(*shape)) for shape in ((3, 4), (7,))]
    optimizer = Adam(params, lr=0.1, state=form)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    short, stepless = copy.deepcopy(before), copy.deepcopy(before)
    short["state"][1]["exp_avg"] = torch.zeros(5)
    del stepless["state"][1]["step"]
    for bad, text in ((short, r"exp_avg of parameter 1 has 5 values"), (stepless, "parameter 1 lacks step")):
        bad["state"][0]["exp_avg"].zero_()
        bad["param_groups"][0]["lr"] = 7.0
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(bad)
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for n, state in before["state"].items():
            for name, value in state.items():
                assert torch.equal(after["state"][n][name], value), (n, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first,second", [("torch", "ours"), ("ours", "torch"), ("ours", "ours")])
def test_state_dict_of_torch(first, second, dtype):
    """Ten steps here, saved to bytes, ten there: as twenty in one place."""
    make_optimizer = {
        "ours": lambda p: Adam(p, lr=0.05, weight_decay=0.1),
        "torch": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    }

    def advance(params, optimizer, steps):
        for i in steps:
            give_grads(params, i)
            optimizer.step()

    params = make(dtype=dtype)
    optimizer = make_optimizer[first](params)
    advance(params, optimizer, range(10))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = make_optimizer[second](params)
    resumed.param_groups[0]["lr"] = 1.0  # must be replaced by the saved one
    resumed.load_state_dict(torch.load(file, weights_only=True))
    if second == "ours":
        for p in params:
            assert resumed.state[p]["exp_avg"].dtype == torch.float32
            assert torch.equal(resumed.state[p]["exp_avg"], optimizer.state[p]["exp_avg"].float())
            assert resumed.state[p]["exp_avg"] is not optimizer.state[p]["exp_avg"]
    advance(params, resumed, range(10, 20))
    assert all(resumed.state[p]["step"].item() == 20 for p in params)
    whole = make(dtype=dtype)
    straight = make_optimizer["ours"](whole)
    advance(whole, straight, range(20))
    tol = 2e-5 if dtype == torch.float32 else 0.1
    for p, q in zip(params, whole):
        torch.testing.assert_close(p, q, rtol=tol, atol=tol)
        if (first, second) == ("ours", "ours"):
            assert torch.equal(p, q)


def test_copies_and_pickles():
    params = make()
    optimizer = Adam(params, gradient_clip=0.7)
    give_grads(params, 0)
    optimizer.step()
    assert copy.deepcopy(optimizer).gradient_clip == 0.7


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Transposed, gappy and expanded tensors give what contiguous ones give, and keep their layout."""
    d = device.torch_device
    base, g = torch.randn(6, 8, device=d), torch.randn(6, 8, device=d)
    layouts = {
        "transposed": lambda t: t.t().contiguous().t(),
        "gappy": lambda t: torch.stack((t, t), -1)[..., 0],
        "contiguous": lambda t: t.clone(),
    }
    results = []
    with device.use():
        for of_p in layouts.values():
            for of_g in layouts.values():
                p, m, v = of_p(base), of_p(base * 0.1), of_g(base.square())
                step = torch.ones((), device=d)
                adam_step([p], [of_g(g)], [m], [v], [step], lr=0.1, weight_decay=0.1)
                assert p.stride() == of_p(base).stride()
                results.append((p, m, v))
        expanded = torch.nn.Parameter(torch.randn(3, 2, device=d))
        optimizer = Adam([expanded])
        expanded.grad = torch.ones(1, 1, device=d).expand(3, 2)
        before = expanded.detach().clone()
        assert optimizer.step()[0].item() == pytest.approx(6**0.5)
        torch.testing.assert_close(expanded.detach(), before - 1e-3)
    for row in results:
        for got, want in zip(row, results[-1]):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_opcheck():
    params, grads = [torch.randn(4, 3), torch.randn(5)], [torch.randn(4, 3), torch.randn(5)]
    first, second = [torch.zeros_like(p) for p in params], [torch.ones_like(p) for p in params]
    steps = [torch.zeros(()) for _ in params]
    for clip in (None, 1.0):
        torch.library.opcheck(op.norm, (grads, clip))
    _, scale, committed = op.norm(grads, None)
    options = committed, scale, torch.tensor(0.1), 0.9, 0.999, 1e-8, 0.1, True
    torch.library.opcheck(op.step, (params, grads, first, second, steps, *options))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_fullgraph(device, dynamic):
    torch._dynamo.reset()

    def update(*lists):
        return adam_step(*lists, lr=0.1, weight_decay=0.1, gradient_clip=1.0)

    fn = torch.compile(update, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with device.use():
        for n in (7, 12):
            runs = []
            p, g, m = (torch.randn(n, 3, device=device.torch_device) for _ in range(3))
            for f in (update, fn):
                tensors = [[t.clone()] for t in (p, g, m, m.square(), torch.ones((), device=p.device))]
                runs.append((*f(*tensors), *(t[0] for t in tensors)))
            assert all(torch.equal(x, y) for x, y in zip(*runs))
            assert not torch.equal(runs[0][2], p)


def test_the_optimizer_around_it():
    """A closure, hooks, a tensor learning rate, repeat runs bit-equal, nothing to update, a group added later."""
    runs = []
    for _ in range(2):
        params = make()
        optimizer = Adam(params[:2], lr=torch.tensor(0.1))
        called = []
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("hook"))

        def closure(params=params, called=called):
            called.append("closure")
            loss = params[0].square().sum()
            loss.backward()
            return loss

        norm, scale = optimizer.step(closure)
        assert called == ["closure", "hook"]
        torch.testing.assert_close(norm, params[0].grad.norm())
        optimizer.add_param_group({"params": params[2:], "lr": 0.5})
        give_grads(params, 3)
        optimizer.step()
        runs.append(snapshot(params, optimizer))
        optimizer.zero_grad()
        norm, scale = optimizer.step()
        assert (norm.item(), scale.item()) == (0, 1)
        assert_same_state(runs[-1], snapshot(params, optimizer))
    assert_same_state(*runs)


def test_errors():
    p = torch.nn.Parameter(torch.randn(4, 3))
    sparse = torch.nn.Parameter(torch.randn(4, 3))
    sparse.grad = torch.eye(4, 3).to_sparse()
    t = [torch.randn(3)]
    step = [torch.zeros(())]
    for bad, text in [
        (lambda: Adam([p], state="packed"), "state must be one of contiguous, paged, paged-8bit; got 'packed'"),
        (lambda: Adam([p], state="paged", page_size=300), "page_size must be a multiple of 256; got 300"),
        (lambda: Adam([p], device_bytes=0), "device_bytes must be .* of a paged state; got 0, 'contiguous'"),
        (lambda: Adam([p], state="paged", device_bytes=-1), "device_bytes must be 0 or more"),
        (lambda: Adam([p], lr=-1.0), "lr must be finite and at least 0; got -1.0"),
        (lambda: Adam([p], betas=(0.9, 1.0)), r"betas .* got 1.0"),
        (lambda: Adam([p], eps=-1.0), "eps"),
        (lambda: Adam([p], weight_decay=-0.1), "weight_decay"),
        (lambda: Adam([p], gradient_clip=0.0), "gradient_clip"),
        (lambda: Adam([torch.nn.Parameter(torch.randn(2, dtype=torch.complex64))]), "floating; got torch.complex64"),
        (lambda: Adam([{"params": [p], "lr": -3.0}]), "lr must be finite and at least 0; got -3.0"),
        (lambda: Adam([sparse]).step(), "sparse gradients are not supported"),
        (lambda: adam_step([], [], [], [], []), "no parameters"),
        (lambda: adam_step(t, t, t, t, []), "1 params but 0 steps"),
        (lambda: adam_step(t, [torch.randn(4)], t, t, step), r"grads\[0\] must have the shape \(3,\); got \(4,\)"),
        (lambda: adam_step(t, t, [t[0].half()], t, step), r"exp_avgs\[0\] must be torch.float32"),
        (lambda: adam_step(t, t, t, t, [torch.zeros(1)]), "float32 scalar"),
        (lambda: adam_step(t, [t[0].to("meta")], t, t, step), r"grads\[0\] on meta"),
        (lambda: adam_step(t, t, t, t, step, impl="fast"), "'fast'"),
    ]:
        with pytest.raises(ValueError, match=text):
            bad()
    twin = torch.optim.AdamW([p], amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad=True"):
        Adam([p]).load_state_dict(twin.state_dict())


@pytest.mark.parametrize(
    "old,new,case",
    [
        ("v = beta2 * v + one_minus_beta2 * g * g", "v = beta2 * v + one_minus_beta2 * g * g * 2.0", "first step"),
        ("p *= 1.0 - lr * weight_decay", "p *= 1.0 - weight_decay", "later step, decay"),
        ("g += weight_decay * p", "g += 0.0", "not decoupled"),
        ("scale = tl.where(largest > 0, tl.minimum(clip", "scale = tl.where(largest < 0, tl.minimum(clip", "clipped"),
        ("e < parts, other=0.0) * ratio * ratio", "e < parts, other=0.0)", "several chunks"),
        ("+ first\n    if ALIGNED:", "\n    if ALIGNED:", "several chunks"),
        ("tl.where(broken > 0, float(\"nan\"), largest)", "largest", "refused"),
        ("committed = finite & ", "committed = finite | ", "refused"),
        ("return (1.0 - tl.exp(", "return (1.0 + 0.0 * tl.exp(", "later step, decay"),
        ("count + tl.load(committed_ptr)", "count - tl.load(committed_ptr)", "later step, decay"),
    ],
)  # fmt: skip
def test_planted_bugs(old, new, case):
    support.assert_caught(cases, "riftco.kernels.adam.cuda", old, new, case)


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_spills(capability):
    pytest.importorskip("triton")
    rows = support.compiled("compile_kernels.py", capability, "adam", "bfloat16")
    assert {r[0] for r in rows} == {"_norm", "_finish", "_advance", "_update", "_update_quantized"}
    assert all(int(spilled) == 0 and int(shared) < 99 << 10 for _, shared, spilled in rows)
