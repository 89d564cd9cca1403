"""What a learn, a refusal or an error leaves behind: the bytes that were there."""

import hashlib

import pytest
import torch
from objective import HEAD, K, Seen, add, engine, prefill, tokens

import riftco.serve.learner as learner_module
import riftco.train.chunked as chunked
from riftco.adapters import AdapterError, LoraSpec
from riftco.models import Decoder
from riftco.serve import Batch, Refused, Use

PROMPT, REPLY = tokens(11, 1), tokens(9, 2)
IDS = torch.cat([PROMPT[-1:], REPLY[:-1]])
WHERE = (1, len(PROMPT) - 1, IDS, REPLY)
KINDS = [("float32", None), ("float16", 5), ("q8_0", None), ("q8_0", 5)]


def bytes_of(*tensors):
    seen = hashlib.sha256()
    for t in tensors:
        seen.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()


def cache_bytes(made):
    return bytes_of(*stored(made))


def stored(made):
    layers = [c for group in made.cache.groups for c in group.cache.layers]
    return [t for c in layers for t in (c.k, c.v, c.k_scale, c.v_scale) if t is not None]


def state_bytes(made):
    """Everything that a refused learn may not touch."""
    adapters = made.bank.adapters.values()
    tensors = [t for a in adapters for state in (*a.versions, a.shadow or {}) for t in state.values()]
    moments = [t for p in made.learner.pupils.values() for t in p.moment().tensors.values()]
    slots = [(s.tokens, s.key, s.state) for s in made.slots]
    steps = [(p.step, len(p.journal)) for p in made.learner.pupils.values()]
    grads = [p.grad for a in adapters for p in (a.shadow or {}).values()]
    assert all(g is None for g in grads)
    modules = [type(m).__name__ for m in made.model.modules()]
    weights = bytes_of(*made.model.parameters(), *tensors, *moments)
    return cache_bytes(made), weights, bytes_of(torch.get_rng_state()), str((slots, steps, modules))


def serving(cache_dtype="float16", page_size=None, **options):
    made = engine(cache_dtype=cache_dtype, page_size=page_size, **options)
    for t in stored(made):  # rows that were never written are compared too
        t.zero_()
    for slot in range(3):
        prefill(made, slot, PROMPT if slot == 1 else tokens(7, 20 + slot))
    return made


def next_logits(made):
    return made.decode(Batch.join([Batch.of(i, len(s.tokens), [3 + i]) for i, s in enumerate(made.slots)])).logits


@pytest.mark.parametrize("cache_dtype,page_size", KINDS)
def test_a_learn_changes_no_row_and_no_neighbours_logits(cache_dtype, page_size):
    made, plain = serving(cache_dtype, page_size), serving(cache_dtype, page_size)
    before = cache_bytes(made)
    for _ in range(2):
        assert made.learn(*WHERE, adapter="a", lr=1e-2).success
    assert cache_bytes(made) == before == cache_bytes(plain)
    assert torch.equal(next_logits(made), next_logits(plain))
    assert cache_bytes(made) == cache_bytes(plain)


def test_a_batch_without_labels_is_the_same_with_training_on():
    made, plain = serving(), serving()
    made.learn(*WHERE, adapter="a", lr=1e-2)
    made.train("a", 1e-2)
    assert torch.equal(next_logits(made), next_logits(plain))
    assert cache_bytes(made) == cache_bytes(plain)


