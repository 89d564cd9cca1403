"""Adam's moments in pages: bit-equal to whole ones, in host memory too; 8-bit codes are bitsandbytes'."""

import copy
import io
import math
import pickle
import random

import pytest
import support
import torch
from test_adam import give_grads

from riftco.kernels.adam import op, pages, quantized
from riftco.optim import Adam

DEVICES = support.device_params(("cpu", "cpu-triton", "mps-emulated", "cuda"))
SHAPES = ((7, 5), (1300,), (), (0, 4), (70, 80), (256, 3))
PAGE = 256


def make(device="cpu", dtypes=(torch.float32,), shapes=SHAPES):
    gen = torch.Generator().manual_seed(1)
    made = [torch.randn(s, generator=gen).to(device, dtypes[i % len(dtypes)]) for i, s in enumerate(shapes)]
    return [torch.nn.Parameter(t) for t in made]


def groups(params):
    return [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "betas": (0.8, 0.95)}]


def moments(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for n in a:
        assert a[n].keys() == b[n].keys()
        assert all(torch.equal(torch.as_tensor(a[n][k]).cpu(), torch.as_tensor(b[n][k]).cpu()) for k in a[n])


@pytest.fixture
def small_slabs(monkeypatch):
    """Three pages of float32 moments a slab."""
    monkeypatch.setattr(pages, "SLAB_BYTES", 3 * 2 * 4 * PAGE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("device_bytes", [None, 0, 5 * 2 * 4 * PAGE])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32, torch.float64)])
