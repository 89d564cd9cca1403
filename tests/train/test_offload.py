"""Saved activations on the host: which ones, in which order, for how long; values are the same bits."""

import gc
import weakref

import pytest
import torch
from torch import nn
from train.tiny import parts

from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.train import Schedule, Trainer
from riftco.train.offload import ON_THE_WAY, Offload

ROWS, WIDTH = 64, 96
BYTES = 4 * ROWS * WIDTH


class Recorded:
    """In place of a device's streams: copies at once, and writes down what was asked for."""

    def __init__(self):
        self.log, self.leaving, self.fetched = [], [], []

    def out(self, t):
        self.log.append(("out", len(self.leaving)))
        self.leaving.append(weakref.ref(t))
        return t.clone(), ("left", len(self.leaving) - 1)

    def back(self, host, like):
        there = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(host)
        self.fetched.append(there)
        self.log.append(("back", host))
        return there, ("came", len(self.fetched) - 1)

    def wait(self, point):
        self.log.append(("wait", point))


class Deep(nn.Module):
    """Each layer saves what it is given (and its weight), the activation what it returns."""

    def __init__(self, layers=5):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


def gradients(model, x, offload=None):
    model.zero_grad()
    if offload is None:
        loss = model(x)
    else:
        with offload:
            loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.fixture
def deep():
    return Deep(), torch.randn(ROWS, WIDTH)


def offloaded(model, **options):
    return Offload(model, "cpu", smallest=1, lanes=Recorded(), **options)


def test_values_are_the_same_bits_and_each_tensor_travels_once(deep):
    model, x = deep
    made = offloaded(model)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, x, made), gradients(model, x)))
    lanes = made._lanes
    # x, and what each of five layers returned: saved by the tanh and by the next layer, or the square, but copied once
    assert len(lanes.leaving) == 2 * 6
    assert made.offloaded_bytes == 6 * BYTES
    assert made.kept_bytes == 0


def test_two_at_most_stay_while_they_leave_and_none_after_the_forward(deep):
    model, x = deep
    made = offloaded(model)
    most = 0
    real = made._lanes.out

    def out(t):
        nonlocal most
        copied = real(t)
        most = max(most, sum(r() is not None for r in made._lanes.leaving[:-1]))
        return copied

    made._lanes.out = out
    with made:
        loss = model(x)
    assert most <= ON_THE_WAY + 1  # and the one that the next layer is computed from
    gc.collect()
    assert [r() is not None for r in made._lanes.leaving[1:]] == [False] * 5  # x is the caller's
    waits = [i for i, e in enumerate(made._lanes.log) if e[0] == "wait"]
    outs = [i for i, e in enumerate(made._lanes.log) if e[0] == "out"]
    assert len(waits) == len(outs) == 6
    for n, at in enumerate(waits):  # a tensor is let go of after its own copy, and the newest two are not waited for
        assert made._lanes.log[at] == ("wait", ("left", n))
        assert n + ON_THE_WAY >= len(outs) or outs[n + ON_THE_WAY] < at
    loss.backward()


def test_the_backward_finds_the_next_ones_on_their_way(deep):
    model, x = deep
    made = offloaded(model)
    with made:
        loss = model(x)
    made._lanes.log.clear()
    hosts = [made._order[i]().host for i in range(6)]
    loss.backward()
    log = made._lanes.log
    came = [next(i for i, h in enumerate(hosts) if h is e[1]) for e in log if e[0] == "back"]
    assert came == [5, 4, 3, 2, 1, 0]
    first_wait = log.index(("wait", ("came", 0)))
    second_wait = log.index(("wait", ("came", 1)))
    # when the second is needed, the third is on its way already
    assert sum(e[0] == "back" for e in log[:second_wait]) == 1 + ON_THE_WAY
    assert first_wait == 1
    waited = [e[1] for e in log if e[0] == "wait"]
    assert len(waited) == len(set(waited)) == 6
    del loss, hosts
    gc.collect()
    assert not made._order and not made._known and not made._arriving and made._on_host == 0


