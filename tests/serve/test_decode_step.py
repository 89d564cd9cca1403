"""The decode step, recorded: the bits of the one that is not, whoever joins, leaves, learns or is promoted meanwhile.

On a CPU a tape stands in for CUDA graphs (recorded.py): it does the operations again, on the memory of the first time.
"""

import logging

import pytest
import torch
from objective import LAYERS, SPEC, V, add, decoder, engine, prefill, tokens
from recorded import Recorder, Tape, Waits, storage

from riftco.models import Decoder, DecoderConfig
from riftco.models.held import all_held
from riftco.models.joined import lay_side_by_side
from riftco.models.kv_cache import RowStep
from riftco.models.load import quantize_blocks
from riftco.models.rotary import Rope
from riftco.serve import Batch, Engine, Request, Sampling, Scheduler, decode_step
from riftco.train.capture import CannotCapture

LAYOUTS = {"slots": {}, "pages": {"page_size": 8}}
DTYPES = ("float32", "float16", "q8_0")


def pair(**options):
    """The same engine twice: its decode steps recorded, and computed as they come."""
    return [engine(capture=Recorder(), cuda_graphs=graphs, **options) for graphs in (True, False)]


def one_token(made, slots, token=7):
    return made.decode(Batch.join([Batch.of(s, len(made.slots[s].tokens), [(token + s) % V]) for s in slots]))


def cached(made):
    """Every byte of every layer."""
    layers = [of for group in made.cache.groups for of in group.cache.layers]
    return [t for of in layers for t in (of.k, of.v, of.k_scale, of.v_scale) if t is not None]


