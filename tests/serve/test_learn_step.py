"""A learn that is recorded: the bits of one that is not, and but for rounding the walk's, whatever happens between.

On a CPU a tape stands in for CUDA graphs (recorded.py): it does the operations again, on the memory of the first time.
"""

import logging

import pytest
import torch
from objective import HEAD, SPEC, V, add, agree, engine, objective, prefill, tokens
from recorded import Recorded, Recorder
from test_bytes import state_bytes
from test_decode_step import DTYPES, LAYOUTS, one_token

import riftco.train.chunked as chunked
from riftco.adapters import LoraSpec
from riftco.data.buckets import halves
from riftco.serve import Batch, learn_step
from riftco.train.capture import CannotCapture

PROMPTS = [tokens(n, 30 + n) for n in (7, 11, 9)]


def serving(*, uses=(), **options):
    made = engine(**{"chunk": 32, "learn_chunk": 32, **options})
    for slot, prompt in enumerate(PROMPTS):
        made.use(slot, {"a": 1.0} if slot in uses else {})
        prefill(made, slot, prompt)
    return made


def three(**options):
    """The same engine: learns recorded, padded as they come, and walked."""
    return (
        serving(capture=Recorder(), **options),
        serving(capture=Recorder(), learn_graphs=False, **options),
        serving(compiled=False, **options),
    )


def learn(made, slot, n, seed=0, **options):
    """A reply of n tokens behind the slot's prompt."""
    prompt, reply = PROMPTS[slot], tokens(n, seed + n)
    where = slot, len(prompt) - 1, torch.cat([prompt[-1:], reply[:-1]]), reply
    outcome = made.learn(*where, adapter="a", **{"lr": 1e-2, **options})
    assert outcome.success, outcome.reason
    return outcome


def weights(made, id="a"):
    return [p.detach().clone() for p in made.bank.shadow(id).values()]


def same(one, other, id="a"):
    assert all(map(torch.equal, weights(one, id), weights(other, id)))


def near(one, other):
    for p, q in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def counts(made):
    step = made.learner.step
    return step.captured, step.replayed, step.eager


def test_lengths():
    assert [halves(n) for n in (1, 2, 3, 4, 5, 6, 7, 9, 13, 17, 25, 33, 512, 513, 769)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 24, 32, 48, 512, 768, 1024,
    ]  # fmt: skip
    assert all(n <= halves(n) <= 1.5 * n for n in range(1, 3000))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_learns_of_any_slot_length_and_prefix(layout, dtype, recompute):
    options = {"cache_dtype": dtype, "recompute": recompute, "uses": (2,), **LAYOUTS[layout]}
    made, eager, walked = three(**options)
    for i, (slot, n) in enumerate([(0, 9), (1, 12), (2, 3), (1, 20), (0, 16), (2, 17), (0, 1), (1, 23)]):
        got, want, plain = (learn(e, slot, n, i) for e in (made, eager, walked))
        assert (got.loss_before, got.gradient_norm) == (want.loss_before, want.gradient_norm)
        assert got.loss_before == pytest.approx(plain.loss_before, rel=1e-3)
        same(made, eager)
        near(made, walked)
    assert counts(made) == (2, 6, 2) and counts(eager) == (0, 0, 8)
    assert eager.learner.step.off == "graphs are switched off"
    made.learner.undo("a", 2)
    eager.learner.undo("a", 2)
    assert learn(made, 1, 10).loss_before == learn(eager, 1, 10).loss_before
    assert state_bytes(made)[1:] == state_bytes(eager)[1:]
    assert counts(made)[0] == 2


def test_the_gradient_is_the_objectives_with_weights_in_it():
    made = serving(capture=Recorder())
    reply, weight = tokens(9, 3), torch.linspace(0, 2, 9)
    where = 1, len(PROMPTS[1]) - 1, torch.cat([PROMPTS[1][-1:], reply[:-1]]), reply
    learn(made, 1, 5)
    for given in (None, weight, None):
        loss, grads = objective(made, [(*where, given)])
        pupil, steps = made.learner.pupil("a"), []
        hook = pupil.optimizer.register_step_pre_hook(
            lambda *_, p=pupil, s=steps: s.append({name: q.grad.clone() for name, q in p.shadow.items()})
        )
        outcome = made.learn(*where, given, adapter="a", lr=1e-3)
        hook.remove()
        assert outcome.loss_before == pytest.approx(loss, rel=1e-4) and len(steps) == 1
        agree(steps[0], grads)
    assert counts(made) == (1, 3, 1)


