"""Learning in place has the gradients of one graph over the reply, given the prefix as served."""

import pytest
import torch
from objective import HEAD, SPEC, Seen, V, add, agree, engine, objective, prefill, tokens

from riftco.adapters import LoraSpec
from riftco.serve import Batch

PROMPT, REPLY = tokens(11, 1), tokens(9, 2)
IDS = torch.cat([PROMPT[-1:], REPLY[:-1]])


def served(**options):
    made = engine(**options)
    prefill(made, 1, PROMPT)
    return made


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "q8_0"])
def test_a_reply(cache_dtype, page_size, chunk, recompute):
    made = served(cache_dtype=cache_dtype, page_size=page_size, chunk=chunk, recompute=recompute)
    seen = Seen(made)
    loss, grads = objective(made, [(1, len(PROMPT) - 1, IDS, REPLY, None)])
    outcome = made.learn(1, len(PROMPT) - 1, IDS, REPLY, adapter="a", lr=1e-3)
    assert outcome.success and outcome.n_labelled == len(REPLY) and len(seen.steps) == 1
    assert outcome.loss_before == pytest.approx(loss, rel=1e-4)
    agree(seen.steps[0], grads)


@pytest.mark.parametrize("spec", [SPEC, HEAD])
@pytest.mark.parametrize("under", [False, True])
def test_under_the_served_adapter_and_with_a_head_adapter(spec, under):
    """What serves and what learns differ: the shadow took a step before."""
    made = served(spec=spec, served=under)
    assert made.learn(1, len(PROMPT) - 1, IDS, REPLY, adapter="a", lr=1e-2).success
    seen = Seen(made)
    loss, grads = objective(made, [(1, len(PROMPT) - 1, IDS, REPLY, None)], served=under)
    outcome = made.learn(1, len(PROMPT) - 1, IDS, REPLY, adapter="a", lr=1e-3)
    assert outcome.loss_before == pytest.approx(loss, rel=1e-4)
    agree(seen.steps[0], grads)


@pytest.mark.parametrize("under", [False, True])
def test_several_runs_are_each_given_what_was_served(under):
    """Two replies with a user's turn between them that is not learned."""
    label = torch.cat([torch.full((3,), -1), REPLY[:4], torch.full((5,), -1), REPLY[4:]])
    ids = tokens(len(label), 7)
    made = served(served=under)
    assert made.learn(1, len(PROMPT), ids, label, adapter="a", lr=1e-2).success
    seen = Seen(made)
    loss, grads = objective(made, [(1, len(PROMPT), ids, label, None)], served=under)
    outcome = made.learn(1, len(PROMPT), ids, label, adapter="a", lr=1e-3)
    assert outcome.loss_before == pytest.approx(loss, rel=1e-4) and outcome.n_labelled == len(REPLY)
    agree(seen.steps[0], grads)


def test_without_a_prefix():
    made = engine()
    seen = Seen(made)
    loss, grads = objective(made, [(0, 0, IDS, REPLY, None)])
    assert made.learn(0, 0, IDS, REPLY, adapter="a", lr=1e-3).loss_before == pytest.approx(loss, rel=1e-4)
    agree(seen.steps[0], grads)


@pytest.mark.parametrize("chunk", [3, 64])
def test_labels_in_a_batch_of_several_slots(chunk):
    """Rows with labels and without, of three slots: one step, whatever the size of a chunk."""
    made = engine(chunk=chunk)
    for slot in range(3):
        prefill(made, slot, tokens(6 + slot, slot))
    made.train("a", 1e-3)
    ids, label = tokens(9, 8), torch.tensor([-1, -1, 4, 5, 6, 7, 8, 9, 1])
    weight = torch.rand(9)
    parts = [
        Batch.of(0, 6, ids, label=label, label_weight=weight),
        Batch.of(1, 7, ids[:4]),
        Batch.of(2, 8, ids[:3], label=label[-3:]),
    ]
    seen, plain = Seen(made), engine(chunk=chunk)
    for slot in range(3):
        prefill(plain, slot, tokens(6 + slot, slot))
    logits, outcome, _ = made.decode(Batch.join(parts))
    assert outcome.n_labelled == 10 and len(seen.steps) == 1
    wanted = [(0, 8, ids[2:], label[2:], weight[2:]), (2, 8, ids[:3], label[-3:], None)]
    loss, grads = objective(made, wanted)
    made.learner.undo("a")
    loss, grads = objective(made, wanted)
    assert outcome.loss_before == pytest.approx(loss, rel=1e-4)
    agree(seen.steps[0], grads)
    same = plain.decode(Batch.join(parts).unlabelled())
    assert torch.equal(logits, same.logits) and same.learn is None


@pytest.mark.parametrize("weights,factor", [((1, 1), 1.0), ((2, 2), 2.0)])
def test_weights_scale(weights, factor):
    steps = []
    for weight in (None, torch.tensor(weights, dtype=torch.float32).repeat(5)[: len(REPLY)]):
        made = served()
        seen = Seen(made)
        made.learn(1, len(PROMPT) - 1, IDS, REPLY, weight, adapter="a", lr=1e-3)
        steps.append(seen.steps[0])
    for name, t in steps[0].items():
        torch.testing.assert_close(steps[1][name], factor * t, rtol=1e-5, atol=1e-7)


def test_a_weight_of_zero_is_half_of_two_labels():
    """Weights 1, 0 give half of what the first label alone gives: the mean is over labels, not over weights."""
    steps = []
    for ids, label, weight in ((IDS[:2], REPLY[:2], torch.tensor([1.0, 0.0])), (IDS[:1], REPLY[:1], None)):
        made = served()
        seen = Seen(made)
        made.learn(1, len(PROMPT) - 1, ids, label, weight, adapter="a", lr=1e-3)
        steps.append(seen.steps[0])
    for name, t in steps[1].items():
        torch.testing.assert_close(steps[0][name], t / 2, rtol=1e-4, atol=1e-6)


def test_labels_on_a_users_turn_teach_while_generation_goes_on():
    """The last rows of a prefill carry weighted labels: one step, and the bytes and logits of plain serving."""
    made, plain = engine(), engine()
    turn = tokens(10, 3)
    label = torch.cat([torch.full((6,), -1), turn[7:], torch.tensor([V - 1])])
    made.train("a", 1e-3)
    seen = Seen(made)
    logits, outcome, _ = made.decode(Batch.of(0, 0, turn, label=label, label_weight=torch.full((10,), 0.3)))
    assert outcome.success and len(seen.steps) == 1
    assert torch.equal(logits[-1:], plain.decode(Batch.of(0, 0, turn)).logits)
    for step in range(5):
        token = logits[-1:].argmax(-1)
        logits, again = (e.decode(Batch.of(0, 10 + step, token)).logits for e in (made, plain))
        assert torch.equal(logits, again)
    assert torch.equal(*(torch.cat([t.flatten() for t in e.cache.snapshot(0).rows[0][1]]) for e in (made, plain)))


def test_an_adapter_with_dropout_learns_where_it_serves_alone():
    made = served()
    add(made, "d", LoraSpec(rank=2, alpha=4, dropout=0.5))
    made.use(1, {"a": 1.0})
    prefill(made, 1, PROMPT)
    outcome = made.learn(1, len(PROMPT) - 1, IDS, REPLY, adapter="d", lr=1e-3)
    assert outcome.reason == "adapter 'd' has dropout; such a one learns only where it serves alone"
    made.use(1, ())
    prefill(made, 1, PROMPT)
    assert made.learn(1, len(PROMPT) - 1, IDS, REPLY, adapter="d", lr=1e-3).success
