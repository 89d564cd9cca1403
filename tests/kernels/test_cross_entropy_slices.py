"""Logits that come a slice at a time on CUDA: a launch each, which Triton looks at once, and one count of the rows."""

from collections import Counter

import pytest
import support
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from riftco.kernels._launch import Again, ordinary
from riftco.kernels.cross_entropy import spec
from riftco.kernels.linear_cross_entropy import cpu as sliced_cpu
from riftco.kernels.linear_cross_entropy import slices as sliced
from riftco.kernels.linear_cross_entropy.problem import Problem

DEVICES = support.device_params(("cpu-triton", "cuda"))
NO_WORK = ("view", "slice", "t", "expand", "detach", "empty", "new_empty", "alias", "promote_types")


class Compiled:
    """Stands for Triton's compiled kernel: takes every argument in order, and refuses what it was not compiled for."""

    def __init__(self, kernel, args, constants, free):
        self.kernel, self.constants, self.free, self.launches = kernel, constants, free, 0
        self.look = self.looks(args)

    def looks(self, args) -> list:
        names = self.kernel.arg_names

        def one(name, v):
            if isinstance(v, torch.Tensor):
                return v.dtype, v.data_ptr() % 16 == 0
            plain = name in self.free or v is None or isinstance(v, float)
            return type(v) if plain else (v == 1, v % 16 == 0, abs(v) < 2**31)

        return [one(n, v) for n, v in zip(names, args)]

    def __getitem__(self, grid):
        def run(*args):
            self.launches += 1
            own, behind = args[: len(self.look)], args[len(self.look) :]
            names = self.kernel.arg_names[len(own) :]
            assert len(grid) == 3 and len(args) == len(self.kernel.arg_names)
            assert self.looks(own) == self.look
            assert list(behind) == [self.constants[n] for n in names]
            self.kernel[grid](*own, **self.constants)

        return run


class Compiling:
    """A kernel of the interpreter whose launches return a compiled one, as on a GPU."""

    def __init__(self, kernel, free):
        self.kernel, self.arg_names, self.free, self.made = kernel, kernel.arg_names, free, []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.kernel[grid](*args, **constants)
            self.made.append(Compiled(self.kernel, args, constants, self.free))
            return self.made[-1]

        return run