def test_decode_steps_and_learns_take_turns():
    """Replays of both, in one engine; a learn changes no logits, and serving no learn."""
    made, eager, _ = three()
    off = serving(compiled=False)
    for turn in range(5):
        for slot in range(3):
            losses = [learn(e, slot, 4 + turn, turn).loss_before for e in (made, eager)]
            assert losses[0] == losses[1]
        logits = [one_token(e, [0, 1, 2], turn).logits for e in (made, eager, off)]
        assert torch.equal(*logits[:2])
        torch.testing.assert_close(logits[0], logits[2])
        for e in (made, eager, off):
            for slot, prompt in enumerate(PROMPTS):
                e.cut(slot, len(prompt))
    same(made, eager)
    assert counts(made) == (1, 14, 1) and made.decoding.replayed == 5


def test_several_texts_of_one_step_add_up():
    """Replayed, computed for the first time, recorded on the way and walked, in whatever order."""
    texts = [[5, 3], [20, 4, 20], [3, 20, 30, 5], [12, 40, 13], [40, 6], [20]]
    made, eager, walked = (e for e in three())
    for i, lengths in enumerate(texts):
        given = [(tokens(n, i), tokens(n, i + 50), torch.rand(n) if n == 4 else None) for n in lengths]
        outcomes = [e.study(given, adapter="a", lr=1e-2) for e in (made, eager, walked)]
        assert all(o.success for o in outcomes)
        assert outcomes[0].loss_before == pytest.approx(outcomes[1].loss_before, rel=1e-6)
        for p, q in zip(weights(made), weights(eager), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)  # sums in another order
        near(made, walked)
    assert counts(made)[0] == 2 and counts(made)[1] >= 6


def test_labels_in_a_batch_of_two_slots():
    made, eager, _ = three()
    for step in range(3):
        logits = []
        for e in (made, eager):
            e.train("a", 1e-2)
            parts = [(0, tokens(5, step)), (1, tokens(6, step + 9))]
            batch = Batch.join([Batch.of(s, len(PROMPTS[s]), ids, label=(ids + 1) % V) for s, ids in parts])
            decoded = e.decode(batch)
            assert decoded.learn.success and decoded.learn.n_labelled == 11
            logits.append(decoded.logits)
            for slot in (0, 1):
                e.cut(slot, len(PROMPTS[slot]))
        assert torch.equal(*logits)
        near(made, eager)
    assert counts(made) == (1, 5, 1)


@pytest.mark.parametrize("slot", [0, 2])
def test_behind_no_rows_of_any_slot(slot):
    """What stands for a cache there has one slot: the reply's own rows see each other all the same."""
    made, eager, walked = three()
    for n in (1, 9, 9, 32):
        where = slot, 0, tokens(n, 3), tokens(n, 4)
        losses = [e.learn(*where, adapter="a", lr=1e-2, dry_run=True).loss_before for e in (made, eager, walked)]
        assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-5)
    norms = [e.learn(*where, adapter="a", lr=1e-2).gradient_norm for e in (made, eager, walked)]
    assert norms[0] == norms[1] == pytest.approx(norms[2], rel=1e-4)
    same(made, eager)


def test_what_is_no_single_chunk_is_walked(monkeypatch):
    made, walked, real = serving(capture=Recorder()), [], chunked._backward
    monkeypatch.setattr(chunked, "_backward", lambda *a: (walked.append(a[5]), real(*a))[1])
    ids, label = tokens(12, 1), tokens(12, 2)
    gap = torch.where(torch.arange(12) == 6, -1, label)
    late = torch.where(torch.arange(12) < 4, -1, label)
    for n, (tokens_, labels) in enumerate([(ids, gap), (ids, late), (tokens(33, 3), tokens(33, 4))]):
        assert made.learn(0, 7, tokens_, labels, adapter="a", lr=1e-3).success
        assert len(walked) == (2, 3, 5)[n] and counts(made) == (0, 0, 0)
    assert learn(made, 0, 32).success and counts(made) == (0, 0, 1), "no longer than a chunk"


@pytest.mark.parametrize("spec", [SPEC, HEAD])
def test_promoted_and_made_again(spec):
    made, eager, _ = three(spec=spec, uses=(0, 1))
    for round in range(3):
        for e in (made, eager):
            for i in range(2):
                learn(e, 1, 5, i)
            e.promote("a")
            for slot, prompt in enumerate(PROMPTS):
                e.use(slot, {"a": 1.0})
                prefill(e, slot, prompt)
        same(made, eager)
        assert counts(made) == (1, 2 * round + 1, 1), "a version that serves changes no graph"
    for e in (made, eager):
        for slot in range(3):
            e.use(slot, {})
        e.remove("a")
        add(e, "a", spec, seed=8)
        for slot, prompt in enumerate(PROMPTS):
            e.use(slot, {})
            prefill(e, slot, prompt)
        for i in range(3):
            learn(e, 1, 5, i)
    same(made, eager)
    recorder = made.learner.step._capture
    assert counts(made) == (2, 7, 2) and recorder.made[0].resets == 1 and not recorder.made[-1].resets


