"""Groups of adapted layers over one x: the same numbers as the layers one by one, x kept once, fewer launches."""

import contextlib
import copy
import dataclasses

import pytest
import support
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from riftco import nn
from riftco.functional import GGUFWeight, dequantize_nf4, lora_linear, lora_linear_group, quantize_nf4
from riftco.kernels import _contract
from riftco.kernels.lora_linear import dropout
from riftco.kernels.lora_linear.module import LoRALinear

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
KERNELS = support.device_params(("cpu", "cpu-triton", "cuda"))
M, C, WIDTHS, RANKS = 10, 32, (24, 8, 8), (4, 3, 5)
SCALES = (2.0, 0.5, 1.25)


def members(device="cpu", dtype=torch.float32, nf4=False, adapter=None, count=3):
    g = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    ws, bs, aa, bb = [], [], [], []
    for N, R in zip(WIDTHS[:count], RANKS):
        w = normal(N, C) / 6
        ws.append(quantize_nf4(w.float()).to(device) if nf4 else w.to(device, dtype))
        bs.append(normal(N).to(device, dtype))
        aa.append((normal(R, C) / 6).to(device, adapter or dtype))
        bb.append((normal(N, R) / 2).to(device, adapter or dtype))
    return normal(M, C).to(device, dtype), ws, bs, aa, bb


def leaves(ts):
    return [t.detach().clone().requires_grad_() for t in ts]


