"""Cross-entropy's ring on Hopper: when it is chosen, that its three roles cannot wait for each other for ever, how it
compiles without a GPU, and its results on one.
"""

import itertools
import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch

from riftco.functional import cross_entropy
from riftco.kernels._launch import as_rows
from riftco.kernels.cross_entropy import route as room
from riftco.kernels.cross_entropy import spec
from riftco.kernels.cross_entropy.route import LINE, Ring, route

TESTS = pathlib.Path(__file__).parents[1]
BF, HALF = torch.bfloat16, torch.float16
SHARED = 227 << 10  # bytes that a Hopper block may have
VOCABULARIES = (49216, 57344, 65536, 102400, 128256, 151936, 152064, 201088, 256000, 262144, 262208, 327680)


# ------------------------------------------------------------------------------------------------ routes
def test_the_ring_is_for_long_plain_rows_on_hopper():
    for N, V in ((1024, 57344), (512, 128256), (512, 256000)):
        assert route(N, V, BF, (9, 0)).name == "ring"
        assert route(N // 2, V, BF, (9, 0)).name == "rows"
        assert route(N // 2, V, BF, (9, 0), ahead=True).name == "ring"
        assert route(N // 2 - 1, V, BF, (9, 0), ahead=True).name == "rows"
    for N, V, dtype, capability, aligned, options, why in (
        (8192, 57344, BF, (8, 0), True, (), "capability"),
        (8192, 57344, BF, (10, 0), True, (), "capability"),
        (8192, 57344, BF, None, True, (), "none is here"),
        (8192, 57344, torch.float32, (9, 0), True, (), "16 bits"),
        (8192, 50257, BF, (9, 0), True, (), "multiple"),
        (8192, 49152, BF, (9, 0), True, (), "faster"),
        (1023, 57344, BF, (9, 0), True, (), "fewer than 1024"),
        (511, 128256, BF, (9, 0), True, (), "fewer than 512"),
        (8192, 57344, BF, (9, 0), False, (), "16 bytes"),
        (8192, 1 << 24, BF, (9, 0), True, (), "more"),
        (8192, 57344, BF, (9, 0), True, ("softcap", "metrics"), "metrics, softcap"),
    ):
        found = route(N, V, dtype, capability, aligned, frozenset(options))
        assert found.name == "rows" and found.ring is None and why in found.why, (found, why)


@pytest.mark.parametrize("dtype", [BF, HALF])
@pytest.mark.parametrize("V", VOCABULARIES)
def test_a_part_of_a_row_fits_the_ring(V, dtype):
    ring = route(4096, V, dtype, (9, 0)).ring
    assert ring is not None
    chunks = -(-V // (ring.lines * LINE))
    assert -(-chunks // ring.parts) <= ring.slots
    assert ring.programs * (ring.slots * (ring.lines * LINE * 2 + 16) + 1024) <= SHARED


def test_rows_that_no_bulk_copy_reads_keep_the_other_kernel():
    def of(x, strides):
        return room.of_call(x.to("meta"), 4096, strides, frozenset()).name

    assert of(torch.empty(1, 57344, dtype=BF), (4096, 0, 57344)) == "rows"  # not on a GPU


def test_rows_that_a_bulk_copy_reads():
    def taken(x):
        x = x.unflatten(0, (2, -1)) if x.dim() == 2 else x
        lines, *strides = as_rows(x)
        assert lines is x
        return room.in_bulk(x, x.shape[:-1].numel(), tuple(strides))

    whole = torch.empty(8 * 72 + 8, dtype=BF)
    assert whole.data_ptr() % 16 == 0
    rows = whole[:576].view(8, 72)
    assert taken(rows) and taken(rows[:, :64]) and taken(rows[::2]) and taken(rows[:, 8:])
    assert taken(rows.view(2, 4, 72)[:, :3]) and taken(rows.view(4, 2, 72).transpose(0, 1))
    assert not taken(rows[:, 1:65]) and not taken(rows[:, ::2]), "rows begin elsewhere; classes lie apart"
    assert not taken(whole[: 8 * 71].view(8, 71)), "a row begins where the last one ends"
    for expanded in (rows[:1].expand(8, 72), rows[:2, None].expand(2, 4, 72), rows[None, :4].expand(2, 4, 72)):
        assert not taken(expanded)
    assert not taken(whole.as_strided((8, 64), (8, 1))), "rows lie over one another"
    assert taken(rows[:1, None].expand(1, 1, 72)) and taken(rows[:1].as_strided((1, 1, 72), (0, 8, 1)))


def test_explain_names_it():
    rows = room.routes(BF)
    assert len(rows) >= 3 and all(name in ("ring", "rows") and why for _, name, why in rows)


# ------------------------------------------------------------------------------------------------ the order of the ring
class Program:
    """The three roles of one program as generators that yield where they wait: what they wait for."""

    def __init__(self, number: int, ring: Ring, chunks: int, rows: list[bool], groups: int, notes: set, log: list):
        self.part, self.first_row = number % ring.parts, number // ring.parts
        each = -(-chunks // ring.parts)
        first = min(self.part * each, chunks)
        self.mine = range(first, min(first + each, chunks))
        self.rows = [n for n in range(self.first_row, len(rows), groups) if rows[n]]
        self.slots = ring.slots
        self.parts = ring.parts
        self.held: list = [None] * ring.slots  # (row, chunk) that lies in a slot
        self.filled, self.freed = [0] * ring.slots, [0] * ring.slots  # barriers' completed phases
        self.notes, self.log = notes, log

    def chunks(self):
        return ((number, n, j) for number, (n, j) in enumerate(itertools.product(self.rows, self.mine)))

    def produce(self):
        for number, n, j in self.chunks():
            slot, turn = number % self.slots, number // self.slots
            while self.freed[slot] < turn:
                yield
            self.held[slot] = (n, j)
            self.filled[slot] += 1
            yield

    def _take(self, number, n, j):
        slot, turn = number % self.slots, number // self.slots
        while self.filled[slot] <= turn:
            yield
        assert self.held[slot] == (n, j), "a slot was overwritten before its time"

    def sum_up(self):
        for number, n, j in self.chunks():
            yield from self._take(number, n, j)
            if j == self.mine[-1]:
                self.notes.add((n, self.part))
            yield

    def write(self):
        for number, n, j in self.chunks():
            if j == self.mine[0]:
                while not all((n, part) in self.notes for part in range(self.parts)):
                    yield
            yield from self._take(number, n, j)
            self.log.append((n, j))
            self.freed[number % self.slots] += 1
            yield


def _finished(ring: Ring, chunks: int, rows: list[bool], groups: int, seed: int) -> list | None:
    """What was written, or None where nobody can go on."""
    random.seed(seed)
    notes: set = set()
    log: list = []
    programs = [Program(i, ring, chunks, rows, groups, notes, log) for i in range(groups * ring.parts)]
    live = [role for p in programs for role in (p.produce(), p.sum_up(), p.write())]
    idle = 0
    while live and idle < 50 * len(live):
        before = len(log), len(notes), sum(sum(p.filled) for p in programs)
        role = random.choice(live)
        if next(role, "done") == "done":
            live.remove(role)
        idle = 0 if before != (len(log), len(notes), sum(sum(p.filled) for p in programs)) else idle + 1
    return None if live else log


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parts,slots,chunks", [(1, 3, 1), (1, 4, 4), (1, 5, 4), (2, 3, 6), (2, 5, 5), (4, 2, 8)])
def test_every_chunk_is_summed_before_it_is_written_once(parts, slots, chunks, seed):
    rows = [bool(i % 5) for i in range(23)]
    log = _finished(Ring(4, 4, 96, 64, slots, parts, 1), chunks, rows, 3, seed)
    assert log is not None
    assert sorted(log) == [(n, j) for n, live in enumerate(rows) if live for j in range(chunks)]


def test_a_ring_that_does_not_hold_a_row_would_wait_for_ever():
    """What route.py rules out: the model finds it."""
    assert _finished(Ring(4, 4, 96, 64, 3, 1, 1), 4, [True] * 4, 2, 0) is None


# ------------------------------------------------------------------------------------------------ compiling
@pytest.mark.parametrize(
    "V,dtype,more",
    [
        (57344, "bfloat16", ()),
        (128256, "bfloat16", ()),
        (262144, "bfloat16", ()),
        (57344, "float16", ()),
        (128256, "bfloat16", ("panels",)),
        (256000, "float16", ("panels",)),
    ],
)
def test_compiles_for_hopper(V, dtype, more):
    """Nothing spills, the ring fits, and a slot is freed behind the stores of what was read from it: a load from
    shared memory may still be on its way where a barrier is passed, and a bulk copy would overtake it.
    """
    pytest.importorskip("triton.experimental.gluon")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(TESTS / "compile_ring.py"), str(V), dtype, *more]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, programs, spilled, order = done.stdout.split()
    assert (int(shared) + 1024) * int(programs) <= SHARED + 1024
    assert int(spilled) == 0
    assert order == "load,store,free,load,store,free"


# ------------------------------------------------------------------------------------------------ results
hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
    ),
]
NO_LABEL = -100


def _ring(V: int, dtype=BF) -> Ring:
    ring = route(4096, V, dtype, (9, 0)).ring
    assert ring is not None
    return ring


def _run(x, y, row_weight=None, up=None, z_loss=0.0, scale=1.0, inplace=False, ring=None):
    """(loss, top, log_total, gradient); the outputs' memory holds what no kernel may leave there."""
    from riftco.kernels.cross_entropy.cuda import hopper as kernels

    ring = ring or _ring(x.shape[-1], x.dtype)
    _, *strides = as_rows(x)
    out = [torch.full(y.shape, 7.0, device="cuda") for _ in range(3)]
    g = x if inplace else torch.full(x.shape, torch.nan, dtype=x.dtype, device="cuda")
    g_strides = strides[1:] if inplace else (strides[0] * x.shape[-1], x.shape[-1])
    stride_up = 0 if up is None or up.dim() == 0 else 1
    rows = kernels.Rows(y, row_weight, up, stride_up, out, (NO_LABEL, z_loss, scale))
    kernels.forward_backward(x, tuple(strides), g, tuple(g_strides), rows, ring)
    return *out, g


def _labels(N: int, V: int):
    """Rows of every kind: the last and the first class, none by ignore_index or another negative, no class at all."""
    y = torch.randint(0, V, (N,), device="cuda")
    for at, label in ((1, NO_LABEL), (2, V - 1), (3, 0), (4, V), (5, 2**40), (6, -3), (7, NO_LABEL)):
        if at < N:
            y[at] = label
    return y


def _check(x, y, row_weight=None, up=None, z_loss=0.0, scale=1.0, inplace=False, ring=None, extremes=False):
    """Beside the spec in float64; the gradient is rounded once; equal bits in a second run and over the logits."""
    before = x.clone()
    got = _run(x.clone() if inplace and x.is_contiguous() else x, y, row_weight, up, z_loss, scale, inplace, ring)
    again = _run(before.clone(), y, row_weight, up, z_loss, scale, not inplace, ring)
    for a, b in zip(got, again):
        assert torch.equal(a.nan_to_num(nan=3e4), b.nan_to_num(nan=3e4))
    weight, d = (None if t is None else t.double().expand(y.shape) for t in (row_weight, up))
    want = spec.forward_backward(before.double(), y.long(), weight, None, d, NO_LABEL, 0.0, z_loss, 0.0, scale, False)
    for a, b in zip(got[: 1 if extremes else 3], want):
        torch.testing.assert_close(a.double(), b, rtol=3e-6, atol=3e-6, equal_nan=True)
    half, least = (2**-8, 1e-9) if x.dtype == BF else (2**-11, 6e-8)
    torch.testing.assert_close(got[3].double(), want[-1], rtol=1.02 * half, atol=least, equal_nan=True)
    skipped = (y == NO_LABEL) | (y < 0) if row_weight is None else (y == NO_LABEL) | (y < 0) | (row_weight == 0)
    assert not got[3][skipped].any() and not got[0][skipped].any()


def _logits(N: int, V: int, dtype=BF, factor: float = 3.0):
    return (factor * torch.randn(N, V, device="cuda")).to(dtype)


class TestOnHopper:
    pytestmark = hopper

    @pytest.mark.parametrize("N", [1, 5, 131, 300, 1000])
    @pytest.mark.parametrize("V", [57344, 57408, 128256])
    def test_few_and_many_rows(self, N, V):
        _check(_logits(N, V), _labels(N, V), up=torch.rand(N, device="cuda") - 0.3)

    @pytest.mark.parametrize("V", VOCABULARIES)
    def test_vocabularies(self, V):
        x, y = _logits(70, V), _labels(70, V)
        x[2, V - 1], x[3, 0] = 40.0, 25.0  # confident: 1 - p of 1e-13 and of 1e-7
        x[1], x[6] = torch.nan, torch.inf  # rows that are not read
        _check(x, y, up=torch.tensor(0.37, device="cuda"), z_loss=1e-4, scale=0.5)

    @pytest.mark.parametrize("parts", [1, 2, 4])
    def test_borders_of_the_ring(self, parts):
        """One chunk, parts without any, a ring that is exactly full, and one more line than whole chunks."""
        ring = Ring(4, 4, 96, 64, 5, parts, 2)
        C = ring.lines * LINE
        for V in (LINE, C, C + LINE, 3 * C, 5 * parts * C - LINE, 5 * parts * C):
            for N in (1, 40, 600):
                _check(_logits(N, V), _labels(N, V), ring=ring)

    @pytest.mark.parametrize("V", [57344, 128256, 262144])
    @pytest.mark.parametrize("dtype", [BF, HALF])
    def test_rows_of_weight_zero_int32_labels_and_both_dtypes(self, V, dtype):
        w = torch.rand(300, device="cuda") + 0.5
        w[::3] = 0
        x = _logits(300, V, dtype)
        x[0] = torch.nan
        _check(x, _labels(300, V).clamp(max=2**31 - 1).int(), w, torch.rand(300, device="cuda"))

    @pytest.mark.parametrize("z_loss", [0.0, 1e-4])
    @pytest.mark.parametrize("V", [57344, 128256])
    def test_infinities_and_nan(self, V, z_loss):
        x, y = _logits(40, V), torch.randint(9, V, (40,), device="cuda")
        x[0], x[1, 5], x[2, V // 2], x[3, V - 1], x[4] = -torch.inf, torch.inf, torch.nan, -torch.inf, 0.0
        x[5, y[5]], x[6, y[6]] = torch.inf, -torch.inf
        x[7], x[8] = -torch.inf, -torch.inf
        x[7, y[7]], x[8, 3] = 0.0, 0.0  # the label is the only class, and another one is
        x[9] *= 1000
        _check(x, y, z_loss=z_loss, extremes=True)

    @pytest.mark.parametrize("V", [57344, 151936])
    def test_strided_and_shifted_rows_in_place(self, V):
        """Rows 16 bytes apart, and [B, T - 1, V] of longer sequences; what lies between is not touched."""
        whole = _logits(300, V + 8)
        behind = whole[:, V:].clone()
        _check(whole[:, :V], _labels(300, V), inplace=True)
        assert torch.equal(whole[:, V:], behind)
        longer = _logits(4 * 80, V).view(4, 80, V)
        last = longer[:, -1].clone()
        _check(longer[:, :-1], _labels(4 * 79, V).view(4, 79), inplace=True)
        assert torch.equal(longer[:, -1], last)

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("aligned", [False, True])
    def test_slices_that_begin_anywhere(self, weighted, aligned):
        """Later launches go round Triton's look at their arguments; the bits are those of all rows at once."""
        from riftco.kernels.cross_entropy.cuda import Slices

        V, sizes = 65600, (512, 512, 516, 600, 12) if aligned else (512, 513, 600, 515, 12)
        N = sum(sizes)
        x, y, up = _logits(N, V), _labels(N, V), torch.rand(N, device="cuda") - 0.3
        weight = torch.rand(N, device="cuda") if weighted else None
        want = _run(x, y, weight, up, 1e-4, 0.5)
        for _ in range(2):
            z, out = x.clone(), [torch.full((N,), 7.0, device="cuda") for _ in range(3)]
            each, first = Slices(y, weight, None, up, (NO_LABEL, 0.0, 1e-4, 0.0, 0.5), False, True, out), 0
            for n in sizes:
                each(z[first : first + n], first)
                first += n
            ringed = first - sizes[-1]  # the last few rows go another way
            for a, b in zip((*out, z), want, strict=True):
                assert torch.equal(a[:ringed].nan_to_num(), b[:ringed].nan_to_num())
                torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-6, equal_nan=True)

    @pytest.mark.parametrize(
        "V,span,together",
        [(128256, 8192, 3), (128256, 24576, 6), (128256, 65536, 1), (131072, 8192, 15), (256000, 24576, 1)],
    )
    @pytest.mark.parametrize("N", [7, 600])
    def test_rows_in_panels(self, N, V, span, together):
        """The bits of whole rows, wherever panels lie; what lies between their two places is let alone."""
        from riftco.kernels.cross_entropy.cuda import Slices

        x, y, up = _logits(N, V), _labels(N, V), torch.rand(N, device="cuda") - 0.3
        y[-3:] = torch.tensor([span - 1, span, V // span * span - 1], device="cuda")
        weight = torch.rand(N, device="cuda")
        weight[-4] = 0
        want = _run(x, y, weight, up, 1e-4, 0.5)
        widths = [min(span, V - lo) for lo in range(0, V, span)]
        gap = 1 << 12
        memory = torch.full((N * V + gap,), 5.0, dtype=BF, device="cuda")
        begins = [N * lo + (gap if i >= together else 0) for i, lo in enumerate(range(0, V, span))]
        panels = [memory[b : b + N * w].view(N, w) for b, w in zip(begins, widths)]
        for panel, part in zip(panels, x.split(span, 1)):
            panel.copy_(part)
        out = [torch.full((N,), 7.0, device="cuda") for _ in range(3)]
        each = Slices(y, weight, None, up, (NO_LABEL, 0.0, 1e-4, 0.0, 0.5), False, True, out)
        ringed = room.of_panels(panels[0], V) is not None
        assert ringed == (N >= 256)
        each.in_panels(panels, together)
        for a, b in zip((*out, torch.cat(panels, 1)), want, strict=True):
            if ringed:
                assert torch.equal(a.nan_to_num(), b.nan_to_num())
            torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-6, equal_nan=True)
        if together < len(panels):
            assert bool((memory[begins[together] - gap : begins[together]] == 5.0).all())

    @pytest.mark.parametrize("inplace", [False, True])
    def test_through_the_public_function(self, inplace):
        N = 1024
        x, y = _logits(N, 57344), _labels(N, 57344).clamp(max=57343)
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        logits = 1 * a  # no leaf, which may not be written over
        assert room.of_call(x, N, (N, 0, 57344), frozenset()).name == "ring"
        loss, want = cross_entropy(logits, y, inplace=inplace), cross_entropy(b, y, impl="spec")
        (loss * 2).backward()
        (want * 2).backward()
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=2**-7, atol=1e-9)

    def test_more_than_two_to_the_31_logits(self):
        N, V = 8500, 256000
        if torch.cuda.mem_get_info()[0] < 6 * N * V:
            pytest.skip("needs 13 GB")
        x = torch.randn(N, V, device="cuda", dtype=BF)
        y = torch.randint(0, V, (N,), device="cuda")
        some = torch.tensor([0, 1, N // 2, N - 2, N - 1], device="cuda")
        want = spec.forward_backward(x[some].double(), y[some], *(None,) * 3, NO_LABEL, 0.0, 0.0, 0.0, 1.0, False)
        got = _run(x, y, inplace=True)
        torch.testing.assert_close(got[0][some].double(), want[0], rtol=3e-6, atol=0)
        torch.testing.assert_close(got[3][some].double(), want[-1], rtol=1.02 * 2**-8, atol=1e-9)

    def test_a_graph_of_it(self):
        """Captured and replayed on other logits: nothing depends on the host, or on what a replay left."""
        x, y = _logits(300, 128256), _labels(300, 128256)
        _run(x, y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = _run(x, y)
        for _ in range(2):
            x.copy_(_logits(300, 128256))
            graph.replay()
            for a, b in zip(got, _run(x, y)):
                assert torch.equal(a.nan_to_num(nan=3e4), b.nan_to_num(nan=3e4))