def test_weights_their_views_and_small_tensors_stay(deep):
    model, x = deep
    made = Offload(model, "cpu", smallest=BYTES + 1, lanes=Recorded())
    gradients(model, x, made)
    assert not made._lanes.log and made.kept_bytes > 0

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.scale = torch.rand(WIDTH, WIDTH)  # a plain attribute, as quantised weights are

        def forward(self, x):
            return ((x @ self.weight.t()) @ self.weight[:, : WIDTH // 2] * self.scale[:ROWS, : WIDTH // 2]).sum()

    tied = Tied()
    made = offloaded(tied)
    gradients(tied, x, made)
    assert made.offloaded_bytes == 2 * BYTES  # x, and x W^T; no weight, no view of one


def test_a_budget_keeps_the_last_ones(deep):
    model, x = deep
    made = offloaded(model, host_bytes=2 * BYTES + 5)
    want = gradients(model, x)
    assert all(map(torch.equal, gradients(model, x, made), want))
    assert (made.offloaded_bytes, len(made._lanes.leaving)) == (2 * BYTES, 2)
    assert made.kept_bytes > 0
    gradients(model, x, made)
    assert len(made._lanes.leaving) == 4, "the budget of a backward that is done is free again"
    with pytest.raises(ValueError, match="host_bytes must be 0 or more; got -1"):
        Offload(model, "cpu", host_bytes=-1)


def test_strides_survive_and_what_overlaps_stays():
    class Strided(nn.Module):
        def forward(self, x, y):
            return (x.t() * y).sum() + (x[:1].expand(5, -1) * x[:5]).sum()

    x, y = torch.randn(8, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    made = offloaded(Strided())
    with made:
        loss = Strided()(x * 1, y * 1)
    loss.backward()
    got = [x.grad.clone(), y.grad.clone()]
    x.grad = y.grad = None
    Strided()(x * 1, y * 1).backward()
    assert torch.equal(got[0], x.grad) and torch.equal(got[1], y.grad)
    assert made.kept_bytes > 0


def test_two_forwards_then_their_backwards_and_a_second_backward(deep):
    model, x = deep
    z = torch.randn(ROWS, WIDTH)
    want = [gradients(model, x), gradients(model, z)]
    made = offloaded(model)
    model.zero_grad()
    with made:
        a = model(x)
    with made:
        b = model(z)
    a.backward(retain_graph=True)
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want[0][1:]))
    model.zero_grad()
    b.backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want[1][1:]))
    model.zero_grad()
    a.backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), want[0][1:]))


def test_an_error_in_the_forward_leaves_no_hooks(deep):
    model, _ = deep
    made = offloaded(model)
    with pytest.raises(RuntimeError), made:
        model(torch.randn(3, 5))
    made._lanes.log.clear()
    torch.tanh(torch.randn(4, requires_grad=True))
    assert not made._lanes.log and not made._leaving