def one_by_one(x, ws, aa, bb, bs, **options):
    return [
        lora_linear(x, w, a, b, scale=s, bias=c, **options) for w, a, b, c, s in zip(ws, aa, bb, bs, SCALES)
    ]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("dtype,adapter", [(torch.float32, None), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("listed", [None, [7, 0, 4]])
def test_a_group_is_its_layers_one_by_one(device, nf4, dtype, adapter, listed):
    x, ws, bs, aa, bb = members(device.torch_device, dtype, nf4, adapter)
    rows = None if listed is None else torch.tensor(listed, device=x.device)
    with device.use():
        (x1,), a1, b1, c1 = leaves([x]), leaves(aa), leaves(bb), leaves(bs)
        (x2,), a2, b2, c2 = leaves([x]), leaves(aa), leaves(bb), leaves(bs)
        ys = lora_linear_group(x1, ws, a1, b1, scales=SCALES, biases=c1, rows=rows)
        zs = one_by_one(x2, ws, a2, b2, c2, rows=rows)
        ups = [torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y) for y in ys]
        torch.autograd.backward(ys, ups)
        torch.autograd.backward(zs, ups)
    near = dict(rtol=1e-5, atol=1e-4) if dtype == torch.float32 else dict(rtol=2e-2, atol=1e-1)
    for y, z in zip(ys, zs):
        torch.testing.assert_close(y, z, **near)
    torch.testing.assert_close(x1.grad.float(), x2.grad.float(), **near)
    for s, t in zip((*a1, *b1, *c1), (*a2, *b2, *c2)):
        torch.testing.assert_close(s.grad, t.grad, **near)


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("rows", [None, [5, 0, 7]])
def test_gradcheck(nf4, rows):
    x, ws, bs, aa, bb = members(dtype=torch.float64, nf4=nf4, count=2)
    rows = None if rows is None else torch.tensor(rows)
    dense = [] if nf4 else leaves(ws)

    def fn(x, *rest):
        a, b, c, w = rest[:2], rest[2:4], rest[4:6], rest[6:] or ws
        torch.manual_seed(3)
        return lora_linear_group(x.view(2, 5, C), w, a, b, scales=SCALES[:2], biases=c, dropout_p=0.3, rows=rows)

    inputs = (*leaves([x]), *leaves(aa), *leaves(bb), *leaves(bs), *dense)
    assert torch.autograd.gradcheck(fn, inputs, fast_mode=True)


def saved_bytes(fn, known):
    """Bytes that autograd keeps, each storage once, but for those of `known` tensors."""
    seen = {}
    skip = {t.untyped_storage().data_ptr() for t in known}

    def keep(t):
        if t.untyped_storage().data_ptr() not in skip:
            seen[t.untyped_storage().data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = fn()
    return sum(seen.values()), out


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_saved_bytes_are_the_least(count, nf4, dropout_p):
    """x once and x A^T; dropout adds one seed; nothing of the size of y, no mask, no second x."""
    x, ws, _, aa, bb = members(dtype=torch.bfloat16, nf4=nf4, adapter=torch.float32, count=count)
    aa, bb = leaves(aa), leaves(bb)
    known = [*aa, *bb, *((t for w in ws for t in (w.codes, w.scale)) if nf4 else ws)]
    x.requires_grad_()
    total, ys = saved_bytes(
        lambda: lora_linear_group(x, ws, aa, bb, scales=SCALES[:count], dropout_p=dropout_p), known
    )  # fmt: skip
    ranks = sum(a.shape[0] for a in aa)
    assert total == x.numel() * 2 + M * ranks * 4 + (8 if dropout_p else 0)
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert all(t.grad is not None for t in (x, *aa, *bb))


@pytest.mark.parametrize("device", KERNELS)
def test_dropout_is_one_mask_on_every_device(device):
    """A group's members share it, and every device draws the same from one seed."""
    x, ws, _, aa, bb = members(device.torch_device)
    torch.manual_seed(1)
    seed = torch.randint(1 << 62, (1,), device=x.device).cpu()

    def run():
        torch.manual_seed(1)
        (x1,), a1, b1 = leaves([x]), leaves(aa), leaves(bb)
        ys = lora_linear_group(x1, ws, a1, b1, scales=SCALES, dropout_p=0.4)
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        return [t.detach().cpu() for t in (*ys, x1.grad, *(t.grad for t in (*a1, *b1)))]

    keep = dropout.keep(seed, torch.arange(M), C, 0.4).to(x.device)
    assert 0.4 < keep.float().mean() < 0.8
    with device.use():
        got = run()
    for y, w, a, b, s in zip(got, ws, aa, bb, SCALES):
        want = F.linear(x, w) + s * ((x * keep / 0.6) @ a.t() @ b.t())
        torch.testing.assert_close(y, want.cpu(), rtol=1e-5, atol=1e-5)
    if device.torch_device == "cpu":
        for s, t in zip(got, run()):
            torch.testing.assert_close(s, t, rtol=1e-5, atol=1e-5)


@dataclasses.dataclass(frozen=True, eq=False)
class Halved:
    """A format that knows nothing of adapters: half of W is kept, its ops follow the rule of _frozen_weight.py."""

    kind = "test_halved_linear"
    half: torch.Tensor
    shape: tuple[int, ...]

    @property
    def device(self):
        return self.half.device

    def operands(self):
        return [self.half], [*self.shape]

    def decoded(self, lo, hi, dtype):
        return 2 * self.half[lo:hi].to(dtype)


def halved_fwd(x, half, bias, N, K):
    return F.linear(x, 2 * half.to(x.dtype), bias)


def halved_bwd(d_y, half, N, K):
    return d_y @ (2 * half.to(d_y.dtype))


@contextlib.contextmanager
def ops_of(kind, forward, backward):
    """The two ops of a format, for the length of a test; torch keeps the operators, the table forgets them."""
    for suffix, schema, fn in (
        ("fwd", "(Tensor x, Tensor part, Tensor? bias, SymInt N, SymInt K) -> Tensor", forward),
        ("bwd", "(Tensor d_y, Tensor part, SymInt N, SymInt K) -> Tensor", backward),
    ):
        where = f"{__name__}:{fn.__name__}"
        if hasattr(torch.ops.riftco, f"{kind}_{suffix}"):
            _contract.TABLE[f"{kind}_{suffix}"] = _contract.Op(
                f"{kind}_{suffix}", where, {"cpu": where, "cuda": where, "mps": where}, {}
            )
        else:
            _contract.define(
                f"{kind}_{suffix}", schema, fake=fn, spec=where, launchers={"cuda": where, "mps": where}
            )  # fmt: skip
    try:
        yield
    finally:
        for suffix in ("fwd", "bwd"):
            del _contract.TABLE[f"{kind}_{suffix}"]


def test_any_frozen_weight_is_a_base():
    x, ws, bs, aa, bb = members()
    frozen = [Halved(w / 2, tuple(w.shape)) if i != 1 else w for i, w in enumerate(ws)]
    results = []
    with ops_of("test_halved_linear", halved_fwd, halved_bwd):
        for weights in (ws, frozen):
            (x1,), a1, b1 = leaves([x]), leaves(aa), leaves(bb)
            ys = lora_linear_group(x1, weights, a1, b1, scales=SCALES, biases=bs)
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
            z = lora_linear(x1, weights[0], a1[0], b1[0], scale=1.0, magnitude=torch.ones(WIDTHS[0]))
            results.append([*ys, z, x1.grad, *(t.grad for t in (*a1, *b1))])
    for s, t in zip(*results):
        torch.testing.assert_close(s, t)


@pytest.mark.parametrize("use_dora", [False, True])
def test_ggufs_blocks_are_a_base(use_dora):
    """Beside NF4 and dense members: the numbers of the same layers over their decoded weights."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (24, 34), dtype=torch.uint8)
    codes[:, :2] = torch.tensor([0.01]).half().view(torch.uint8)  # the scale of each block
    packed = nn.GGUFLinear.from_weight(GGUFWeight(codes, "Q8_0", (24, C)))
    whole = torch.nn.Linear(C, 24, bias=False)
    whole.weight.data = packed.weight.decoded(0, 24, torch.float32)
    others = [nn.NF4Linear.from_linear(torch.nn.Linear(C, 8)), torch.nn.Linear(C, 8)]
    results = []
    for first in (packed, whole):
        torch.manual_seed(1)
        ls = [LoRALinear(base, 4, 8, use_dora=use_dora) for base in (first, *others)]
        for layer in ls:
            torch.nn.init.normal_(layer.lora_B.weight)
        x = torch.randn(5, C, requires_grad=True)
        with Counted() as counted:
            ys = nn.linear_group(x, ls)
        assert counted.names.count("riftco.lora_linear_fwd.default") == 1
        parameters = [p for layer in ls for p in layer.parameters() if p.requires_grad]
        results.append([*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *parameters])])
    for s, t in zip(*results):
        torch.testing.assert_close(s, t, rtol=1e-5, atol=1e-4)


class Counted(TorchDispatchMode):
    """Names of the operators called inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def layers(nf4=False, dropout_p=0.0, use_dora=False, count=3, dtype=torch.float32):
    torch.manual_seed(2)
    made = []
    for N, R in zip(WIDTHS[:count], RANKS):
        linear = torch.nn.Linear(C, N, bias=N == 24).to(dtype)
        layer = LoRALinear(nn.NF4Linear.from_linear(linear) if nf4 else linear, R, 2 * R, dropout_p, use_dora=use_dora)
        torch.nn.init.normal_(layer.lora_B.weight)
        made.append(layer)
    return made


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
def test_modules_in_a_group(nf4, use_dora):
    """The same numbers as the modules' own calls, from one custom op each way instead of three."""
    ls = layers(nf4, use_dora=use_dora)
    parameters = [p for layer in ls for p in layer.parameters() if p.requires_grad]
    results, counts = [], []
    for call in (lambda x: nn.linear_group(x, ls), lambda x: [layer(x) for layer in ls]):
        x = torch.randn(2, 5, C, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with Counted() as counted:
            ys = call(x)
            grads = torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *parameters])
        results.append([*ys, *grads])
        counts.append(sum(name.startswith("riftco.lora_linear_") for name in counted.names))
    assert counts == [2, 6]
    for s, t in zip(*results):
        torch.testing.assert_close(s, t, rtol=1e-5, atol=1e-3)


def test_modules_that_cannot_join_are_called_by_themselves():
    x = torch.randn(4, C)
    ls = layers()
    want = [layer(x) for layer in ls]
    seen = []

    def calls(modules):
        with torch.no_grad(), Counted() as counted:
            got = nn.linear_group(x, modules)
        for y, z in zip(got, want):
            torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
        return counted.names.count("riftco.lora_linear_fwd.default")

    assert calls(ls) == 1
    handle = ls[1].register_forward_hook(lambda *_: seen.append(1))
    assert calls(ls) == 2 and seen == [1]
    handle.remove()
    handle = ls[2].base_layer.register_forward_pre_hook(lambda *_: seen.append(2))
    assert calls(ls) == 2
    handle.remove()
    ls[0].dropout = 0.5
    assert calls([layer.eval() for layer in ls]) == 2
    ls[0].dropout = 0.0
    plain = torch.nn.Linear(C, 24)
    want[0] = plain(x)
    assert calls([plain, *ls[1:]]) == 1
    want[1], want[2] = ls[1].base_layer(x), ls[2].base_layer(x)
    assert calls([plain, ls[1].base_layer, ls[2].base_layer]) == 0


def pattern_fwd(x, table, bias, N, K):
    return table.clone()


def pattern_bwd(d_y, table, N, K):
    return table.new_full((*d_y.shape[:-1], K), -0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern(Halved):
    """A base whose product is a table of bytes: -0.0 and NaN of either sign, which products rarely make."""

    kind = "test_pattern_linear"


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, under the interpreter
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,integer", [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_other_rows_of_a_group_keep_the_bytes_of_the_base(device, dtype, integer):
    """-0.0, inf and NaN included, even where A and B hold inf and NaN."""
    x, _, _, aa, bb = members(device.torch_device, dtype, adapter=torch.float32)
    aa[0][0, 0], bb[1][0, 0] = torch.inf, torch.nan
    rows, others = torch.tensor([3, 9, 0], device=x.device), [1, 2, 4, 5, 6, 7, 8]
    odd = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, 1.5], dtype=dtype, device=x.device)
    tables = [odd[torch.arange(M * N, device=x.device).view(M, N) % 7] for N in WIDTHS]
    assert torch.signbit(tables[0][1]).any() and tables[0][1].isnan().any()
    with ops_of("test_pattern_linear", pattern_fwd, pattern_bwd), device.use():
        x1 = x.clone().requires_grad_()
        weights = [Pattern(t, (t.shape[1], C)) for t in tables]
        ys = lora_linear_group(x1, weights, leaves(aa), bb, scales=SCALES, rows=rows)
        y = lora_linear(x1, weights[2], aa[2], bb[2], scale=1.0, rows=rows)
        (d_x,) = torch.autograd.grad(y, x1, torch.ones_like(y))
    for y, table in zip(ys, tables):
        assert torch.equal(y[others].view(integer), table[others].view(integer))
        assert not torch.equal(y[rows].nan_to_num(), table[rows].nan_to_num())
    assert (d_x[others] == 0).all() and torch.signbit(d_x[others]).all() and d_x[rows].any()