def test_bit_equal_to_contiguous_after_fifty_steps(device, device_bytes, dtypes, small_slabs):
    ours, whole = (make(device.torch_device, dtypes) for _ in range(2))
    paged = dict(state="paged", page_size=PAGE, device_bytes=device_bytes)
    a = Adam(groups(ours), lr=0.03, gradient_clip=5.0, **paged)
    b = Adam(groups(whole), lr=0.03, gradient_clip=5.0)
    steps = 50 if device.torch_device == device.name and len(dtypes) == 1 else 8
    for i in range(steps):
        for params in (ours, whole):
            give_grads(params, i)
            if i % 7 == 3:
                params[1].grad = None
            if i % 5 == 4:
                params[4].grad[-1, -1] = torch.nan
        with device.use():
            got, want = a.step(), b.step()
        assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(got, want))
    assert all(torch.equal(p, q) for p, q in zip(ours, whole))
    assert_equal(moments(a), moments(b))
    slabs = [s for pool in a.pools.values() for s in pool.slabs]
    hosted = [h for pool in a.pools.values() for h in pool.hosted]
    assert len(slabs) > 6 and all(s.nbytes <= pages.SLAB_BYTES for s in slabs)
    if device_bytes is not None:
        assert sum(s.nbytes for s, away in zip(slabs, hosted) if not away) <= device_bytes
        assert any(hosted) and all(hosted) == (device_bytes == 0)
        if device.torch_device == "cuda":
            assert all(s.is_pinned() for s, away in zip(slabs, hosted) if away)
    else:
        assert not any(hosted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state", ["paged", "paged-8bit"])
@pytest.mark.parametrize("device_bytes", [None, 0])
def test_a_refused_step_changes_nothing(device, state, device_bytes):
    params = make(device.torch_device)
    optimizer = Adam(params, lr=0.1, state=state, page_size=PAGE, device_bytes=device_bytes)
    with device.use():
        for i in range(2):
            give_grads(params, i)
            optimizer.step()
        before = [p.detach().clone() for p in params], moments(optimizer)
        give_grads(params, 3)
        params[-1].grad[0, 0] = torch.inf
        norm, scale = optimizer.step()
    assert norm.isinf() and scale.item() == 0
    assert all(torch.equal(p, q) for p, q in zip(params, before[0]))
    assert_equal(moments(optimizer), before[1])


@pytest.mark.parametrize("first", ["contiguous", "paged", "paged-8bit", "torch"])
@pytest.mark.parametrize("second", ["contiguous", "paged", "paged-8bit", "torch"])
def test_every_form_loads_every_other(first, second, small_slabs):
    """Bit-equal where both hold float32, or both codes; else within the codes' rounding."""

    def build(form, params):
        if form == "torch":
            return torch.optim.AdamW(params, lr=0.05)
        where = {} if form == "contiguous" else dict(page_size=PAGE, device_bytes=PAGE)
        return Adam(params, lr=0.05, state=form, **where)

    if second == "torch" and first == "paged-8bit":
        pytest.skip("torch.optim.AdamW does not know codes")
    params = make()
    optimizer = build(first, params)
    for i in range(3):
        give_grads(params, i)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = build(second, make())
    resumed.load_state_dict(torch.load(file, weights_only=True))
    twin = build("contiguous" if second == "torch" else first, make())
    twin.load_state_dict(resumed.state_dict())
    want, got = optimizer.state_dict()["state"], twin.state_dict()["state"]
    for n in want:
        assert float(want[n]["step"]) == float(got[n]["step"]) == 3
        names = [k for k in want[n] if k != "step"]
        exact = "paged-8bit" not in (first, second) or first == second or ("state1" not in got[n] and n != 4)
        for k in names if exact else ():
            assert torch.equal(want[n][k].cpu(), got[n][k].cpu()), (n, k)
    if not {"paged-8bit"} & {first, second} or first == second:
        give_grads(params, 9)
        optimizer.step()
        others = list(p for g in resumed.param_groups for p in g["params"])
        for p, q in zip(others, make()):
            p.data.copy_(q)
        give_grads(others, 9)
        resumed.step()
        for n, state in resumed.state_dict()["state"].items():
            for k, value in state.items():
                other = optimizer.state_dict()["state"][n][k]
                torch.testing.assert_close(value.float().cpu(), other.float().cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("state", ["paged", "paged-8bit"])
def test_copies_and_pickles(state):
    params = make()
    optimizer = Adam(params, state=state, page_size=512, device_bytes=0)
    give_grads(params, 0)
    optimizer.step()
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert_equal(moments(twin), moments(optimizer))
        others = [p for g in twin.param_groups for p in g["params"]]
        give_grads(others, 1)
        twin.step()
        assert not torch.equal(others[0], params[0])


def test_a_parameter_that_comes_later_gets_pages(small_slabs):
    params = make()
    optimizer = Adam(params[:2], lr=0.1, state="paged", page_size=PAGE)
    whole = make()
    twin = Adam(whole[:2], lr=0.1)
    for i in range(3):
        give_grads(params, i)
        give_grads(whole, i)
        if i == 1:
            optimizer.add_param_group({"params": params[2:]})
            twin.add_param_group({"params": whole[2:]})
        optimizer.step()
        twin.step()
    assert all(torch.equal(p, q) for p, q in zip(params, whole))


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device):
    """Transposed and gappy parameters and gradients give what contiguous ones give."""
    base, grad = (torch.randn(60, 90, device=device.torch_device) for _ in range(2))
    results = []
    for lay in (lambda t: t.clone(), lambda t: t.t().contiguous().t(), lambda t: torch.stack((t, t), -1)[..., 0]):
        for state in ("paged", "paged-8bit"):
            p = torch.nn.Parameter(lay(base))
            p.grad = lay(grad)
            with device.use():
                Adam([p], lr=0.1, state=state, page_size=PAGE).step()
            assert p.stride() == lay(base).stride()
            results.append(p.detach())
    assert all(torch.equal(p, q) for p, q in zip(results, results[2:]))


# ---- 8-bit codes


@pytest.mark.parametrize("signed", [True, False])
def test_the_maps_are_those_of_bitsandbytes(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    assert torch.equal(quantized.dynamic_map(signed), functional.create_dynamic_map(signed))


def nearest(x, values):
    """By definition, in float64."""
    return (x.double().unsqueeze(-1) - values.double()).abs().argmin(-1)


def test_codes_are_the_nearest_values():
    for signed in (True, False):
        x = torch.randn(40, 256) ** 5 * 10.0 ** torch.randint(-20, 20, (40, 1))
        x = x if signed else x.abs()
        x[3] = 0
        codes, scales = quantized.encode(x, signed)
        values = quantized.dynamic_map(signed)
        ratio = x / x.abs().amax(1, keepdim=True).clamp(min=1e-38)
        best = (ratio - values[nearest(ratio, values)]).abs()
        assert torch.all((ratio - values[codes.long()]).abs() <= best * (1 + 1e-6) + 1e-9)
        back = quantized.decode(codes, scales, signed)
        assert (back[3] == 0).all() and (back - x).abs().max() <= 0.06 * x.abs().max()


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_takes_the_same_codes(device):
    """Moments of every decade, of both signs, on ties and beside them: the codes of `encode`, every one."""
    bounds = quantized.tables(True, torch.device("cpu"))[1].abs()
    beside = [torch.nextafter(bounds, torch.full_like(bounds, end)) for end in (0.0, 2.0)]
    ratio = torch.cat([bounds, *beside, 10 ** torch.linspace(-9, 0, 3331)]).clamp(max=1)
    m = torch.stack((ratio, -ratio), 1).reshape(-1)
    m = torch.nn.functional.pad(m, (0, -len(m) % 255)).view(-1, 255)
    m = torch.nn.functional.pad(m, (0, 1), value=1.0).reshape(-1).to(device.torch_device)  # each block's scale is 1
    p = torch.nn.Parameter(torch.zeros_like(m))
    p.grad = m.clone()  # betas of 0: m is the gradient, v its square
    optimizer = Adam([p], betas=(0.0, 0.0), state="paged-8bit", page_size=1024)
    with device.use():
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    for x, name, signed in ((m, "state1", True), (m * m, "state2", False)):
        assert torch.equal(state[name], quantized.encoded(x.cpu(), signed)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_8bit_is_the_formula(device, decoupled, dtype):
    """Each step from the codes before it: decode, Adam in float64, encode; a code may be a tie's other side."""
    p = torch.nn.Parameter(torch.randn(5000, device=device.torch_device).to(dtype))
    optimizer = Adam([p], lr=0.01, weight_decay=0.1, decoupled=decoupled, state="paged-8bit", page_size=1024)
    m = v = torch.zeros(5000, dtype=torch.float64)
    signed, unsigned = quantized.dynamic_map(True), quantized.dynamic_map(False)
    for t in range(1, 4):
        give_grads([p], t, scale=0.1)
        old, g = p.detach().cpu().double(), p.grad.cpu().double()
        with device.use():
            optimizer.step()
        if not decoupled:
            g = g + 0.1 * old

        def stepped(g, old=old, m=m, v=v, t=t):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            update = 0.01 / (1 - 0.9**t) * m / (v.sqrt() / math.sqrt(1 - 0.999**t) + 1e-8)
            return old * (1 - 0.001 if decoupled else 1) - update, m, v

        want, m, v = stepped(g)
        # where gradient and decay nearly cancel and v's code is 0, float32's rounding of their sum shows in the update
        moved = 2**-22 * (p.grad.cpu().double().abs() + 0.1 * old.abs())
        shown = torch.maximum(*((stepped(g + s * moved)[0] - want).abs() for s in (1, -1)))
        # rounded once, where the interpreter truncates bfloat16
        allowed = torch.finfo(dtype).eps * want.abs() + 1e-6 + shown
        assert bool(((p.detach().cpu().double() - want).abs() <= allowed).all())
        state = optimizer.state_dict()["state"][0]
        for x, name, scale, values in ((m, "state1", "absmax1", signed), (v, "state2", "absmax2", unsigned)):
            blocks = torch.nn.functional.pad(x, (0, -5000 % 256)).view(-1, 256)
            most = blocks.abs().amax(1)
            torch.testing.assert_close(state[scale].double(), most, rtol=2e-6, atol=0)
            code = nearest(blocks / most.unsqueeze(1), values).view(-1)[:5000]
            off = code - state[name].long()
            assert off.abs().max() <= 1 and (off != 0).float().mean() < 2e-3
        m = quantized.decoded(state["state1"], state["absmax1"], True).double()
        v = quantized.decoded(state["state2"], state["absmax2"], False).double()


@pytest.mark.filterwarnings("ignore")
def test_8bit_beside_bitsandbytes():
    """Its first update is the same; its CPU library rounds ratios to 2^16 points, so that later ones are near."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    ours, theirs = (torch.nn.Parameter(torch.randn(64, 128, generator=torch.Generator().manual_seed(3))) for _ in "ab")
    a = Adam([ours], lr=0.01, weight_decay=0.1, state="paged-8bit")
    b = bitsandbytes.optim.AdamW8bit([theirs], lr=0.01, weight_decay=0.1)
    for i in range(5):
        for p in (ours, theirs):
            give_grads([p], i, scale=0.1)
        a.step()
        b.step()
        if i == 0:
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(a.state_dict()["state"][0]["absmax1"], b.state[theirs]["absmax1"])
            off = a.state_dict()["state"][0]["state1"].int() - b.state[theirs]["state1"].int()
            assert off.abs().max() <= 1 and (off != 0).float().mean() < 0.05
    assert (ours - theirs).abs().median() < 2e-4
    saved = b.state_dict()
    resumed = Adam([ours], lr=0.01, state="paged-8bit")
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.state_dict()["state"][0]["state1"], b.state[theirs]["state1"])
    assert torch.equal(resumed.state_dict()["state"][0]["absmax2"], b.state[theirs]["absmax2"])


def test_8bit_learns_as_float32_does():
    target = torch.randn(80, 80)
    ends = []
    for state in ("contiguous", "paged-8bit"):
        p = torch.nn.Parameter(torch.zeros(80, 80))
        optimizer = Adam([p], lr=0.05, state=state)
        for _ in range(60):
            optimizer.zero_grad()
            (p - target).square().mean().backward()
            optimizer.step()
        ends.append((p - target).square().mean().item())
    assert ends[1] < 1.2 * ends[0] + 1e-3 < 0.3


def test_8bit_state_is_a_quarter():
    p = torch.nn.Parameter(torch.randn(1 << 16))
    p.grad = torch.ones_like(p)
    sizes = []
    for state in ("paged", "paged-8bit"):
        optimizer = Adam([p], state=state)
        optimizer.step()
        sizes.append(sum(s.nbytes for pool in optimizer.pools.values() for s in pool.slabs))
    assert sizes[1] / sizes[0] == pytest.approx(0.25, abs=0.005)


@pytest.mark.parametrize(
    "old,new",
    [
        ("v_ptr = m_ptr + page", "v_ptr = m_ptr"),
        ("v_scales = m_scales + page // WIDTH", "v_scales = m_scales"),
        ("- (tl.load(bounds_ptr + guess - 1) >= ratio)", "- (tl.load(bounds_ptr + guess - 1) > 2 * ratio)"),
        ("tl.where(ratio < 0, 127 - place, 127 + place)", "127 + place"),
        ("largest = tl.max(tl.abs(x), 1)", "largest = tl.max(x, 1)"),
        ("_encode(v_ptr, v_scales, unsigned_bounds", "_encode(v_ptr, v_scales, signed_bounds"),
        ("tl.load(m_scales + blocks, mask=some", "tl.load(v_scales + blocks, mask=some"),
    ],
)
def test_planted_bugs_of_the_codes(old, new):
    device = next((d.values[0] for d in DEVICES if d.id == "cpu-triton" and d.values[0].available), None)
    if device is None:
        pytest.skip("cpu-triton is not here")
    test_8bit_is_the_formula(device, True, torch.float32)
    with support.mutant("riftco.kernels.adam.cuda", old, new), pytest.raises((AssertionError, IndexError)):
        test_8bit_is_the_formula(device, True, torch.float32)


@pytest.mark.parametrize(
    "old,new",
    [
        ("+ row * (quantized", "+ 0 * row * (quantized"),
        ("* (0 if coded else rows[slab])", "* 0"),
        ("- first, chunk)", "- first, chunk // 2)"),
    ],
)  # fmt: skip
def test_planted_bugs_of_the_pages(old, new, small_slabs):
    device = next((d.values[0] for d in DEVICES if d.id == "cpu-triton" and d.values[0].available), None)
    if device is None:
        pytest.skip("cpu-triton is not here")
    ends = []
    for mutated in (False, True):
        params = make(shapes=((3000,), (40, 7)))
        optimizer = Adam(params, lr=0.1, state="paged", page_size=PAGE)
        for i in range(2):
            give_grads(params, i)
            with device.use():
                if mutated:
                    with support.mutant("riftco.kernels.adam.cuda", old, new):
                        optimizer.step()
                else:
                    optimizer.step()
        ends.append(params)
    assert not all(torch.equal(p, q) for p, q in zip(*ends))


# ---- the order of copies and updates


class Shuffled(pages.Lanes):
    """Runs nothing before `finish`, then each lane in its order and the lanes in any order that the waits allow."""

    def __init__(self, seed, ignored=()):
        self.random, self.ignored = random.Random(seed), ignored
        self.queues = {"in": [], "main": [], "out": []}
        self.done = dict.fromkeys(self.queues, 0)

    def do(self, lane, work):
        self.queues[lane].append(work)

    def mark(self, lane):
        return lane, self.done[lane] + len(self.queues[lane])

    def wait(self, lane, point):
        if lane not in self.ignored:
            self.queues[lane].append(point)

    def finish(self):
        while any(self.queues.values()):
            able = [
                lane
                for lane, queue in self.queues.items()
                if queue and (callable(queue[0]) or self.done[queue[0][0]] >= queue[0][1])
            ]
            assert able, "deadlock"
            lane = self.random.choice(able)
            head = self.queues[lane].pop(0)
            self.done[lane] += 1
            if callable(head):
                head()


def passages(seed, ignored=()):
    """Three rounds over seven slabs, nothing waits in between: x -> 2 x + round, each."""
    slabs = [torch.full((2, 1 + k % 2, 4), float(k)) for k in range(7)]
    passage = pages.Passage(torch.device("cpu"), Shuffled(seed, ignored))
    for i in range(3):
        passage.begin(slabs)
        passage.run(lambda k, x, i=i: x.mul_(2).add_(i))
    passage.lanes.finish()
    return all(torch.equal(s, torch.full_like(s, 8.0 * k + 4)) for k, s in enumerate(slabs))


def test_copies_and_updates_keep_their_order():
    assert all(passages(seed) for seed in range(40))


@pytest.mark.parametrize("lane", ["in", "main", "out"])
def test_a_missing_wait_is_seen(lane):
    assert not all(passages(seed, (lane,)) for seed in range(40))


def test_opcheck():
    p, g = [torch.randn(4, 300)], [torch.randn(4, 300)]
    steps, committed = [torch.ones(())], torch.tensor(True)
    torch.library.opcheck(op.advance, (steps, committed))
    for dtype, shape in ((torch.float32, (2, 5, 256)), (torch.uint8, (5, quantized.page_bytes(256)))):
        slab = torch.zeros(shape, dtype=dtype)
        options = committed, torch.ones(()), torch.tensor(0.1), 0.9, 0.999, 1e-8, 0.1, True
        torch.library.opcheck(op.paged_step, (p, g, [slab], [0], [0], 256, steps, *options))