def same(a, b, slots=(0, 1, 2)):
    for slot in slots:
        for (_, mine), (_, other) in zip(a.cache.snapshot(slot).rows, b.cache.snapshot(slot).rows):
            assert all(torch.equal(s, t) for s, t in zip(mine, other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_join_and_leave(layout, dtype):
    made, eager = pair(slots=5, cache_dtype=dtype, **LAYOUTS[layout])
    for step, slots in enumerate(([0], [0, 1], [0, 1, 2, 3, 4], [0, 2, 3], [1, 4], [0, 1, 2, 3], [0])):
        for e in (made, eager):
            if step == 5:
                e.cut(1, 0)  # its pages go to whoever comes next
            for slot in slots:
                if not e.slots[slot].tokens:
                    prefill(e, slot, tokens(5 + slot, slot))
        got, want = (one_token(e, slots, 7 + step) for e in (made, eager))
        assert torch.equal(got.logits, want.logits) and torch.equal(got.likeliest, want.likeliest)
        assert torch.equal(want.likeliest, want.logits.argmax(-1)) and got.logits.shape == (len(slots), V)
        assert [s.tokens for s in made.slots] == [s.tokens for s in eager.slots]
        same(made, eager, range(5))
    assert (made.decoding.captured, made.decoding.replayed, made.decoding.eager) == (4, 7, 0)
    assert (eager.decoding.captured, eager.decoding.replayed, eager.decoding.eager) == (0, 0, 7)
    assert made.decoding.sizes == [1, 2, 4, 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_guesses_ride_a_step(layout, dtype):
    """Slots of one to five rows in one step: each as by itself in an engine that records nothing."""
    made, eager = pair(slots=4, cache_dtype=dtype, **LAYOUTS[layout])
    plain = engine(slots=4, cache_dtype=dtype, compiled=False, **LAYOUTS[layout])
    for e in (made, eager, plain):
        for slot in range(4):
            prefill(e, slot, tokens(4 + slot, slot))
    for step, lengths in enumerate(([5, 1, 3], [1, 2], [2, 2, 2, 2], [1, 1], [4, 1, 1, 1], [3])):
        given = [tokens(n, 10 * step + slot) for slot, n in enumerate(lengths)]

        def go(e, parts):
            return e.decode(
                Batch.join([Batch.of(s, len(e.slots[s].tokens), ids, output="all") for s, ids in parts])
            )  # fmt: skip

        got, want = (go(e, list(enumerate(given))) for e in (made, eager))
        assert torch.equal(got.logits, want.logits) and torch.equal(got.likeliest, want.likeliest)
        assert len(got.logits) == sum(lengths)
        other = torch.cat([go(plain, [part]).logits for part in enumerate(given)])
        torch.testing.assert_close(got.logits, other, rtol=1e-3, atol=1e-3)
        same(made, eager, range(4))
        for e in (made, eager, plain):  # all but one guess were wrong
            e.cut(0, len(e.slots[0].tokens) - max(lengths[0] - 2, 0))
    shapes = {shape for _, shape in made.decoding._graphs}
    assert shapes == {(4, 8), (2, 2), (4, 2), (2, 1), (4, 4), (1, 4)} and made.decoding.eager == 0


def test_guesses_that_end_at_the_window():
    """Rows that pad a slot lie beyond its window: they are written nowhere."""
    for options in ({}, {"page_size": 8}, {"page_size": 48}):
        made, eager = pair(slots=2, **options)
        for e in (made, eager):
            prefill(e, 0, tokens(45))
            prefill(e, 1, tokens(40))
            for t in cached(e):
                assert torch.isfinite(t[:1, :1]).all()
            batch = [Batch.of(0, 45, [1, 2, 3], output="all"), Batch.of(1, 40, [4, 5, 6, 7, 8], output="all")]
            e.got = e.decode(Batch.join(batch)).logits
        assert torch.equal(made.got, eager.got) and len(made.slots[0].tokens) == 48
        same(made, eager, range(2))


def test_replies_with_guesses_are_those_without():
    def replies(made, speculate):
        scheduler = Scheduler(made, speculate=speculate)
        asked = [([7, 8, 9, 7, 8, 9, 7, 8], 12), (tokens(9, 1).tolist(), 9), ([3, 3, 3, 3, 3], 12)]
        tickets = [scheduler.submit(Request(p, max_new_tokens=n)) for p, n in asked]
        scheduler.run()
        return [t.tokens for t in tickets], scheduler.totals.drafted

    made, eager = pair()
    made.prepare(guesses=3)
    assert {shape.each for _, shape in made.decoding._graphs} == {1, 2, 4}
    (got, drafted), (want, _) = replies(made, 3), replies(eager, 3)
    assert got == want == replies(engine(), 0)[0] and drafted > 0
    assert made.decoding.eager == 0


def test_what_was_given_stays():
    """A replay writes where the last one did; who holds its logits keeps them."""
    made, _ = pair()
    prefill(made, 0, tokens(5))
    first = one_token(made, [0])
    kept = first.logits.clone(), first.likeliest.clone()
    one_token(made, [0])
    assert torch.equal(first.logits, kept[0]) and torch.equal(first.likeliest, kept[1])


def test_it_agrees_with_the_forward_of_any_rows():
    made, _ = pair()
    plain = engine()
    assert plain.decoding is None
    for e in (made, plain):
        for slot in range(3):
            prefill(e, slot, tokens(5 + slot, slot))
    torch.testing.assert_close(one_token(made, [0, 1, 2]).logits, one_token(plain, [0, 1, 2]).logits)


@pytest.mark.parametrize("undo", [None, 0, 3])
def test_sliding_windows(undo):
    """Layer 0 sees 6 tokens, and keeps no more rows than that and what can be taken back."""
    config = DecoderConfig(
        "gemma3_text", V, 64, 64, LAYERS, 4, 2, 32, 64, Rope(32, 1e4), qk_norm=True, post_norms=True, norm_offset=1.0,
        activation="gelu_tanh", sliding_window=6, sliding_layers=(0,), local_rope=Rope(32, 1e3),
    )  # fmt: skip

    def build(**options):
        torch.manual_seed(2)
        return Engine(Decoder(config), slots=3, window=40, cache_dtype="float32", chunk=8, undo=undo, **options)

    made, eager, plain = build(capture=Recorder()), build(capture=Recorder(), cuda_graphs=False), build(compiled=False)
    assert len(made.cache.groups) == (1 if undo is None else 2)
    for e in (made, eager, plain):
        for slot in range(3):
            prefill(e, slot, tokens(4 + slot, slot))
    for step in range(12):
        got, want, other = (one_token(e, [0, 1, 2][: 1 + step % 3], 3 + step) for e in (made, eager, plain))
        assert torch.equal(got.logits, want.logits)
        torch.testing.assert_close(got.logits, other.logits)
    assert made.decoding.replayed == 12


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=3)], ids=["greedy", "drawn"]
)
def test_replies_of_more_requests_than_slots(sampling, layout):
    """Prompts are read between steps, slots are given back and taken again."""

    def replies(made):
        scheduler = Scheduler(made)
        asked = [
            Request(tokens(4 + 3 * i, i).tolist(), max_new_tokens=3 + 2 * i, sampling=sampling, adapters=uses)
            for i, uses in enumerate(({}, {}, {"a": 1.0}, {}, {"a": 0.5}, {"a": 1.0}))
        ]
        tickets = [scheduler.submit(r) for r in asked]
        scheduler.run()
        return [t.tokens for t in tickets]

    made, eager = pair(slots=3, **LAYOUTS[layout])
    got = replies(made)
    assert got == replies(eager) == replies(engine(**LAYOUTS[layout]))
    assert made.decoding.replayed > made.decoding.captured >= 3 and made.decoding.eager == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_learn_and_a_promotion_between_steps(dtype):
    made, eager = pair(cache_dtype=dtype, served=True)
    for e in (made, eager):
        for slot in range(3):
            prefill(e, slot, tokens(6 + slot, slot))
    for step in range(6):
        got, want = (one_token(e, [0, 1, 2], 3 + step) for e in (made, eager))
        assert torch.equal(got.logits, want.logits)
        if step == 1:
            outcomes = [e.learn(0, 5, [4, 5, 6], [5, 6, 7], adapter="a", lr=1e-2) for e in (made, eager)]
            assert outcomes[0].success and outcomes[0].digest == outcomes[1].digest
        if step == 3:
            assert [e.promote("a") for e in (made, eager)] == [2, 2]
            for e in (made, eager):
                e.use(1, {"a": 1.0})  # of version 2; its neighbours end on the first
                prefill(e, 1, tokens(6, 1))
        same(made, eager)
    assert made.decoding.captured == 3, "one for three slots; then one for two of version 1, one for one of version 2"
    assert made.decoding._capture.warm == [False, False, False]
    for e in (made, eager):
        e.use(0, {"a": 1.0})
        prefill(e, 0, tokens(6, 0))
    got, want = (one_token(e, [0, 1]) for e in (made, eager))
    assert torch.equal(got.logits, want.logits)
    assert made.decoding._capture.warm == [False, False, False, True], "two slots of version 2, as of version 1"
    labelled = Batch.join([Batch.of(0, len(made.slots[0].tokens), [1], label=[2]), Batch.of(1, 9, [3])])
    for e in (made, eager):
        e.train("a", 1e-3)
    got, want = (e.decode(labelled) for e in (made, eager))
    assert got.learn.success and torch.equal(got.logits, want.logits), "labels ride a step that is replayed"