def test_rows_of_a_group():
    ls = layers()
    x, rows = torch.randn(6, C), torch.tensor([4, 1])
    for y, layer in zip(nn.linear_group(x, ls, rows), ls):
        assert torch.equal(y[[0, 2, 3, 5]], layer.base_layer(x)[[0, 2, 3, 5]])
        torch.testing.assert_close(y[rows], layer(x)[rows])
    mixed = [torch.nn.Linear(C, 3), ls[0]]
    assert torch.equal(nn.linear_group(x, mixed, rows)[0], mixed[0](x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_fullgraph(dynamic, dropout_p):
    torch._dynamo.reset()
    ls = torch.nn.ModuleList(layers(nf4=True, dropout_p=dropout_p))

    def call(x):
        return nn.linear_group(x, tuple(ls))

    fn = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    parameters = [p for p in ls.parameters() if p.requires_grad]
    for n in (5, 9):
        (x,) = leaves([torch.randn(n, C)])
        results = []
        for run in (call, fn):
            torch.manual_seed(4)
            ys = run(x)
            results.append([*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *parameters])])
        assert all(torch.equal(s, t) for s, t in zip(*results))


def test_modes():
    x, ws, bs, aa, bb = members()
    with torch.autocast("cpu", torch.bfloat16):
        (x1,), a1, b1 = leaves([x]), leaves(aa), leaves(bb)
        ys = lora_linear_group(x1, ws, a1, b1, scales=SCALES, biases=bs)
        assert all(y.dtype == torch.bfloat16 for y in ys)
        sum(y.sum() for y in ys).backward()
    assert all(t.grad.dtype == torch.float32 for t in (x1, *a1, *b1))
    with torch.inference_mode():
        ys = lora_linear_group(x, ws, aa, bb, scales=SCALES, biases=bs)
    for y, z in zip(ys, one_by_one(x, ws, aa, bb, bs)):
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
    (a1,) = leaves(aa[:1])
    y, _ = lora_linear_group(x, ws[:2], [a1, aa[1]], bb[:2], scales=SCALES[:2])
    y.sum().backward()  # of one member, with one adapter that learns
    assert a1.grad is not None and a1.grad.any()
    mixed = leaves([aa[0].bfloat16(), aa[1]])
    ys = lora_linear_group(x, ws[:2], mixed, bb[:2], scales=SCALES[:2])
    sum(y.sum() for y in ys).backward()
    assert [t.grad.dtype for t in mixed] == [torch.bfloat16, torch.float32]
    assert torch.autograd.gradgradcheck(
        lambda a: lora_linear_group(x.double(), [ws[0].double()], [a], [bb[0].double()], scales=[0.5], impl="spec")[0],
        leaves([aa[0].double()]),
    )


