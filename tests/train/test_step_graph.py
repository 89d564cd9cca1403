"""A captured step: when it is made, what it depends on, what drops it; on a GPU, its bits.

On a CPU a stand-in records the work and does it again on the buffers that it was recorded on, as a graph would, with no
hook of any module called.
"""

import pytest
import torch
from train.tiny import VOCABULARY, TinyModel, packed, parts

from riftco.adapters import LoraSpec, apply_lora
from riftco.data import Example, Loader, TokenArrays, TokenLoader
from riftco.models import Decoder, DecoderConfig
from riftco.models.generation import generate_tokens
from riftco.models.rotary import Rope
from riftco.optim import Adam
from riftco.train import Schedule, StepAbandoned, Trainer, TrainerPoisoned, evaluate
from riftco.train.capture import CannotCapture, CudaCapture
from riftco.train.step_graph import StepGraph


class Recorded:
    def __init__(self, run, model):
        self.run, self.model, self.pool_bytes, self.resets, self.fails = run, model, 1 << 20, 0, None
        self.output = run()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()  # a capture computes nothing

    def replay(self):
        assert not self.resets
        if self.fails is not None:
            raise self.fails
        hooks = [(m, m._forward_pre_hooks) for m in self.model.modules()]
        for m, _ in hooks:
            m._forward_pre_hooks = type(m._forward_pre_hooks)()
        try:
            self.output.copy_(self.run())
        finally:
            for m, held in hooks:
                m._forward_pre_hooks = held

    def reset(self):
        self.resets += 1


class StandIn:
    def __init__(self, model, refuses=None):
        self.model, self.refuses, self.made = model, refuses, []

    def why_not(self, device):
        return ""

    def __call__(self, run, device):
        run()  # warming up
        if self.refuses is not None:
            raise self.refuses
        self.made.append(Recorded(run, self.model))
        return self.made[-1]