def test_an_adapter_that_is_made_again_is_not_the_old_one():
    made, eager = pair()
    for e in (made, eager):
        e.use(0, {"a": 1.0})
        prefill(e, 0, tokens(5))
        one_token(e, [0])
        e.remove("a")
        add(e, "a", SPEC, seed=9)
        e.use(0, {"a": 1.0})
        prefill(e, 0, tokens(5))
    got, want = (one_token(e, [0]).logits for e in (made, eager))
    assert torch.equal(got, want)
    assert [g.resets for g in made.decoding._capture.made] == [1, 0]


def test_weights_that_moved_are_not_read_where_they_were():
    made, eager = pair()
    for e in (made, eager):
        prefill(e, 0, tokens(5))
        one_token(e, [0])
        for p in e.model.parameters():
            p.data = p.data * 1.5
    got, want = (one_token(e, [0]).logits for e in (made, eager))
    assert torch.equal(got, want) and made.decoding.captured == 2


def test_rows_of_no_slot_write_nothing():
    made, _ = pair(slots=8)
    for t in cached(made):
        t.zero_()
    prefill(made, 0, tokens(5))
    before = [t.clone() for t in cached(made)]
    made.prepare()
    assert made.decoding.captured == 4
    assert all(torch.equal(a, b) for a, b in zip(before, cached(made)))
    for slot in (1, 2, 4):
        prefill(made, slot, tokens(3))
    before = [t.clone() for t in cached(made)]
    one_token(made, [0, 1, 4])
    for a, b in zip(before, cached(made)):
        changed = (a != b).flatten(2).any(-1).nonzero().tolist()
        assert {tuple(at) for at in changed} <= {(0, 5), (1, 3), (4, 3)}