REFUSALS = {
    "learn needs tokens": (1, 10, None, REPLY),
    "learn needs labels": (1, 10, IDS, None),
    "no slot 7": (7, 10, IDS, REPLY),
    "slot 1 holds 11 rows, not the 12": (1, 12, IDS, REPLY),
    "not the -1 that": (1, -1, IDS, REPLY),
    "labels must be one for each of the 9 tokens": (1, 10, IDS, REPLY[:4]),
    "weights must be one for each of the 9 tokens": (1, 10, IDS, REPLY, [1.0]),
    "no token carries a label": (1, 10, IDS, torch.full_like(REPLY, -1)),
    "token 8 is 50, outside the vocabulary of 50": (1, 10, torch.cat([IDS[:-1], torch.tensor([50])]), REPLY),
    "label 0 is -7, outside": (1, 10, IDS, torch.cat([torch.tensor([-7]), REPLY[1:]])),
    "weight must be finite and 0 or more; got nan": (1, 10, IDS, REPLY, [float("nan")] * 9),
    "weight must be finite and 0 or more; got -1.0": (1, 10, IDS, REPLY, [-1.0] * 9),
    "beyond the model's context of 64": (1, 10, IDS.repeat(9), REPLY.repeat(9)),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_each_refusal_of_a_learn_changes_nothing(why):
    made = serving()
    made.learn(*WHERE, adapter="a", lr=1e-2)
    before = state_bytes(made)
    outcome = made.learn(*REFUSALS[why], adapter="a", lr=1e-3)
    assert not outcome.success and why in outcome.reason and outcome.loss_before is None
    assert state_bytes(made) == before
    assert made.learn(*WHERE, adapter="a", lr=1e-3).success, "a refusal does not poison the next call"


@pytest.mark.parametrize(
    "options,why",
    [
        ({"adapter": "b", "lr": 1e-3}, "no adapter 'b'; loaded: a"),
        ({"adapter": "a", "lr": 1.0}, "lr must be between 1e-07 and 0.1"),
        ({"adapter": "a", "lr": float("nan")}, "lr must be"),
    ],
)
def test_adapter_and_rate_are_checked(options, why):
    made = serving()
    before = state_bytes(made)
    outcome = made.learn(*WHERE, **options)
    assert not outcome.success and why in outcome.reason
    assert state_bytes(made) == before


def test_a_budget_names_the_reply():
    need = 2 * 2 * len(REPLY) * K * 32 * 8
    made = serving(budget_bytes=need - 1)
    outcome = made.learn(*WHERE, adapter="a", lr=1e-3)
    assert f"a reply of {len(REPLY)} tokens take {need} bytes" in outcome.reason
    assert serving(budget_bytes=need).learn(*WHERE, adapter="a", lr=1e-3).success


LABEL = torch.tensor([-1, 4, 5])
BATCHES = {
    "no adapter is trainable": Batch.of(0, 7, [1, 2, 3], label=LABEL),
    "one run that ends its rows": Batch.of(0, 7, [1, 2, 3], label=LABEL.flip(0)),
    "label 50 is neither": Batch.of(0, 7, [1, 2, 3], label=LABEL + 45),
    "got inf": Batch.of(0, 7, [1, 2, 3], label=LABEL, label_weight=[1, 1, torch.inf]),
    "token 50 is outside": Batch.of(0, 7, [1, 2, 50]),
    "holds 7 rows; the batch's rows begin at position 6": Batch.of(0, 6, [1, 2, 3]),
    "beyond its window of 48": Batch.of(0, 7, [1] * 42),
    "no slot 3": Batch.of(3, 0, [1]),
    "stand together": Batch.join([Batch.of(0, 7, [1]), Batch.of(1, 11, [1]), Batch.of(0, 8, [1])]),
    "one row or more": Batch.of(0, 7, []),
}


@pytest.mark.parametrize("why", BATCHES)
def test_each_refusal_of_a_batch_changes_nothing(why):
    made = serving()
    if "trainable" not in why:
        made.train("a")
    before = state_bytes(made)
    with pytest.raises(Refused, match=why):
        made.decode(BATCHES[why])
    assert state_bytes(made) == before
    made.train("a")
    assert made.decode(Batch.of(0, 7, [1, 2, 3], label=LABEL)).learn.success


STAGES = [  # where, and at which call
    (learner_module, "rows_of", 1),
    (chunked, "attention_with_cache", 1),
    (chunked, "attention_with_cache", 9),
    (Decoder, "head_loss", 1),
    (Decoder, "head_loss", 2),
    (torch.autograd, "backward", 1),
    (torch.autograd, "backward", 2),
    (learner_module, "walk", 1),
    (learner_module, "walk", 2),
    (learner_module, "digest", 1),
]


@pytest.mark.parametrize("owner,name,when", STAGES, ids=[f"{name}-{when}" for _, name, when in STAGES])
def test_an_error_at_any_stage_changes_nothing(owner, name, when, monkeypatch):
    label = torch.cat([torch.full((4,), -1), REPLY[4:6], torch.full((1,), -1), REPLY[7:]])
    made = serving(chunk=2)
    assert made.learn(1, 10, IDS, label, adapter="a", lr=1e-2).success
    before, calls = state_bytes(made), []
    real = getattr(owner, name)

    def breaks(*args, **options):
        calls.append(name)
        if len(calls) == when:
            raise RuntimeError("injected")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, breaks)
        with pytest.raises(RuntimeError, match="injected"):
            made.learn(1, 10, IDS, label, adapter="a", lr=1e-2)
    assert state_bytes(made) == before
    assert made.learn(1, 10, IDS, label, adapter="a", lr=1e-2).success


@pytest.mark.parametrize("after", [False, True])
def test_an_error_in_the_commit_is_taken_back(after, monkeypatch):
    made, plain = serving(), serving()
    for e in (made, plain):
        assert e.learn(*WHERE, adapter="a", lr=1e-2).success
    before, optimizer = state_bytes(made), made.learner.pupils["a"].optimizer
    real = optimizer.step

    def breaks():
        if after:
            real()
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer, "step", breaks)
        with pytest.raises(RuntimeError, match="injected"):
            made.learn(*WHERE, adapter="a", lr=1e-2)
    assert state_bytes(made) == before
    for e in (made, plain):
        assert e.learn(*WHERE, adapter="a", lr=1e-2).success
    assert state_bytes(made) == state_bytes(plain)