def windows(tokens=24, rows=3, seed=0):
    """Micro-batches of one geometry."""
    corpus = torch.arange(400).remainder(VOCABULARY).numpy().astype("uint8")
    return TokenLoader(TokenArrays(corpus), tokens, seed, context=tokens // rows)


def trainer(graph=True, *, accumulate=1, dropout=0.0, source=None, refuses=None, steps=30, **options):
    model, optimizer, _ = parts(dropout=dropout)
    notes, step_graph = [], None
    if graph:
        stand_in = StandIn(model, refuses)
        step_graph = StepGraph(model, optimizer, note=notes.append, capture=stand_in)
    made = Trainer(
        model, optimizer, source or windows(), Schedule(0.05, steps), accumulate=accumulate, step_graph=step_graph,
        **options,
    )  # fmt: skip
    made.notes, made.captures = notes, stand_in.made if graph else []
    return made


def ran(made, steps):
    torch.manual_seed(11)  # of dropout
    return made.run(steps)


def weights(made):
    return [p.detach().clone() for p in made.model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_is_bit_equal_to_the_eager_one(accumulate, dropout):
    eager, made = (trainer(g, accumulate=accumulate, dropout=dropout) for g in (False, True))
    want, got = ran(eager, 8), ran(made, 8)
    assert [m.loss for m in got.metrics] == [m.loss for m in want.metrics]
    assert [m.gradient_norm for m in got.metrics] == [m.gradient_norm for m in want.metrics]
    assert equal(made, eager)
    graph = made.step_graph
    assert (graph.eager, graph.captured, graph.replayed) == (1, 1, 8 * accumulate - 1)
    assert graph.pool_bytes == 1 << 20
    assert made.notes == [
        "step graph: captured 24 tokens in up to 4 documents, up to 24 labels; its pool holds 1.0 MiB"
    ]
    assert all(p.grad is None for p in made.model.parameters()), "a finished step leaves no gradient"


def test_the_buffers_hold_the_new_batch_and_the_new_denominator():
    made = trainer()
    made.run(3)
    entry = made.step_graph._entry
    state = made.source.state_dict()
    made.run(1)
    made.source.load_state_dict(state)
    batch = made.source.next()
    assert torch.equal(entry.inputs.input_ids, batch.input_ids)
    assert torch.equal(entry.inputs.target, batch.target)
    assert entry.inputs.input_ids.data_ptr() != batch.input_ids.data_ptr()
    assert float(entry.denominator) == batch.n_labelled
    kept = entry.denominator
    made.accumulate = 2
    made.run(1)
    assert entry is made.step_graph._entry and entry.denominator is kept and float(kept) == 2 * batch.n_labelled


def test_a_loss_outlives_the_next_replay():
    made = trainer()
    made.run(3)
    batches = [made.source.next() for _ in range(2)]
    first = made.step_graph(batches[0], batches[0], 24, made._graph)
    before = first.clone()
    second = made.step_graph(batches[1], batches[1], 24, made._graph)
    assert torch.equal(first, before) and not torch.equal(first, second)


def test_micro_batches_that_are_captured_and_eager_ones_accumulate_together():
    """Larger ones come in the third step: the captured one is dropped and made anew, and the smaller ones fit it."""

    class Mixed:
        def __init__(self):
            self.small, self.large, self.n = windows(), windows(32, 4), 0

        def next(self):
            self.n += 1
            return (self.large if self.n > 6 and self.n % 3 == 2 else self.small).next()

        def state_dict(self):
            return {"n": self.n, "small": self.small.state_dict(), "large": self.large.state_dict()}

        def load_state_dict(self, state):
            self.n = state["n"]
            self.small.load_state_dict(state["small"])
            self.large.load_state_dict(state["large"])

    eager, made = (trainer(g, accumulate=3, source=Mixed()) for g in (False, True))
    want, got = eager.run(4), made.run(4)
    assert [m.loss for m in got.metrics] == pytest.approx([m.loss for m in want.metrics], rel=1e-6)
    graph = made.step_graph
    assert (graph.captured, graph.replayed, graph.eager) == (2, 10, 2)
    assert dict(graph.drops) == {"other tokens, labelled": 1}
    assert made.captures[0].resets == 1 and not made.captures[1].resets


def test_chats_of_any_lengths_replay_one_graph():
    """Micro-batches of many documents' lengths and numbers of labels, through packed attention."""
    gen = torch.Generator().manual_seed(2)
    data = []
    for line in range(1, 40):
        n, asked = (int(torch.randint(a, b, (), generator=gen)) for a, b in ((4, 17), (1, 4)))
        ids = torch.randint(0, VOCABULARY, (n,), generator=gen).tolist()
        data.append(Example(tuple(ids), (0.0,) * asked + (1.0,) * (n - asked), line=line))
    runs = []
    for graph in (False, True):
        torch.manual_seed(1)
        model = Decoder(DecoderConfig("llama", VOCABULARY, 16, 24, 2, 2, 1, 8, 64, Rope(8, 1e4)))
        optimizer = Adam(model.parameters(), gradient_clip=1.0)
        step_graph = StepGraph(model, optimizer, note=lambda text: None, capture=StandIn(model)) if graph else None
        made = Trainer(model, optimizer, Loader(data, 48, 0), Schedule(0.01, 30), step_graph=step_graph)
        runs.append((made.run(30).metrics, step_graph))
    (want, _), (got, graph) = runs
    assert len({(m.tokens, m.physical_tokens) for m in got}) > 5, "the batches differ, and metrics count them unpadded"
    assert [(m.tokens, m.physical_tokens) for m in got] == [(m.tokens, m.physical_tokens) for m in want]
    assert [m.loss for m in got] == pytest.approx([m.loss for m in want], rel=1e-4)
    assert [m.gradient_norm for m in got] == pytest.approx([m.gradient_norm for m in want], rel=1e-3)
    assert graph.captured <= 3 and graph.replayed >= 24


def dropped(made, why, before=1):
    graph = made.step_graph
    assert dict(graph.drops) == {why: 1}, graph.drops
    assert graph._entry is None and graph.pool_bytes == 0
    assert made.captures[before - 1].resets == 1
    assert made.notes[-1] == f"step graph: dropped, {why}"
    assert not any(m._forward_pre_hooks for m in made.model.modules()), "no hook stays"


def test_evaluation_drops_it_and_the_next_step_captures_anew():
    eager, made = trainer(False), trainer()
    eager.run(3)
    made.run(3)
    batch = [packed([5, 5])]
    assert evaluate(made.model, batch) == evaluate(eager.model, batch)
    dropped(made, "the model ran in evaluation mode")
    eager.run(2)
    made.run(2)
    assert made.step_graph.captured == 2 and equal(made, eager)


def test_scoring_and_generation_drop_it():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig("llama", VOCABULARY, 16, 24, 2, 2, 1, 8, 64, Rope(8, 1e4)))
    optimizer = Adam(model.parameters(), lr=1e-3)
    uses = {
        "scoring": lambda: model.loss(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)),
        "hidden states": lambda: model.hidden(torch.zeros(1, 4, dtype=torch.int64)),
        "generation": lambda: list(generate_tokens(model, [1, 2, 3], max_new_tokens=2)),
        "a layer alone": lambda: model.model.norm(torch.zeros(1, 16)),
    }
    for name, use in uses.items():
        stand_in = StandIn(model)
        graph = StepGraph(model, optimizer, note=lambda text: None, capture=stand_in)
        made = Trainer(model, optimizer, windows(), Schedule(1e-3, 40), step_graph=graph)
        made.run(3)
        assert graph._entry is not None, name
        with torch.no_grad():
            use()
        assert graph._entry is None and stand_in.made[0].resets == 1, name
        made.run(1)
        assert graph.captured == 2, name


