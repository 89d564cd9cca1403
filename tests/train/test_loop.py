"""What a step computes, reports and undoes."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train.tiny import VOCABULARY, ClippedAdamW, TinyModel, examples, parts

from riftco.data import Loader, TokenArrays, TokenLoader, pack
from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.optim import Adam
from riftco.train import Schedule, StepAbandoned, Trainer, TrainerPoisoned, current_progress, evaluate
from riftco.train.schedule import KINDS


def trainer(*, steps=20, lr=0.05, **options):
    keep = {k: options.pop(k) for k in ("accumulate", "sinks", "on_progress") if k in options}
    model, optimizer, loader = parts(**options)
    torch.manual_seed(11)
    return Trainer(model, optimizer, loader, Schedule(lr, steps), **keep)


def weights(model):
    return {k: v.clone() for k, v in model.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_fixed_batch_is_learnt():
    report = trainer(steps=150, tokens=1000).run()
    assert report.metrics[-1].loss < 0.2 * report.metrics[0].loss


def test_metrics_are_the_step_before_its_update():
    model, optimizer, loader = parts()
    batch = Loader(loader.examples, 20, 0).next()
    where = {"positions": batch.positions, "cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen}
    loss = model.loss(batch.input_ids, batch.target, denominator=batch.n_labelled, **where)
    loss.backward()
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
    optimizer.zero_grad()
    optimizer.gradient_clip = norm / 2
    seen = []
    made = Trainer(model, optimizer, loader, Schedule(0.1, 10, warmup=4), sinks=[seen.append])
    (metric,) = made.run(1).metrics
    assert seen == [metric]
    assert metric.loss == float(loss.detach())
    assert metric.gradient_norm == pytest.approx(norm, rel=1e-6)
    assert metric.clip_scale == pytest.approx(0.5, rel=1e-5)
    assert (metric.step, metric.lr, metric.tokens) == (1, 0.025, batch.n_labelled)
    assert metric.physical_tokens == batch.physical_tokens
    assert metric.peak_bytes > 1 << 20
    assert metric.tokens_per_s > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        metric.loss = 0


def test_clip_scale_is_one_within_the_limit():
    assert trainer(clip=1e9).run(1).metrics[0].clip_scale == 1


def test_accumulation_changes_neither_loss_nor_update():
    data = examples(12)

    class Fixed:
        def __init__(self, groups):
            self.groups, self.at = groups, 0

        def next(self):
            self.at += 1
            return pack([data[i] for i in self.groups[(self.at - 1) % len(self.groups)]])

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def train(groups):
        model, optimizer, _ = parts()
        report = Trainer(model, optimizer, Fixed(groups), Schedule(0.01, 3), accumulate=len(groups)).run()
        return report.metrics, weights(model)

    uneven = [[0], [1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11]]
    one, after_one = train([[i for g in uneven for i in g]])
    four, after_four = train(uneven)
    for a, b in zip(one, four, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.tokens == b.tokens
    for k in after_one:
        torch.testing.assert_close(after_one[k], after_four[k], rtol=1e-4, atol=1e-5)


def test_top_k_labels_train_like_their_dense_loss():
    torch.manual_seed(0)
    config = DecoderConfig("llama", 20, 16, 24, 1, 2, 1, 8, 64, Rope(8, 1e4))
    model = Decoder(config)
    ids = np.random.default_rng(0).integers(0, 20, (3, 7))
    topk = np.random.default_rng(1).integers(0, 20, (3, 7, 3))
    weights = np.random.default_rng(2).random((3, 7, 3), dtype=np.float32)
    weights[1, :, 2], topk[1, :, 1] = 0, topk[1, :, 0]  # duplicates add up
    source = TokenLoader(TokenArrays(ids, topk_ids=topk, topk_weights=weights), 21, seed=0)
    logits = torch.log_softmax(model(torch.from_numpy(ids)), -1)
    dense = torch.zeros(3, 7, 20).scatter_add(-1, torch.from_numpy(topk), torch.from_numpy(weights))
    want = -(dense * logits).sum() / 21
    want.backward()
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
    (metric,) = Trainer(model, Adam(model.parameters()), source, Schedule(0.1, 10)).run(1).metrics
    assert metric.loss == pytest.approx(float(want.detach()), rel=1e-5)
    assert metric.gradient_norm == pytest.approx(norm, rel=1e-4)
    assert metric.tokens == 21


def test_the_last_epoch_ends_the_run_with_a_shorter_step():
    made = trainer(steps=100, epochs=2, accumulate=3)
    micro = made.source.count()
    report = made.run()
    assert micro % 3, "the case must end in the middle of a period"
    assert made.step == -(-micro // 3)
    assert report.epoch_complete
    assert sum(m.tokens for m in report.metrics) == 2 * sum(e.n_labelled for e in made.source.examples)
    assert [m.epoch for m in report.metrics] == sorted(m.epoch for m in report.metrics)


def test_a_graph_of_a_past_step_cannot_be_used_again():
    model, optimizer, loader = parts()
    batch = loader.next()
    where = {"positions": batch.positions, "cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen}
    loss = model.loss(batch.input_ids, batch.target, denominator=1, **where)
    Trainer(model, optimizer, loader, Schedule(0.1, 10)).run(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- stopping ------------------------------------------------------------------------------------------------------


def test_stop_after_a_complete_period_keeps_it():
    calls = []

    def stop(progress):
        calls.append((progress.step, progress.micro_batch))
        return not (progress.step == 2 and progress.micro_batch == 2)

    made, plain = trainer(accumulate=2, on_progress=stop), trainer(accumulate=2)
    report = made.run()
    assert calls == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert not report.epoch_complete
    assert [m.step for m in report.metrics] == [1, 2]
    plain.run(2)
    assert same(weights(made.model), weights(plain.model))
    assert made.source.state_dict() == plain.source.state_dict()


def test_stop_inside_a_period_leaves_no_trace_of_it():
    plain_losses = [m.loss for m in trainer(dropout=0.3, accumulate=3).run(6).metrics]
    stops = [True]
    made = trainer(dropout=0.3, accumulate=3, on_progress=lambda p: not (stops and p.step == 3 and p.micro_batch == 2))
    report = made.run()
    assert made.step == 2
    assert not report.epoch_complete
    assert all(p.grad is None for p in made.model.parameters())
    stops.clear()
    losses = [m.loss for m in report.metrics] + [m.loss for m in made.run(4).metrics]
    assert losses == plain_losses


@pytest.mark.parametrize("how", ["return", "callback raises"])
def test_the_progress_scope_is_restored(how):
    inside = []

    def watch(progress):
        inside.append(current_progress() is progress)
        if how != "return":
            raise KeyError("mine")

    made = trainer(on_progress=watch, accumulate=2)
    if how == "return":
        made.run(1)
    else:
        with pytest.raises(KeyError, match="mine"):
            made.run(1)
        assert made.step == 0
        assert made.source.state_dict()["position"] == 0
    assert inside[0]
    assert current_progress() is None


# --- failures --------------------------------------------------------------------------------------------------------


def fail_once(model, error, when="before"):
    """The next loss raises; afterwards the model works again."""
    real = model.loss

    def loss(*args, **kwargs):
        model.loss = real
        if when == "after":  # gradients exist by then
            real(*args, **kwargs).backward()
        raise error

    model.loss = loss


def finished(skip=None, steps=5, **options):
    """Weights of a run that nothing disturbed, with the batch of step `skip` left out of the data."""
    plain = trainer(dropout=0.3, **options)
    plain.run(steps if skip is None else skip - 1)
    if skip is not None:
        plain.source.next()
        plain.run(steps - skip + 1)
    return weights(plain.model)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_data_error_drops_the_step_and_goes_on_past_its_batch(when):
    want = finished(skip=3)
    made = trainer(dropout=0.3)
    made.run(2)
    before = weights(made.model)
    fail_once(made.model, ValueError("shape is wrong"), when)
    with pytest.raises(StepAbandoned, match="step 3 abandoned, the batch after it comes next: ValueError: shape is"):
        made.run(3)
    assert (made.step, len(made.abandoned)) == (2, 1)
    assert same(before, weights(made.model))
    made.run(3)
    assert same(weights(made.model), want)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_comes_back_to_the_same_batch(error):
    want = finished()
    made = trainer(dropout=0.3)
    made.run(2)
    fail_once(made.model, error, "after")
    with pytest.raises(StepAbandoned, match="same batch comes next"):
        made.run(1)
    assert made.step == 2
    made.run(3)
    assert same(weights(made.model), want)


def test_a_gradient_that_is_not_finite_changes_nothing():
    made = trainer()
    made.run(1)
    before = weights(made.model)
    state = made.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    real = made.model.loss
    made.model.loss = lambda *a, **k: real(*a, **k) * float("inf")
    with pytest.raises(StepAbandoned, match="the gradient is not finite"):
        made.run(1)
    assert same(before, weights(made.model))
    assert torch.equal(state, made.optimizer.state_dict()["state"][0]["exp_avg"])
    made.model.loss = real
    assert made.run(1).metrics[0].step == 2


def test_a_device_error_poisons():
    made = trainer()
    made.run(1)
    position = made.source.state_dict()
    fail_once(made.model, torch.AcceleratorError("CUDA error: an illegal memory access", 700))
    with pytest.raises(TrainerPoisoned, match="illegal memory access"):
        made.run(1)
    assert (made.step, made.source.state_dict()) == (1, position)
    with pytest.raises(TrainerPoisoned, match=r"unusable since: step 2 failed.*illegal memory access"):
        made.run(1)


@pytest.mark.parametrize("error", [RuntimeError("launch failed"), KeyboardInterrupt()])
def test_an_error_inside_the_commit_poisons(error):
    seen = []
    made = trainer(sinks=[seen.append])
    made.run(1)

    def broken():
        raise error

    made.optimizer.step = broken
    with pytest.raises(TrainerPoisoned, match=type(error).__name__):
        made.run(1)
    assert (made.step, len(seen)) == (1, 1)
    with pytest.raises(TrainerPoisoned):
        made.run(1)


def test_an_interrupt_inside_compute_undoes_the_step():
    want = finished(steps=2)
    made = trainer(dropout=0.3)
    fail_once(made.model, KeyboardInterrupt(), "after")
    with pytest.raises(KeyboardInterrupt):
        made.run(1)
    made.run(2)
    assert same(weights(made.model), want)


# --- evaluation and schedules -----------------------------------------------------------------------------------------


def test_evaluate_is_the_mean_over_labelled_tokens():
    model, _, loader = parts(dropout=0.5)
    batches = loader.sequential()
    got = evaluate(model, batches)
    model.eval()
    losses, right = [], []
    for e in loader.examples:
        x, y = torch.tensor(e.ids[:-1]), torch.tensor(e.ids[1:])
        logits = model.lm_head(model.hidden(x, positions=torch.arange(len(x)), cu_seqlens=None, max_seqlen=None))
        losses += torch.nn.functional.cross_entropy(logits, y, reduction="none").tolist()
        right += (logits.argmax(-1) == y).tolist()
    assert got.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(got.loss))
    assert got.accuracy == pytest.approx(sum(right) / len(right))
    assert got.tokens == len(losses)


def test_evaluate_leaves_the_mode_alone_and_refuses_nothing():
    model = TinyModel().train()
    evaluate(model, [pack(examples(1))])
    assert model.training
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(model, [])


def test_schedules():
    def rates(**options):
        s = Schedule(1.0, 10, **options)
        return [s.at(i) for i in range(1, 11)]

    assert rates() == [1.0] * 10
    assert rates(warmup=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    down = [1.0] + [i / 6 for i in (5, 4, 3, 2, 1)]
    assert rates(kind="linear", warmup=5) == pytest.approx([0.2, 0.4, 0.6, 0.8, *down])
    assert rates(kind="linear") == pytest.approx([i / 10 for i in range(10, 0, -1)])
    assert rates(kind="cosine", warmup=1, final=0.1)[5] == pytest.approx(0.55)
    assert rates(kind="wsd", warmup=2, decay=0.5) == pytest.approx([0.5, 1, 1, 1, *down])


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS), steps=st.integers(1, 40), warmup=st.integers(0, 40), final=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)  # fmt: skip
def test_every_step_learns_and_the_rate_rises_then_falls(kind, steps, warmup, final, decay):
    warmup = min(warmup, steps)
    s = Schedule(1.0, steps, kind, warmup=warmup, final=final, decay=decay)
    rates = [s.at(i) for i in range(1, steps + 1)]
    top = max(warmup, 1) - 1
    assert rates[top] == 1.0
    assert all(0 < r <= 1 for r in rates)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert all(r >= final for r in rates[top:])


@pytest.mark.parametrize("bad", [{"kind": "step"}, {"warmup": 11}, {"steps": 0}, {"steps": 2**31}, {"lr": 0.0}])
def test_bad_schedules_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad)).replace("kind", "schedule")):
        Schedule(**{"lr": 1.0, "steps": 10, **bad})


def test_the_horizon_is_checked():
    with pytest.raises(OverflowError, match="step 11 is outside"):
        Schedule(1.0, 10).at(11)


def test_the_fake_model_covers_its_vocabulary():
    assert {i for e in examples(40) for i in e.ids} == set(range(VOCABULARY))
    assert issubclass(ClippedAdamW, torch.optim.Optimizer)
