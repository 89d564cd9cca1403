"""A learn's one optimizer step: whose equations and rate, where it stands, what it does where memory runs out."""

import pytest
import torch
from objective import HEAD, SPEC, WINDOW, Seen, add, agree, decoder, engine, objective, prefill, tokens
from test_bytes import state_bytes

import riftco.serve.learner as learner_module
import riftco.train.chunked as chunked
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.serve import Batch, Engine

PROMPT, REPLY = tokens(11, 1), tokens(9, 2)
IDS = torch.cat([PROMPT[-1:], REPLY[:-1]])
WHERE = (1, len(PROMPT) - 1, IDS, REPLY)


def serving(**options):
    made = engine(**options)
    prefill(made, 1, PROMPT)
    return made


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_each_learn_is_adamw_at_the_requests_rate(decay):
    """PyTorch's AdamW, made once and fed the clipped gradients, with each request's rate in its turn."""
    made = serving(weight_decay=decay)
    seen, shadow = Seen(made, lr=1e-2), made.bank.shadow("a")
    exact = {name: p.detach().double().requires_grad_() for name, p in shadow.items()}
    adamw = torch.optim.AdamW(exact.values(), lr=1.0, weight_decay=decay)
    for step, lr in enumerate((1e-2, 1e-3, 3e-2, 1e-2)):
        outcome = made.learn(*WHERE, adapter="a", lr=lr)
        assert outcome.success and len(seen.steps) == step + 1
        for name, p in exact.items():
            p.grad = outcome.clip_scale * seen.steps[step][name].double()
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        for name, p in exact.items():
            torch.testing.assert_close(shadow[name].detach().double(), p, rtol=0, atol=1e-3 * lr)
    assert made.learner.pupil("a").optimizer is seen.pupil.optimizer


def test_adapters_that_learn_by_turns_have_an_optimizer_each():
    """What one adapter learns between two steps of another changes nothing of them."""
    alone, made = serving(), serving()
    for e in (alone, made):
        add(e, "b", HEAD, seed=9)
    for lr in (1e-2, 1e-3):
        alone.learn(*WHERE, adapter="a", lr=lr)
        made.learn(*WHERE, adapter="a", lr=lr)
        made.learn(*WHERE, adapter="b", lr=5e-2)
    for name, p in alone.bank.shadow("a").items():
        assert torch.equal(p, made.bank.shadow("a")[name])
    assert made.learner.pupil("a").optimizer is not made.learner.pupil("b").optimizer


def windowed():
    """A decoder that sees 8 positions back in its first layer, and all of them in its second."""
    torch.manual_seed(5)
    sizes = (50, 64, 64, 2, 4, 2, 32, 64)
    return Decoder(DecoderConfig("llama", *sizes, Rope(32, 1e4), sliding_window=8, sliding_layers=(0,)))


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_dtype": "q8_0"}, {"page_size": 5}, {"windows": True}, {"windows": True, "undo": 20}],
    ids=str,
)
def test_the_row_before_a_prompts_end_is_there_behind_a_long_reply(options):
    """A learn behind the reply that a slot gave is the learn behind its prompt alone, in every kind of cache."""
    options, steps = dict(options), []
    model = windowed if options.pop("windows", False) else decoder
    for replied in (0, 17):
        made = Engine(model(), slots=3, window=WINDOW, **{"cache_dtype": "float32", "chunk": 8, **options})
        add(made, "a", SPEC)
        logits = prefill(made, 1, PROMPT)
        for _ in range(replied):
            logits = made.decode(Batch.of(1, len(made.slots[1].tokens), logits[-1:].argmax(-1))).logits
        seen = Seen(made)
        outcome = made.learn(*WHERE, adapter="a", lr=1e-3)
        assert outcome.success, outcome.reason
        steps.append(seen.steps[0])
    assert all(torch.equal(t, steps[1][name]) for name, t in steps[0].items())


def test_a_ring_that_has_lost_that_row_says_so():
    made = Engine(windowed(), slots=3, window=WINDOW, cache_dtype="float32", undo=4)
    add(made, "a", SPEC)
    prefill(made, 1, PROMPT)
    for token in range(6):
        prefill(made, 1, [token])
    before = state_bytes(made)
    outcome = made.learn(*WHERE, adapter="a", lr=1e-3)
    assert "slot 1 cannot end at 10" in outcome.reason and outcome.reason.endswith("serve the prompt again, then learn")
    assert state_bytes(made) == before
    made.cut(1, 0)
    prefill(made, 1, PROMPT)
    assert made.learn(*WHERE, adapter="a", lr=1e-3).success


class State:
    """What a recurrent layer would keep in a cache: how far it has read."""

    def __init__(self, read):
        self.read = read

    def ends_at(self, slot):
        return self.read

    def clear(self, slot):
        self.read = 0


def test_a_state_is_not_cut_back_and_not_walked_over():
    """A cache with a layer's state: elsewhere a learn is refused by its position, at its end by the layer."""
    made = serving()
    made.cache.states = {1: State(read=len(PROMPT))}
    before = state_bytes(made)
    for n, why in (
        (10, "the state of layer 1 has read 11 positions and cannot be cut back to 10"),
        (11, r"layers [1] "),
    ):
        outcome = made.learn(1, n, IDS, REPLY, adapter="a", lr=1e-3)
        assert not outcome.success and why in outcome.reason
        assert state_bytes(made) == before
    with pytest.raises(ValueError, match=r"walk: layers \[1\] keep a state"):
        chunked.walk(made.model, IDS, REPLY, chunk=4, cache=made.cache, slot=1, prefix=11)
    made.cache.states = {}
    assert made.learn(*WHERE, adapter="a", lr=1e-3).success