def test_what_is_trained_and_a_loaded_state_drop_it():
    made = trainer()
    made.run(3)
    made.model.place.weight.requires_grad_(False)
    made.run(1)
    assert dict(made.step_graph.drops) == {"other trainable, frozen": 1}
    made.run(1)
    assert made.step_graph.captured == 2
    other = trainer()
    other.run(3)
    other.load_state_dict(*other.state_dict())
    dropped(other, "a loaded state")


def test_out_of_memory_in_a_replay_drops_it_and_the_step_and_goes_on():
    eager, made = trainer(False), trainer()
    eager.run(4)
    made.run(3)
    made.captures[0].fails = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(StepAbandoned, match="the same batch comes next"):
        made.run(1)
    dropped(made, "an error")
    made.run(1)
    assert equal(made, eager)


def test_a_device_error_in_a_replay_poisons():
    made = trainer()
    made.run(3)
    made.captures[0].fails = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(TrainerPoisoned):
        made.run(1)
    dropped(made, "an error")
    with pytest.raises(TrainerPoisoned, match="unusable"):
        made.run(1)


def test_a_gradient_that_is_not_finite_drops_it_and_writes_nothing():
    made = trainer()
    made.run(3)
    before = weights(made)
    recorded = made.captures[0]
    real = recorded.replay

    def broken():
        real()
        made.model.embed.weight.grad[0, 0] = torch.nan

    recorded.replay = broken
    with pytest.raises(StepAbandoned, match="not finite"):
        made.run(1)
    dropped(made, "a failed step")
    assert all(map(torch.equal, before, weights(made)))


