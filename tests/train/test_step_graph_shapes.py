"""Micro-batches padded to a graph's shape: what their kinds have in common, what a resumed run takes over."""

import pytest
import torch
from test_step_graph import StandIn, equal, trainer, windows
from train.tiny import VOCABULARY, packed

from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.optim import Adam
from riftco.train import Schedule, Trainer
from riftco.train.capture import CudaCapture
from riftco.train.step_graph import StepGraph


class Lengths:
    """Micro-batches whose documents have these lengths and weights, again and again."""

    def __init__(self, *kinds):
        self.kinds, self.n = kinds, 0

    def next(self):
        self.n += 1
        return packed(*self.kinds[(self.n - 1) % len(self.kinds)])

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def test_weights_in_some_micro_batches_only_replay_one_graph():
    kinds = (([4, 3], 1.0), ([5, 2], 0.5))
    eager, made = (trainer(g, source=Lengths(*kinds)) for g in (False, True))
    want, got = eager.run(8), made.run(8)
    assert [m.loss for m in got.metrics] == pytest.approx([m.loss for m in want.metrics], rel=1e-5)
    assert (made.step_graph.captured, made.step_graph.replayed) == (1, 6)


def test_a_document_near_the_end_of_the_models_context():
    """Rounded up to a power of two it would be beyond it."""
    torch.manual_seed(1)
    model = Decoder(DecoderConfig("llama", VOCABULARY, 16, 24, 2, 2, 1, 8, 40, Rope(8, 1e4)))
    optimizer = Adam(model.parameters(), gradient_clip=1.0)
    graph = StepGraph(model, optimizer, note=lambda text: None, capture=StandIn(model))
    source = windows(36, 1)
    assert len(Trainer(model, optimizer, source, Schedule(0.01, 4), step_graph=graph).run().metrics) == 4
    assert graph.replayed == 3


def test_a_resumed_run_is_bit_equal_where_its_shapes_were_larger_than_what_comes():
    """Dropout draws for the rows of the padding, too."""
    kinds = (([12, 9], 0.5), *[([4, 3], 1.0), ([5, 2], 1.0)] * 4)
    whole, first, second = (trainer(source=Lengths(*kinds), dropout=0.4) for _ in range(3))
    torch.manual_seed(11)
    whole.run(6)
    torch.manual_seed(11)
    first.run(3)
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(*first.state_dict())
    second.run(3)
    assert equal(second, whole)


class Graph:
    """As much of a captured graph as its pool asks for."""

    live = True


def test_a_pool_is_shared_for_as_long_as_a_graph_lives_in_it(monkeypatch):
    """PyTorch refuses to capture into a pool that all of its graphs have left."""
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    shared, own = CudaCapture(shared=True), CudaCapture()
    first, second = Graph(), Graph()
    assert shared._pool_now() == 0
    shared._made.add(first)
    assert shared._pool_now() == 0
    shared._made.add(second)
    first.live = False
    assert shared._pool_now() == 0, "one is left"
    second.live = False
    assert shared._pool_now() == 1
    third = Graph()
    shared._made.add(third)
    assert shared._pool_now() == 1
    del third
    assert shared._pool_now() == 2, "nobody gave it back, but it is gone"
    assert own._pool_now() is None