def short_of_memory(monkeypatch, rows, error=torch.OutOfMemoryError):
    """Memory runs out in the backward of every chunk of more than so many rows; the sizes that were tried."""
    tried, real = [], chunked._backward

    def backward(model, ids, target, weight, denominator, span, *rest):
        tried.append(span[1] - span[0])
        loss = real(model, ids, target, weight, denominator, span, *rest)
        if tried[-1] > rows:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    monkeypatch.setattr(chunked, "_backward", backward)
    return tried


def test_rows_of_a_learn_are_those_of_a_forward_unless_said():
    assert serving(chunk=16).learner.chunk == 16, "on a CPU"
    made = serving(chunk=16, learn_chunk=3)
    assert (made.chunk, made.learner.chunk) == (16, 3)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("after", [False, True])
def test_where_memory_runs_out_smaller_chunks_give_the_step(after, error, monkeypatch):
    """The gradients that the failed tries had left count for nothing, nor does dropout that they drew."""
    made = serving(chunk=64)
    seen = Seen(made)
    loss, grads = objective(made, [(1, len(PROMPT) - 1, IDS, REPLY, None)])
    tried = short_of_memory(monkeypatch, 2, error)
    outcome = made.learn(*WHERE, adapter="a", lr=1e-3, measure_after=after)
    assert outcome.success and outcome.loss_before == pytest.approx(loss, rel=1e-4) and len(seen.steps) == 1
    agree(seen.steps[0], grads)
    assert tried == [9, 1, 4] + [1, 2, 2, 2, 2] * (1 + after)
    assert made.learner.chunk == 2
    del tried[:]
    assert made.learn(*WHERE, adapter="a", lr=1e-3).success
    assert max(tried) == 2, "it stays so"


def test_dropout_falls_where_it_would_without_the_failed_tries(monkeypatch):
    spec = type(SPEC)(rank=4, alpha=8, dropout=0.5)
    plain, made = serving(spec=spec, chunk=2), serving(spec=spec, chunk=64)
    short_of_memory(monkeypatch, 2)
    losses = []
    for e in (plain, made):
        torch.manual_seed(4)
        losses.append(e.learn(*WHERE, adapter="a", lr=1e-3).loss_before)
    assert losses[0] == losses[1]


def test_where_not_even_a_row_fits_the_learn_is_refused(monkeypatch):
    made = serving()
    assert made.learn(*WHERE, adapter="a", lr=1e-3).success
    before, rows = state_bytes(made), made.learner.chunk
    with monkeypatch.context() as patch:
        tried = short_of_memory(patch, 0)
        outcome = made.learn(*WHERE, adapter="a", lr=1e-3)
    assert not outcome.success and "a row at a time, and nothing was changed: OutOfMemoryError: CUDA" in outcome.reason
    assert tried[-1] == 1 and state_bytes(made) == before
    assert made.learner.chunk == rows, "it helped nobody, and makes none of the learns after it slow"
    made.train("a", 1e-3)
    with monkeypatch.context() as patch:
        short_of_memory(patch, 0)
        decoded = made.decode(Batch.of(0, 0, PROMPT[:3], label=PROMPT[1:4]))
    assert "a row at a time" in decoded.learn.reason and len(decoded.logits) == 1, "the rows are served"


@pytest.mark.parametrize("route", ["learn", "labels in a batch", "study"])
def test_every_route_learns_by_the_one_walk(route, monkeypatch):
    """A reply, labels in a batch and a text of its own fill labels, and one loop takes their backward."""
    made, walked = serving(), []
    real = chunked._backward
    monkeypatch.setattr(chunked, "_backward", lambda *a: (walked.append(a[5]), real(*a))[1])
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_: pytest.fail("a backward outside of the walk"))
    if route == "learn":
        outcome = made.learn(*WHERE, adapter="a", lr=1e-3)
    elif route == "study":
        outcome = made.study([(IDS, REPLY, None)], adapter="a", lr=1e-3)
    else:
        made.train("a", 1e-3)
        outcome = made.decode(Batch.of(1, len(PROMPT), IDS, label=REPLY)).learn
    assert outcome.success and outcome.n_labelled == len(REPLY)
    assert sorted(walked) == [(0, 8), (8, 9)]
    assert learner_module.walk is chunked.walk


def test_no_route_drops_a_weight():
    """A weighted text, reply and batch: each has the weighted objective's gradient."""
    weight = torch.linspace(0, 2, len(REPLY))
    for route in ("learn", "labels in a batch", "study"):
        made = serving()
        seen = Seen(made)
        slot, prefix = (0, 0) if route == "study" else (1, len(PROMPT))
        loss, grads = objective(made, [(slot, prefix, IDS, REPLY, weight)])
        if route == "learn":
            outcome = made.learn(1, prefix, IDS, REPLY, weight, adapter="a", lr=1e-3)
        elif route == "study":
            outcome = made.study([(IDS, REPLY, weight)], adapter="a", lr=1e-3)
        else:
            made.train("a", 1e-3)
            outcome = made.decode(Batch.of(1, prefix, IDS, label=REPLY, label_weight=weight)).learn
        assert outcome.loss_before == pytest.approx(loss, rel=1e-4), route
        agree(seen.steps[0], grads)