def test_all_that_changes_is_read_from_the_buffers():
    """Of memory that it did not make, a recorded step reads its buffer, weights, cache and rotation; nothing else."""
    made, _ = pair(page_size=8)
    prefill(made, 0, tokens(5))
    one_token(made, [0])
    (graph,) = made.decoding._capture.made
    allowed = {storage(made.decoding._of(decode_step.Shape(1, 1)).there)} | {storage(t) for t in all_held(made.model)}
    allowed |= {storage(t) for t in cached(made)}
    allowed |= {storage(t) for group in made.cache.groups for t in (group.cache.block_table, group.cache.arrived)}
    allowed |= {storage(t) for pair in made.model.rotary._on.values() for t in pair}
    assert graph.reads <= allowed and storage(made.decoding._of(decode_step.Shape(1, 1)).there) in graph.reads
    writes = [func for func, *_ in graph.tape.calls if func.name() == "riftco::cached_attention_decode"]
    assert len(writes) == LAYERS


def test_a_layers_launches():
    """Eight of a layer: rotation, attention and the cache's rows are one; what a layer adds, the next norm adds."""
    made, _ = pair()
    lay_side_by_side(made.model)
    made.decoding = decode_step.DecodeStep(made.model, made.cache, capture=Recorder())
    prefill(made, 0, tokens(5))
    one_token(made, [0])
    (graph,) = made.decoding._capture.made
    names = [func.name() for func, _, _, out in graph.tape.calls if not is_view(func)]
    first = names.index("riftco::rms_norm_fwd")
    assert names[first:] == LAYERS * [
        "riftco::rms_norm_fwd", "aten::mm", "riftco::cached_attention_decode", "aten::mm", "riftco::rms_norm_fwd",
        "aten::mm", "riftco::swiglu_fwd", "aten::mm",
    ] + ["riftco::rms_norm_fwd", "aten::mm", "aten::argmax"]  # fmt: skip
    assert names[:first] == ["aten::add.Tensor", "aten::_to_copy", "aten::mul.Tensor", "aten::cos", "aten::sin",
                             "riftco::embedding_fwd"]  # fmt: skip


def is_view(func):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def waiting(self, cache, slots, first, *more):
    of_rows(self, cache, slots, first, *more)
    assert int(first.max()) >= -1


def from_the_host(self, cache, slots, first, *more):
    lengths = torch.tensor(cache.lengths[: len(slots)])
    of_rows(self, cache, slots, lengths, *more)


of_rows = RowStep.__init__


@pytest.mark.parametrize("fault", [waiting, from_the_host], ids=lambda f: f.__name__)
def test_a_step_that_asks_the_host_is_seen(monkeypatch, fault):
    made, _ = pair()
    prefill(made, 0, tokens(5))
    monkeypatch.setattr(RowStep, "__init__", fault)
    with pytest.raises(Waits):
        one_token(made, [0])


def test_a_number_that_python_keeps_is_seen(monkeypatch):
    """A position that the host knew while recording: right once, wrong ever after."""

    def frozen(self, cache, slots, first, *more):
        of_rows(self, cache, slots, torch.full_like(first, cache.lengths[0]), *more)

    made, eager = pair()
    for e in (made, eager):
        prefill(e, 0, tokens(5))
    monkeypatch.setattr(RowStep, "__init__", frozen)
    assert torch.equal(*(one_token(e, [0]).logits for e in (made, eager)))
    assert not torch.equal(*(one_token(e, [0]).logits for e in (made, eager)))


def test_a_tape_sees_memory_that_moves():
    weight, lengths = torch.ones(4), [torch.ones(4), torch.ones(4), torch.ones(4)]
    with Tape() as tape:
        weight + torch.ones(4).mul_(2)
    assert tape.outside == {storage(weight)}
    with pytest.raises(Waits, match="2 tensors lie elsewhere"):
        Recorder()(lambda: weight + lengths.pop(), None)