def test_an_adapter_that_the_bank_alone_made_again():
    """Nobody told the step that it is another one."""
    made, eager, _ = three()
    for e in (made, eager):
        learn(e, 1, 5)
        learn(e, 1, 5)
        add_again(e)
        for i in range(3):
            learn(e, 1, 5, i)
    same(made, eager)
    assert counts(made) == (2, 3, 2)


def add_again(made):
    made.bank.remove("a")
    add(made, "a", SPEC, seed=8)


def test_what_is_padded_is_no_row_of_the_reply():
    """Whatever the buffers held before, and with positions that the model knows."""
    made = serving(capture=Recorder(), slots=3)
    learn(made, 1, 22)
    learn(made, 2, 17)
    run = made.learner.step._buffers[24].run
    assert run.target[:17].tolist() == tokens(17, 17).tolist() and (run.target[17:] == -1).all()
    assert run.row_weight.tolist() == [1.0] * 17 + [0.0] * 7 and float(run.denominator) == 17
    assert run.bounds.tolist() == [0, 17] and (run.slot.item(), run.first.item()) == (2, 8)
    assert run.positions.tolist() == list(range(8, 32))
    made.learner.step._buffers[24].fill(learn_step.Reply(0, 50, *[torch.ones(14, dtype=torch.int64)] * 2, None), 3, 64)
    assert run.positions.tolist() == [*range(50, 64), *[63] * 10] and not run.input_ids[14:].any()


def test_adapters_beside_each_other_and_by_turns():
    made, eager, _ = three()
    for e in (made, eager):
        add(e, "b", HEAD, seed=9)
        e.use(0, {"b": 0.5})
        prefill(e, 0, PROMPTS[0])
    for i in range(4):
        for slot, id in ((0, "a"), (1, "a"), (1, "b"), (0, "b")):
            losses = []
            for e in (made, eager):
                prompt, reply = PROMPTS[slot], tokens(6, i)
                where = slot, len(prompt) - 1, torch.cat([prompt[-1:], reply[:-1]]), reply
                losses.append(e.learn(*where, adapter=id, lr=1e-2).loss_before)
            assert losses[0] == losses[1]
    for id in "ab":
        same(made, eager, id)
    # b beside itself and alone are one: its shadow is in its version's place
    assert counts(made) == (3, 13, 3)


def test_dropout_draws_anew():
    spec = LoraSpec(rank=4, alpha=8, dropout=0.5)
    made, eager, _ = three(spec=spec)
    losses = []
    for e in (made, eager):
        torch.manual_seed(3)
        learn(e, 1, 5)
        losses.append([learn(e, 1, 5, lr=1e-7).loss_before for _ in range(4)])
    assert losses[0] == losses[1] and len(set(losses[0])) == 4
    same(made, eager)
    assert counts(made) == (1, 4, 1)


def test_a_parameter_that_nothing_reaches_stays_as_it_is():
    made, eager, _ = three(weight_decay=0.5)
    for e in (made, eager):
        e.model.model.layers[1].forward = lambda x, *_: x
        before = weights(e)
        for i in range(3):
            learn(e, 1, 5, i)
        stay = ["layers.1." in name for name in e.bank.shadow("a")]
        assert [torch.equal(p, q) for p, q in zip(before, weights(e))] == stay and any(stay)
    same(made, eager)


def test_measuring_after_and_a_dry_run():
    made, eager, _ = three()
    for _ in range(3):
        outcomes = [learn(e, 1, 6, measure_after=True) for e in (made, eager)]
        assert outcomes[0].loss_after == outcomes[1].loss_after < outcomes[0].loss_before
        before = state_bytes(made)
        dry = [learn(e, 1, 6, dry_run=True) for e in (made, eager)]
        assert dry[0].loss_before == dry[1].loss_before and state_bytes(made) == before
    same(made, eager)


def test_the_longest_unused_graph_leaves(monkeypatch):
    monkeypatch.setattr(learn_step, "MOST", 2)
    made, eager, _ = three()
    for n in (5, 5, 20, 20, 5, 30, 30, 5, 20):
        assert learn(made, 1, n).loss_before == learn(eager, 1, n).loss_before
    same(made, eager)
    recorder = made.learner.step._capture
    assert [g.resets for g in recorder.made] == [0, 1, 1, 0], "20 left, then 30"
    made.learner.step.forget()
    assert all(g.resets == 1 for g in recorder.made)
    assert learn(made, 1, 5).loss_before == learn(eager, 1, 5).loss_before