@pytest.mark.parametrize("device", KERNELS)
def test_strided_gradients_and_inputs(device):
    x, ws, bs, aa, bb = members(device.torch_device)
    wide = torch.randn(2, 5, 2 * C, device=x.device)
    with device.use():
        results = []
        for strided in (True, False):
            view = wide[..., 3 : 3 + C] if strided else wide[..., 3 : 3 + C].contiguous()
            view = view.detach().requires_grad_()
            a1 = leaves(aa)
            ys = lora_linear_group(view, ws, a1, bb, scales=SCALES, biases=bs)
            big = torch.ones(2, 5, 80, device=x.device).cumsum(-1)
            ups = [big[..., : WIDTHS[0]], big[..., 1 : 2 * WIDTHS[1] : 2], big[:1, :1, :1].expand_as(ys[2])]
            torch.autograd.backward(ys, ups if strided else [u.contiguous() for u in ups])
            results.append([*ys, view.grad, *(t.grad for t in a1)])
    for s, t in zip(*results):
        torch.testing.assert_close(s, t)


def test_copies_and_state():
    ls = layers(use_dora=True)
    again = copy.deepcopy(ls[0])
    x = torch.randn(3, C)
    assert torch.equal(again(x), ls[0](x))
    with pytest.raises(ValueError, match="got 2 weights, 2 biases, 1 lora_a"):
        lora_linear_group(x, [ls[0].base_layer.weight] * 2, [ls[0].lora_A.weight], [], scales=[1.0])


def test_decoded_rows_of_nf4():
    """A block may span rows, and the last one may be cut."""
    for shape in ((7, 33), (5, 64), (3, 50)):
        q = quantize_nf4(torch.randn(shape))
        whole = dequantize_nf4(q, torch.float32)
        for lo in range(shape[0]):
            for hi in range(lo, shape[0] + 1):
                assert torch.equal(q.decoded(lo, hi, torch.float32), whole[lo:hi])