@pytest.mark.parametrize("smallest", [1, 1 << 30], ids=["offloaded", "kept"])
def test_a_graph_without_a_backward_dies_with_its_last_name(smallest):
    """tanh saves what it returns: through a hook it could hold itself, where no garbage collector looks."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    made = Offload(nn.Identity(), "cpu", smallest=smallest, lanes=Recorded())
    with made:
        y = torch.tanh(x * 1)
    seen = weakref.ref(y.untyped_storage())
    del y
    assert seen() is None


CONFIG = DecoderConfig("llama", 61, 32, 48, 2, 4, 2, 8, 64, Rope(8, 1e4))


@pytest.mark.parametrize("replay", ["disabled", "block", "selective"])
def test_a_decoder_with_recomputed_activations_and_checkpointing(replay):
    torch.manual_seed(0)
    model = Decoder(CONFIG, activation_checkpointing=replay)
    ids = torch.randint(61, (2, 24))

    def step(made=None):
        model.zero_grad()
        if made is None:
            model.loss(ids, ids, n_labelled=48).backward()
        else:
            with made:
                loss = model.loss(ids, ids, n_labelled=48)
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    made = offloaded(model)
    assert all(map(torch.equal, step(made), step()))
    # a block's input of [48, 32] at least goes for each layer, whatever is recomputed
    assert made.offloaded_bytes >= 2 * 4 * 48 * 32
    held = {t.data_ptr() for t in model.parameters()}
    assert not any(r() is not None and r().data_ptr() in held for r in made._lanes.leaving)


def test_a_run_is_the_same_with_it():
    runs = []
    for with_it in (False, True):
        model, optimizer, loader = parts()
        made = offloaded(model) if with_it else None
        trainer = Trainer(model, optimizer, loader, Schedule(0.05, 6), accumulate=2, offload=made)
        runs.append([m.loss for m in trainer.run().metrics])
        assert made is None or made.offloaded_bytes > 0
    assert runs[0] == runs[1]
    with pytest.raises(ValueError, match="chunk and offload exclude each other"):
        Trainer(model, optimizer, loader, Schedule(0.05, 6), chunk=4, offload=made)


def test_on_a_cpu_it_says_that_it_does_nothing(deep):
    model, x = deep
    made = Offload(model, "cpu")
    assert made.why_not == "activations on cpu are not offloaded: only a CUDA device's memory is apart"
    assert all(map(torch.equal, gradients(model, x, made), gradients(model, x)))
    assert made.offloaded_bytes == 0


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("replay", ["disabled", "block"])
def test_on_a_gpu_the_peak_is_lower_and_the_bits_the_same(replay, monkeypatch):
    """Deterministic mode: attention's backward would add dQ in any order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        _lower_peak_and_same_bits(replay)
    finally:
        torch.use_deterministic_algorithms(False)


def _lower_peak_and_same_bits(replay):
    torch.manual_seed(0)
    config = DecoderConfig("llama", 1024, 1024, 2816, 8, 16, 8, 64, 4096, Rope(64, 1e4))
    model = Decoder(config, activation_checkpointing=replay).cuda().bfloat16()
    if replay == "block":  # else the gradients of the blocks grow faster than what is kept of them goes away
        model.model.layers.requires_grad_(False)
    ids = torch.randint(1024, (2, 4096), device="cuda")
    trained = [p for p in model.parameters() if p.requires_grad]
    made, results = Offload(model, "cuda"), []
    for offload in (None, made):
        for _ in range(2):  # the first warms up: kernels, workspaces, pinned memory
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            if offload is None:
                loss = model.loss(ids, ids, n_labelled=ids.numel())
            else:
                with offload:
                    loss = model.loss(ids, ids, n_labelled=ids.numel())
            loss.backward()
            grads = [p.grad.clone() for p in trained]
            peak = torch.cuda.max_memory_allocated() - before
            del loss
        results.append((grads, peak))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    print(f"{replay}: peak of a step {results[0][1] >> 20} -> {results[1][1] >> 20} MiB")
    assert results[1][1] <= results[0][1] - made.offloaded_bytes // 2


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_the_compute():
    """Many large products between few saves: the forward's time hardly grows."""

    class Heavy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64)

        def forward(self, x):
            for _ in range(6):
                with torch.no_grad():
                    for _ in range(30):
                        x @ self.weight
                x = torch.tanh(x)
            return x.sum()

    model = Heavy()
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    made, times = Offload(model, "cuda"), []
    for offload in (None, made):
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            if offload is None:
                loss = model(x)
            else:
                with offload:
                    loss = model(x)
            end.record()
            loss.backward()
            torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    print(f"forward {times[0]:.2f} -> {times[1]:.2f} ms, {made.offloaded_bytes >> 20} MiB offloaded")
    assert made.offloaded_bytes >= 6 * x.nbytes
    assert times[1] < 1.5 * times[0]