def problem(N, C, V, rows_a_slice, dtype=torch.float32, device="cpu", **fields) -> Problem:
    """Rows of a vocabulary that is no multiple of anything, but for the last fields."""
    x = torch.randn(N, C, device=device).to(dtype)
    weight, target = torch.randn(V, C, device=device).to(dtype), torch.randint(0, V, (N,), device=device)
    given = dict(
        x=x, weight=weight, absmax=None, target=target, bias=None, row_weight=None, class_weight=None,
        label_weight=None, lora_a=None, lora_b=None, V=V, kind="dense", block_size=0, lora_scale=1.0, ignore_index=-100,
        label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0, metrics=False, n_labelled=None,
        slice_bytes=rows_a_slice * (V + 2 * C) * dtype.itemsize,
    )  # fmt: skip
    return Problem(**{**given, **fields})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_places(device, dtype, weighted):
    """One over the labels; count, first and last of the rows with loss, in two strides, also more than a block has."""
    from riftco.kernels.cross_entropy import cuda

    d = device.torch_device
    for N, labels in ((1, {0: 5}), (7, {2: 1, 5: 0}), (7, {}), (9000, {17: 3, 8999: 1}), (8193, {8192: 0}), (0, {})):
        target = torch.full((2, N), -1, dtype=dtype, device=d)
        target[1, : N // 2] = 3  # the label that is ignored
        for row, label in labels.items():
            target[1, row] = label
        weight = torch.ones(N, 2, device=d)[:, 0] if weighted else None
        if weight is not None and len(labels) == 2:
            weight[max(labels)] = 0.0
        with device.use(), support.poisoned():
            over, got = cuda.places(target[1], weight, 3)
        live = (target[1] != 3) & (target[1] >= 0) & (True if weight is None else weight != 0)
        rows = live.nonzero().flatten().tolist()
        assert got.dtype == torch.int64 and got.tolist() == [len(rows), min(rows, default=N), max(rows, default=-1)]
        for mine, meant in zip((over, got), spec.places(target[1], weight, 3), strict=True):
            assert mine.dtype == meant.dtype and torch.equal(mine, meant)


@pytest.mark.parametrize("device", DEVICES)
def test_one_over_the_labels_is_rounded_as_pytorch_rounds(device):
    from riftco.kernels.cross_entropy import cuda

    for labels in (0, 1, 3, 41, 613, 6999, 8191, 16777):
        target = torch.arange(16777, device=device.torch_device).where(
            torch.arange(16777, device=device.torch_device) < labels, -1
        )
        with device.use():
            over, _ = cuda.places(target, None, -100)
        assert torch.equal(over, torch.tensor(float(max(labels, 1)), device=over.device).reciprocal())


def test_many_rows_are_counted_by_pytorch():
    from riftco.kernels.cross_entropy import cuda

    many = torch.zeros(cuda.launch.FEW + 1, dtype=torch.int64)
    assert cuda.places(many, None, 3)[1].tolist() == [len(many), 0, len(many) - 1]


@pytest.mark.parametrize(
    "fields", [{}, dict(metrics=True, softcap=3.0), dict(z_loss=0.1, label_smoothing=0.2)], ids=str
)
@pytest.mark.parametrize("gradient", [True, False])
def test_slices_are_looked_at_once(monkeypatch, fields, gradient):
    """Later slices go to the compiled kernel: with what it was compiled for, to the same bits."""
    device = next(d for d in support.DEVICES if d.name == "cpu-triton")
    if not device.available:
        pytest.skip(device.why_not)
    from riftco.kernels.cross_entropy.cuda import rows as kernels
    from riftco.kernels.linear_cross_entropy import cuda

    p = problem(29, 6, 33, 8, slice_bytes=8 * 33 * 4, **fields)  # rows that lie together are views
    p.target[:3] = -100
    weight, classes = torch.rand(29), torch.rand(33)
    needs = [True, False, False, False, False]

    def run(p):
        with device.use(), torch.no_grad():
            if gradient:
                return sliced.backward(cuda.LOSS, torch.ones(()).expand(29), *p, torch.float32, needs)
            return sliced.forward(cuda.LOSS, *p)

    for case in (p, p._replace(row_weight=weight, class_weight=classes)):
        want = run(case)
        with monkeypatch.context() as patched:
            kernel = Compiling(kernels.forward_rows, {"first"})
            patched.setattr(kernels, "forward_rows", kernel)
            got = run(case)
        assert [c.launches for c in kernel.made] == [3]  # of four slices, 26 rows
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("weighted", [False, True])
def test_slices_of_many_rows_take_the_ring(monkeypatch, weighted):
    """With their own rows of all that is of all rows; shorter ones, and a forward alone, do not."""
    pytest.importorskip("triton")
    from riftco.kernels.cross_entropy.cuda import hopper
    from riftco.kernels.cross_entropy.cuda import slices as module
    from riftco.kernels.cross_entropy.route import Ring, Route

    device, ring, calls = (
        next(d for d in support.DEVICES if d.name == "cpu-triton"),
        Ring(4, 4, 96, 64, 13, 2, 2, 16),
        [],
    )
    if not device.available:
        pytest.skip(device.why_not)

    def ringed(x, strides, g, g_strides, rows, given):
        assert given is ring and g is x and strides == (len(x), 0, x.stride(0)) and g_strides == strides[1:]
        assert (rows.row_weight is not None) == weighted and rows.stride_up == 1
        here = slice(rows.first, rows.first + len(x))
        mine = None if rows.row_weight is None else rows.row_weight[here]
        ignore, z_loss, scale = rows.options
        more = (mine, None, rows.up[here], ignore, 0.0, z_loss, 0.0, scale, False)
        for whole, value in zip(rows.out, spec.forward_backward_(x, rows.target[here], *more)):
            whole[here] = value
        calls.append(len(x))

    monkeypatch.setattr(module, "of_call", lambda *given, ahead: Route("ring", "", ring))
    monkeypatch.setattr(hopper, "forward_backward", ringed)
    z, y, up = torch.randn(20, 64), torch.randint(0, 64, (20,)), torch.rand(20)
    y[3] = -100
    weight = torch.rand(20) if weighted else None
    options = (-100, 0.0, 0.1, 0.0, 0.7)
    want_z = z.clone()
    want = spec.forward_backward_(want_z, y, weight, None, up, *options, False)
    out = [torch.full((20,), torch.nan) for _ in range(3)]
    with device.use():
        each = module.Slices(y, weight, None, up, options, False, True, out)
        for first, n in ((0, 8), (8, 8), (16, 4)):
            each(z[first : first + n], first)
        module.Slices(y, weight, None, None, options, False, False, [torch.empty(20) for _ in range(3)])(z.clone(), 0)
    assert calls == [8, 8]
    torch.testing.assert_close(z, want_z)
    for mine, value in zip(out, want):
        torch.testing.assert_close(mine, value)


def test_rows_past_32_bits_are_looked_at_again(monkeypatch):
    """Triton passes their number in 64 bits, which another kernel takes."""
    pytest.importorskip("triton")
    from riftco.kernels.cross_entropy.cuda import slices as module

    looked = []

    class Kernel:
        arg_names = ()

        def __getitem__(self, grid):
            return lambda *args, **constants: looked.append(constants) or {(4, 1, 1): lambda *args: None}

    monkeypatch.setattr(module.kernels, "forward_rows", Kernel())
    out = [torch.empty(1) for _ in range(3)]
    each = module.Slices(
        torch.zeros(1, dtype=torch.int64), None, None, None, (-100, 0.0, 0.0, 0.0, 1.0), False, True, out
    )
    for first in (0, 4, 2**31 - 1, 2**31, 2**31 + 4):
        each(torch.empty(4, 32), first)
    assert len(looked) == 2


def test_again_takes_places_as_addresses_once_triton_has_looked():
    class Kernel:
        arg_names = ("a", "b", "c")

        def __getitem__(self, grid):
            return lambda *args: {(1, 1, 1): lambda *args: None}

    launch, t = Again(Kernel()), torch.arange(6, dtype=torch.int16)
    view, nothing = launch.places([t, None], 2)
    assert view.tolist() == [2, 3, 4, 5] and nothing is None
    assert launch.places([t], 0)[0] is t
    launch(1, t, None, t)
    assert launch.places([t, None], 2) == [t.data_ptr() + 4, None]


def test_what_triton_makes_another_kernel_for():
    t = torch.empty(64)
    assert ordinary([t, None, t[4:]], [0, -1, 2**31 - 1])
    assert not ordinary([t, t[1:]], []) and not ordinary([t], [2**31])


def test_again_takes_constants_in_order():
    calls = []

    class Kernel:
        arg_names = ("a", "b", "FLAG", "R")

        def __getitem__(self, grid):
            def run(*args, **constants):
                calls.append((grid, args, constants))
                return {(7, 1, 1): lambda *args: calls.append(args)}

            return run

    launch = Again(Kernel(), R=4, num_warps=8, FLAG=True)
    launch(5, "x", "y")
    launch(7, "z", "w")
    launch(7, "u", "v")
    assert calls == [((5,), ("x", "y"), dict(R=4, num_warps=8, FLAG=True)), ("z", "w", True, 4), ("u", "v", True, 4)]
    with pytest.raises(KeyError):
        launch(6, "z", "w")  # another number of programs is asked for anew


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen, self.free = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        (self.free if name in NO_WORK else self.seen)[name] += 1
        return func(*args, **(kwargs or {}))


def test_a_slice_is_two_products_and_a_launch(monkeypatch):
    """Of a frozen head: nothing else is asked of the GPU for a slice, and one addition for the call.

    Of the host, three views: small slices wait for it.
    """
    pytest.importorskip("triton")
    from riftco.kernels.cross_entropy.cuda import rows as kernels
    from riftco.kernels.linear_cross_entropy import cuda

    class Silent:
        launches = 0

        def __getitem__(self, grid):
            self.launches += 1
            return lambda *args, **constants: None

    views = []
    for slices in (3, 5):
        p, kernel = problem(16 * slices, 6, 32, 16, torch.bfloat16, slice_bytes=16 * 32 * 2), Silent()
        monkeypatch.setattr(kernels, "forward_rows", kernel)
        counted = torch.tensor([16 * slices, 0, 16 * slices - 1])
        with Ops() as ops, torch.no_grad():
            upstream = torch.ones(()).expand(16 * slices)
            ops.seen.clear(), ops.free.clear()
            sliced.backward(cuda.LOSS, upstream, *p, torch.float32, [True, False, False, False, False], counted)
        assert kernel.launches == slices
        assert ops.seen == {"mm": 2 * slices, "add": 1, "_to_copy": 1}  # lse; the count, for which the host waits
        views.append(ops.free["slice"] + ops.free["t"] + ops.free["view"])
    assert views[1] - views[0] == 2 * 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weighted", [False, True])
def test_slices_of_long_plain_rows(device, weighted):
    """Rows that are held (`cuda/held.py`), several slices and a shorter last one, against the same in float64."""
    from riftco.kernels.linear_cross_entropy import cuda

    N, C, V = 21, 16, 16400
    p = problem(N, C, V, 8, torch.bfloat16, slice_bytes=8 * V * 2, z_loss=1e-3)
    p = p._replace(
        weight=0.3 * p.weight, row_weight=torch.rand(N).where(torch.arange(N) != 6, 0.0) if weighted else None
    )
    p.target[0], p.target[19] = -100, V - 1
    needs = [True, True, False, False, False]
    wide = p._replace(x=p.x.double(), weight=p.weight.double(), slice_bytes=1 << 40)
    want = sliced.backward(sliced_cpu.LOSS, None, *wide, torch.float64, needs)
    on = device.torch_device
    mine = p._replace(**{k: v.to(on) for k, v in p._asdict().items() if isinstance(v, torch.Tensor)})
    with device.use(), torch.no_grad(), support.poisoned():
        got = sliced.backward(cuda.LOSS, None, *mine, torch.float32, needs)
    torch.testing.assert_close(got[0].cpu().double(), want[0], rtol=2e-2, atol=1e-6)
    for a, b in zip(got[-5:-3], want[-5:-3]):
        assert (a.cpu().double() - b).norm() <= 6e-3 * b.norm()