def test_what_would_hold_more_than_it_leaves_stays_eager(monkeypatch, caplog):
    made, eager, _ = three()
    monkeypatch.setattr(learn_step.LearnStep, "_left", lambda self: 1.0 if self.pool_bytes > 5 << 20 else 5 << 20)
    recorder = made.learner.step._capture
    with caplog.at_level(logging.WARNING):
        for n, size in ((5, 3), (20, 6), (30, 1)):
            monkeypatch.setattr(Recorded, "pool_bytes", size << 20)
            for _ in range(3):
                assert learn(made, 1, n).loss_before == learn(eager, 1, n).loss_before
    same(made, eager)
    assert [g.resets for g in recorder.made] == [0, 1, 0] and counts(made) == (3, 4, 5)
    assert [r.message for r in caplog.records] == [
        "learns of 24 rows stay eager: recorded, they would hold 6 MiB and leave 0 MiB"
    ]


def test_a_model_that_was_moved_is_recorded_anew():
    made, eager, _ = three()
    for e in (made, eager):
        learn(e, 1, 5)
        learn(e, 1, 5)
        held = e.model.model.norm
        held.weight.data = held.weight.data.clone()
        learn(e, 1, 5)
    same(made, eager)
    assert counts(made)[0] == 2 and made.learner.step._capture.made[0].resets == 1


@pytest.mark.parametrize(
    "refuses,why",
    [
        (CannotCapture("the step cannot be captured: it waits"), "the step cannot be captured: it waits"),
        (torch.OutOfMemoryError("CUDA out of memory"), "a recorded learn does not fit in memory: OutOfMemoryError"),
    ],
)
def test_what_cannot_be_recorded_stays_eager_and_says_so_once(refuses, why, caplog):
    spec = LoraSpec(rank=4, alpha=8, dropout=0.5)
    made, eager, _ = three(spec=spec)
    made.learner.step._capture.refuses = refuses
    with caplog.at_level(logging.WARNING):
        for e in (made, eager):
            torch.manual_seed(3)
            for i in range(4):
                learn(e, 1, 5, i)
            assert e.study([(tokens(20, i), tokens(20, i), None) for i in range(2)], adapter="a", lr=1e-2).success
    same(made, eager)
    assert counts(made) == (0, 0, 6) and made.learner.step.off.startswith(why)
    assert [r.message for r in caplog.records if "learns stay eager" in r.message] == [
        f"learns stay eager: {made.learner.step.off}"
    ]


def test_another_error_while_recording_is_the_learns_own_and_changes_nothing():
    made, eager, _ = three()
    for e in (made, eager):
        learn(e, 1, 5)
    before = state_bytes(made)
    made.learner.step._capture.refuses = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal"):
        learn(made, 1, 5)
    assert state_bytes(made) == before
    made.learner.step._capture.refuses = None
    assert learn(made, 1, 5).loss_before == learn(eager, 1, 5).loss_before
    same(made, eager)


def test_an_error_in_a_replay_changes_nothing(monkeypatch):
    made, eager, _ = three()
    for e in (made, eager):
        learn(e, 1, 5)
        learn(e, 1, 5)
    before = state_bytes(made)
    recorded = made.learner.step._capture.made[0]
    real = recorded.replay

    def breaks():
        real()
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(recorded, "replay", breaks)
        with pytest.raises(RuntimeError, match="injected"):
            learn(made, 1, 5)
    assert state_bytes(made) == before
    assert learn(made, 1, 5).loss_before == learn(eager, 1, 5).loss_before
    same(made, eager)


def test_where_memory_runs_out_graphs_go_first_and_then_chunks_are_halved(monkeypatch, caplog):
    made, eager, _ = three()
    for e in (made, eager):
        learn(e, 1, 5)
        learn(e, 1, 5)
    recorder, real, tried = made.learner.step._capture, learn_step.walk_padded, []

    def walk_padded(model, run, *rest):
        tried.append(len(run.target))
        loss = real(model, run, *rest)
        if len(run.target) > 16 and (len(tried) == 1 or len(run.target) > 24):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(learn_step, "walk_padded", walk_padded)
        learn(made, 1, 20)
    assert tried == [24, 24] and recorder.made[0].resets == 1 and made.learner.chunk == 32
    assert made.learner.step.off.startswith("memory ran out: OutOfMemoryError") and len(caplog.records) == 1
    learn(eager, 1, 20)
    same(made, eager)
    with monkeypatch.context() as patch:
        patch.setattr(learn_step, "walk_padded", walk_padded)
        learn(made, 1, 30)
    assert made.learner.chunk == 15, "then the walk, in half the rows"
    learn(eager, 1, 30)
    near(made, eager)