def test_a_gradient_that_is_not_finite_is_an_outcome():
    made = serving()
    made.learn(*WHERE, adapter="a", lr=1e-3)
    shadow = made.bank.shadow("a")
    with torch.no_grad():
        next(iter(shadow.values()))[0, 0] = torch.inf
    before = state_bytes(made)
    outcome = made.learn(*WHERE, adapter="a", lr=1e-3)
    assert not outcome.success and "not finite" in outcome.reason
    assert state_bytes(made) == before


def test_a_dry_run_has_the_loss_and_changes_nothing():
    made = serving()
    first = made.learn(*WHERE, adapter="a", lr=1e-3)
    before = state_bytes(made)
    dry = made.learn(*WHERE, adapter="a", lr=1e-3, dry_run=True)
    assert dry.success and dry.loss_before < first.loss_before
    assert state_bytes(made) == before
    again = made.learn(*WHERE, adapter="a", lr=1e-3, measure_after=True)
    assert again.loss_before == dry.loss_before and again.loss_after < again.loss_before


def test_a_dry_run_with_dropout_moves_no_generator():
    made = serving(spec=LoraSpec(rank=4, alpha=8, dropout=0.5))
    made.learn(*WHERE, adapter="a", lr=1e-3)
    before = state_bytes(made)
    dry = made.learn(*WHERE, adapter="a", lr=1e-3, dry_run=True)
    assert state_bytes(made) == before
    assert made.learn(*WHERE, adapter="a", lr=1e-3).loss_before == dry.loss_before, "the masks that it would draw"


def test_undo_gives_back_every_bit():
    made = serving()
    states = []
    for _ in range(3):
        states.append(state_bytes(made)[1])
        made.learn(*WHERE, adapter="a", lr=1e-2)
    assert made.learner.undo("a", 2) == 1
    assert state_bytes(made)[1] == states[1]
    with pytest.raises(Refused, match="2 steps cannot be undone; the journal holds 1"):
        made.learner.undo("a", 2)
    made.learn(*WHERE, adapter="a", lr=1e-2)
    assert state_bytes(made)[1] == states[2], "the same step again"


def test_promotion_serves_and_no_row_of_another_version_is_used():
    made, plain = serving(), serving()
    for e in (made, plain):
        e.use(1, {"a": 1.0})
        prefill(e, 1, PROMPT)
        e.learn(*WHERE, adapter="a", lr=1e-1)
    assert made.slots[1].key == (Use("a", 1),)
    assert torch.equal(next_logits(made), next_logits(plain)), "what is learned serves nobody"
    assert made.bank.promote("a") == 2
    assert torch.equal(next_logits(made), next_logits(plain)), "a running slot finishes on its version"
    made.use(1, {"a": 1.0})
    assert made.slots[1].key == (Use("a", 2),) and not made.slots[1].tokens
    plain.use(1, ())
    shadow = prefill(made, 1, PROMPT)
    assert not torch.allclose(shadow, prefill(plain, 1, PROMPT), atol=0.1)
    assert made.slots[1].common(PROMPT.tolist(), (Use("a", 1),)) == 0
    with pytest.raises(Refused, match="learned nothing since version 2"):
        made.bank.promote("a")


def test_scales_and_several_adapters_serve_together():
    """Two adapters' deltas add up, each at its scale."""
    made = engine(spec=HEAD)
    add(made, "b", LoraSpec(rank=2, alpha=4, target_modules=("q_proj", "down_proj")), seed=4)
    made.use(0, {"a": 0.5, "b": -2.0})
    logits = prefill(made, 0, PROMPT)
    weights = {}
    for id, scale in (("a", 0.5), ("b", -2.0)):
        adapter = made.bank.adapters[id]
        for path in {n.split(".lora_")[0] for n in adapter.versions[0]}:
            a, b = (adapter.versions[0][f"{path}.lora_{x}.weight"] for x in "AB")
            weights[path] = weights.get(path, 0) + scale * adapter.spec.alpha / adapter.spec.rank * (b @ a)
    with torch.no_grad():
        for path, delta in weights.items():
            made.model.get_submodule(path).weight += delta
    made.use(1, ())
    torch.testing.assert_close(logits, prefill(made, 1, PROMPT), rtol=2e-3, atol=2e-3)


def test_adapters_are_refused_by_name():
    made = engine()
    for id, why in (("a", "is taken"), ("", "must be letters"), ("../x", "must be letters")):
        with pytest.raises(Refused, match=why):
            made.bank.create(id, HEAD)
    with pytest.raises(AdapterError, match="DoRA"):
        made.bank.create("d", LoraSpec(rank=2, use_dora=True))
    with pytest.raises(AdapterError, match="lacks"):
        made.bank.create("d", HEAD, state={})
    with pytest.raises(Refused, match="scale must be finite"):
        made.use(0, {"a": float("nan")})
    assert made.bank.set_of({"a": 0.0}) == ()
    with pytest.raises(Refused, match="learned nothing; there is nothing to promote"):
        made.bank.promote("a")
    Seen(made)  # a shadow that took no step
    with pytest.raises(Refused, match="learned nothing since version 1"):
        made.bank.promote("a")