@pytest.mark.parametrize("why", [CannotCapture("it waits"), torch.OutOfMemoryError("no memory")], ids=["waits", "full"])
def test_what_cannot_be_recorded_is_computed_and_said(caplog, why):
    made, eager = engine(capture=Recorder(refuses=why)), pair()[1]
    for e in (made, eager):
        prefill(e, 0, tokens(5))
    with caplog.at_level(logging.WARNING):
        assert all(torch.equal(*(one_token(e, [0]).logits for e in (made, eager))) for _ in range(2))
    assert caplog.text.count("decode steps stay eager") == 1 and made.decoding.off
    assert made.decoding.eager == 2


def test_other_errors_are_raised():
    made = engine(capture=Recorder(refuses=RuntimeError("a bug")))
    prefill(made, 0, tokens(5))
    with pytest.raises(RuntimeError, match="a bug"):
        one_token(made, [0])
    assert len(made.slots[0].tokens) == 5 == made.cache.lengths[0]


def test_the_longest_unused_graph_leaves(monkeypatch):
    monkeypatch.setattr(decode_step, "MOST", 2)
    made, eager = pair(slots=4)
    for slots in ([0], [0, 1], [0], [0, 1, 2], [0], [0, 1]):
        for e in (made, eager):
            for slot in slots:
                e.cut(slot, 0)
                prefill(e, slot, tokens(5))
        assert torch.equal(*(one_token(e, slots).logits for e in (made, eager)))
    assert made.decoding.captured == 4 and [g.resets for g in made.decoding._capture.made] == [0, 1, 1, 0]
    made.decoding.forget()
    assert all(g.resets == 1 for g in made.decoding._capture.made)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
@pytest.mark.parametrize("layout,nf4", [("slots", False), ("pages", False), ("pages", True)])
def test_on_a_gpu(layout, nf4, dtype):
    """Slots join and leave, one learns, its adapter is promoted: logits, rows and replies of the eager steps."""

    def build(graphs):
        torch.manual_seed(1)
        model = decoder().to("cuda", torch.bfloat16)
        if nf4:
            quantize_blocks(model)
        made = Engine(
            model, slots=5, window=48, cache_dtype=dtype, chunk=8, cuda_graphs=graphs,
            **LAYOUTS[layout],
        )  # fmt: skip
        add(made, "a", SPEC)
        return made

    made, eager = build(True), build(False)
    for step, slots in enumerate(([0], [0, 1], [0, 1, 2, 3, 4], [0, 2, 3], [1, 4], [0, 1, 2, 3], [0])):
        for e in (made, eager):
            for slot in slots:
                if not e.slots[slot].tokens:
                    e.use(slot, {"a": 1.0} if slot in (2, 3) else {})
                    prefill(e, slot, tokens(5 + slot, slot))
        got, want = (one_token(e, slots, 7 + step) for e in (made, eager))
        assert torch.equal(got.logits, want.logits) and torch.equal(got.likeliest, want.likeliest)
        same(made, eager, range(5))
        if step == 3:
            outcomes = [e.learn(0, 5, [4, 5, 6], [5, 6, 7], adapter="a", lr=1e-2) for e in (made, eager)]
            assert all(o.success for o in outcomes) and [e.promote("a") for e in (made, eager)] == [2, 2]
            for e in (made, eager):
                e.use(2, {"a": 1.0})
    assert not made.decoding.off and made.decoding.eager == 0 < made.decoding.replayed
    replies = []
    for e in (made, eager):
        scheduler = Scheduler(e, speculate=3)
        tickets = [
            scheduler.submit(Request([3, 4, 5, *tokens(i, i).tolist(), 3, 4], max_new_tokens=4 + i, adapters=uses))
            for i, uses in enumerate(({}, {"a": 1.0}, {}, {"a": 0.5}, {}, {}, {"a": 1.0}))
        ]
        scheduler.run()
        replies.append([t.tokens for t in tickets])
    assert replies[0] == replies[1]