@pytest.mark.parametrize(
    ("refuses", "why"),
    [
        (CannotCapture("the step cannot be captured: RuntimeError: it waits"), "the step cannot be captured: Runtime"),
        (torch.OutOfMemoryError("CUDA out of memory"), "a captured step does not fit in memory: OutOfMemoryError"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_cannot_be_captured_stays_eager_with_a_reason(refuses, why, accumulate):
    eager = trainer(False, dropout=0.4, accumulate=accumulate)
    made = trainer(dropout=0.4, accumulate=accumulate, refuses=refuses)
    ran(eager, 4)
    ran(made, 4)
    assert equal(made, eager), "the attempt left no gradient and no random number behind"
    graph = made.step_graph
    assert (graph.captured, graph.replayed, graph.eager) == (0, 0, 4 * accumulate)
    (note,) = made.notes
    assert note.startswith(f"step graph: steps stay eager: {why}")
    assert graph.summary().startswith(f"step graph: steps are eager: {why}")


def test_another_error_while_capturing_is_the_steps_own():
    made = trainer(refuses=RuntimeError("CUDA error: an illegal memory access was encountered"))
    made.run(1)
    with pytest.raises(TrainerPoisoned):
        made.run(1)
    made = trainer(refuses=ValueError("a bad batch"))
    made.run(1)
    with pytest.raises(StepAbandoned, match="a bad batch"):
        made.run(1)
    assert made.step_graph._entry is None and not made.step_graph.off


def test_a_shape_that_never_comes_twice_stays_eager_and_says_so():
    model, optimizer, _ = parts()
    graph = StepGraph(model, optimizer, capture=StandIn(model))
    Trainer(model, optimizer, Growing(), Schedule(0.05, 3), step_graph=graph).run()
    assert graph.summary() == (
        "step graph: 0 micro-batches replayed of 0 captures, 3 eager: no shape came twice in a row"
    )


def test_halved_micro_batches_are_not_padded_to_whole_ones():
    class Small(TinyModel):
        def loss(self, input_ids, *arguments, **options):
            if len(input_ids) > 16:
                raise torch.OutOfMemoryError("CUDA out of memory: none left")
            return super().loss(input_ids, *arguments, **options)

    torch.manual_seed(7)
    model = Small()
    optimizer = Adam(model.parameters(), gradient_clip=1.0)
    graph = StepGraph(model, optimizer, note=lambda text: None, capture=StandIn(model))
    made = Trainer(model, optimizer, windows(), Schedule(0.05, 4), step_graph=graph, auto_micro_batch=True)
    assert len(made.run(4).metrics) == 4 and made.halvings == 1 and graph.replayed


class Growing:
    n = 0

    def next(self):
        self.n += 1
        return packed([4 * self.n, 3])

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def test_an_unused_parameter_keeps_no_gradient():
    made = trainer()
    made.model.unused = torch.nn.Parameter(torch.ones(3))
    made.optimizer.add_param_group({"params": [made.model.unused]})
    made.run(3)
    trained = {id(p) for p, _ in made.step_graph._entry.grads}
    assert id(made.model.unused) not in trained and id(made.model.embed.weight) in trained


def test_on_a_cpu_it_says_why_nothing_is_captured():
    model, optimizer, _ = parts()
    notes = []
    graph = StepGraph(model, optimizer, note=notes.append)
    Trainer(model, optimizer, windows(), Schedule(0.05, 3), step_graph=graph).run()
    assert notes == ["step graph: steps stay eager: CUDA graphs need a CUDA device, this is cpu"]
    with pytest.raises(ValueError, match="chunk and step_graph exclude each other"):
        Trainer(model, optimizer, windows(), Schedule(0.05, 3), step_graph=graph, chunk=4)


# ---- on a GPU

CONFIG = DecoderConfig("llama", 4096, 256, 512, 4, 4, 2, 64, 4096, Rope(64, 1e4))


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gpu_trainer(graph, *, method="full", dropout=0.0, rows=4, length=128, capture=None, **options):
    torch.manual_seed(3)
    model = Decoder(CONFIG, **options).cuda()
    if method == "lora":
        apply_lora(model, LoraSpec(rank=8, dropout=dropout), seed=1)
        for module in model.modules():  # B = 0 would hide A's gradient
            if hasattr(module, "lora_B"):
                torch.nn.init.normal_(module.lora_B.weight, std=0.05)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3, gradient_clip=1.0)
    corpus = torch.randint(4096, (20_000,), generator=torch.Generator().manual_seed(5)).numpy().astype("uint16")
    source = TokenLoader(TokenArrays(corpus), rows * length, 0, context=length)
    notes = []
    step_graph = StepGraph(model, optimizer, note=notes.append, capture=capture) if graph else None
    made = Trainer(model, optimizer, source, Schedule(1e-3, 40), accumulate=2, device="cuda", step_graph=step_graph)
    made.notes = notes
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("replay", ["disabled", "block"])
@pytest.mark.parametrize(("method", "dropout"), [("full", 0.0), ("lora", 0.0), ("lora", 0.3)])
def test_replayed_steps_are_bit_equal_to_eager_ones(deterministic, method, dropout, replay):
    options = {"method": method, "dropout": dropout, "activation_checkpointing": replay}
    eager, made = gpu_trainer(False, **options), gpu_trainer(True, **options)
    want, got = ran(eager, 6), ran(made, 6)
    assert made.step_graph.replayed == 11, made.notes
    assert [m.loss for m in got.metrics] == [m.loss for m in want.metrics]
    assert equal(made, eager)
    print(made.notes)


@pytest.mark.gpu
def test_dropout_draws_anew_in_each_replay():
    made = gpu_trainer(True, method="lora", dropout=0.5)
    made.schedule = Schedule(1e-12, 40, "constant")
    state = made.source.state_dict()
    losses = []
    for _ in range(5):
        made.source.load_state_dict(state)
        losses += [m.loss for m in made.run(1).metrics]
    assert made.step_graph.replayed == 9, made.notes
    assert len(set(losses)) == 5


@pytest.mark.gpu
def test_another_shape_captures_anew_and_gives_its_memory_back():
    made = gpu_trainer(True)
    made.run(2)
    pool = made.step_graph.pool_bytes
    assert pool > 1 << 20 and f"its pool holds {pool / 2**20:.1f} MiB" in made.notes[-1]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    made.step_graph.drop("the test")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert held - torch.cuda.memory_reserved() >= pool // 2
    made.source = gpu_trainer(False, rows=8).source
    made.run(2)
    assert made.step_graph.captured == 2
    assert made.step_graph.pool_bytes > pool


@pytest.mark.gpu
def test_memory_that_runs_out_in_a_capture_leaves_an_eager_trainer(deterministic):
    class Starving(CudaCapture):
        def __call__(self, run, device):
            torch.cuda.empty_cache()
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 20)) / whole)
            try:
                return super().__call__(run, device)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)

    eager, made = gpu_trainer(False), gpu_trainer(True, capture=Starving())
    eager.run(3)
    made.run(3)
    assert "does not fit in memory" in made.step_graph.off
    assert made.step_graph.replayed == 0 and equal(made, eager)
    torch.randn(4, device="cuda")


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_refused_by_name_and_stays_eager(deterministic):
    eager, made = gpu_trainer(False), gpu_trainer(True)
    for one in (eager, made):
        real = one.model.loss

        def waits(ids, *args, real=real, **where):
            assert int(ids.sum()) >= 0  # reads a value on the host
            return real(ids, *args, **where)

        one.model.loss = waits
    eager.run(3)
    made.run(3)
    assert made.step_graph.off.startswith("the step cannot be captured: "), made.notes
    assert equal(made, eager)
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    with pytest.raises(CannotCapture):
        CudaCapture()(lambda: torch.randn(4, device="cuda").sum().item(), torch.device("cuda"), warm=True)
    # the generator is not left in the capture that failed, and has its numbers
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.randn(4, device="cuda")
