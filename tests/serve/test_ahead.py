"""Steps begun before the host has read the tokens of the last one: the replies, rows and slots of steps one by one."""

import random

import pytest
import torch
from objective import V, engine, tokens
from recorded import Recorder

from riftco.models import Decoder, DecoderConfig
from riftco.models.rotary import Rope
from riftco.serve import Engine, Request, Sampling, Scheduler, Teach
from riftco.serve.ahead import Ahead

PROMPTS = [tokens(n, seed).tolist() for seed, n in enumerate((5, 9, 13, 3, 7, 4, 11))]


def pair(**options):
    """The same scheduler twice: with steps begun ahead, and without."""
    made, plain = (Scheduler(engine(capture=Recorder(), **{"slots": 3, **options})) for _ in range(2))
    plain.ahead._may = False
    return made, plain


def same(made, plain, rows=True):
    assert [s.tokens for s in made.engine.slots] == [s.tokens for s in plain.engine.slots]
    assert [s.state for s in made.engine.slots] == [s.state for s in plain.engine.slots]
    for slot in range(len(made.engine.slots) if rows else 0):
        a, b = (e.engine.cache.snapshot(slot).rows for e in (made, plain))
        for (_, mine), (_, other) in zip(a, b):
            for one, another in zip(mine, other):
                torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-5)  # read beside other prompts' rows
    assert plain.ahead.begun == 0


def told(ticket):
    return ticket.tokens, ticket.finished and ticket.finished.why


@pytest.mark.parametrize("layout", [{}, {"page_size": 4}, {"page_size": 4, "pages": 12}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_replies_rows_and_slots_are_those_of_steps_one_by_one(seed, layout):
    """Whoever comes, ends, is cancelled or stopped at any iteration, sampled in any way, with pages short or not."""
    ways = [
        {}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.2}, {"logprobs": 3}, {"logit_bias": {3: 2.0}},
    ]  # fmt: skip
    made, plain = pair(chunk=8, **layout)
    tickets, ended = {made: [], plain: []}, set()
    dice = random.Random(seed)
    for _ in range(70):
        event, n = dice.random(), dice.randrange(1, 12)
        prompt, way, stop = dice.choice(PROMPTS), dice.choice(ways), {dice.randrange(V) for _ in range(6)}
        slot = dice.choice([None, None, 1])
        for e in (made, plain):
            if event < 0.35:
                sampling = Sampling(seed=7 + n, **way)
                request = Request(prompt, max_new_tokens=n, sampling=sampling, stop_ids=stop, slot=slot)
                tickets[e].append(e.submit(request))
            elif event < 0.42 and tickets[e]:
                ended.add(n % len(tickets[e]))
                tickets[e][n % len(tickets[e])].cancel()
            elif event < 0.49 and tickets[e]:
                ended.add(n % len(tickets[e]))
                tickets[e][n % len(tickets[e])].stop()
            e.step()
    for e in (made, plain):
        e.run()
    for i, (a, b) in enumerate(zip(tickets[made], tickets[plain])):
        if i in ended:  # a prompt may be read an iteration later, so there may be a token more or less
            assert all(x == y for x, y in zip(a.tokens, b.tokens)) and abs(len(a.tokens) - len(b.tokens)) < 9
        else:
            assert told(a) == told(b)
    assert made.ahead.begun > 5 and not made.turns and not made.waiting


def test_slots_are_left_as_steps_one_by_one_leave_them():
    made, plain = pair()
    for e in (made, plain):
        first = e.submit(Request(PROMPTS[0], max_new_tokens=9))
        e.submit(Request(PROMPTS[1], max_new_tokens=4))
        e.run()
    same(made, plain)
    assert made.ahead.begun >= 5
    for e in (made, plain):
        e.submit(Request(PROMPTS[2], max_new_tokens=9, stop_ids={first.tokens[3]}))
        e.submit(Request(PROMPTS[0], max_new_tokens=9, stop_ids={first.tokens[3]}, slot=0))
        e.run()
    same(made, plain)


def test_learned_on_the_slot_that_served_and_promoted_between():
    made, plain = pair()
    for e in (made, plain):
        teach = Teach("a", 1e-2)
        got = [e.submit(Request(p, max_new_tokens=6, teach=teach)) for p in PROMPTS[:3]]
        other = e.submit(Request(PROMPTS[4], max_new_tokens=20))
        e.run()
        e.engine.promote("a")
        got.append(e.submit(Request(PROMPTS[3], max_new_tokens=8, adapters={"a": 1.0})))
        e.run()
        e.got = [told(t) for t in (*got, other)], [t.finished.learn.digest for t in got[:3]]
    assert made.got == plain.got and made.ahead.begun > 10
    same(made, plain)


@pytest.mark.parametrize("undo", [0, 1])
def test_sliding_windows_take_a_row_back_or_nothing_is_begun(undo):
    config = DecoderConfig(
        "gemma3_text", V, 64, 64, 2, 4, 2, 32, 64, Rope(32, 1e4), sliding_window=6, sliding_layers=(0,),
        local_rope=Rope(32, 1e3),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(config).eval()
    made, plain = (
        Scheduler(Engine(model, slots=2, window=48, cache_dtype="float32", undo=undo, capture=Recorder()))
        for _ in range(2)
    )
    plain.ahead._may = False
    for e in (made, plain):
        first = e.submit(Request(PROMPTS[2], max_new_tokens=12))
        e.run()
        stop = first.tokens[7]
        e.submit(Request([*PROMPTS[2], 5], max_new_tokens=12, stop_ids={stop}))
        e.run()
        last = e.submit(Request([*PROMPTS[2], 6], max_new_tokens=12, stop_ids={stop}))
        e.run()
        e.got = told(first), told(last)
    assert made.got == plain.got and made.got[1][1] == "stop"
    assert (made.ahead.begun > 8) == bool(undo)


def test_nothing_is_begun_where_steps_are_not_recorded_or_the_host_must_see_the_token():
    eager = Scheduler(engine(slots=2, capture=Recorder(), cuda_graphs=False))
    eager.submit(Request(PROMPTS[0], max_new_tokens=5))
    eager.run()
    python = Scheduler(engine(slots=2))
    python.submit(Request(PROMPTS[0], max_new_tokens=5))
    python.run()
    guessing = Scheduler(engine(slots=2, capture=Recorder()), speculate=2)
    guessing.submit(Request(PROMPTS[0], max_new_tokens=5))
    guessing.run()
    mixed = Scheduler(engine(slots=2, capture=Recorder()))
    for adapters in ({}, {"a": 1.0}):
        mixed.submit(Request(PROMPTS[0], max_new_tokens=5, adapters=adapters))
    mixed.run()
    assert not eager.ahead.begun and not python.ahead.begun and not guessing.ahead.begun and not mixed.ahead.begun


@pytest.mark.parametrize("when", ["begin", "told"])
def test_a_step_that_breaks_ends_its_turns_and_the_next_ones_are_served(when, monkeypatch):
    made, plain = pair()
    want = plain.submit(Request(PROMPTS[1], max_new_tokens=6))
    plain.run()
    tickets = [made.submit(Request(p, max_new_tokens=9)) for p in PROMPTS[:2]]
    for _ in range(3):
        made.step()
    real = getattr(Ahead, when)

    def breaks(self, *args):
        real(self, *args)
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Ahead, when, breaks)
        made.step()
    assert [t.finished.why for t in tickets] == ["error", "error"]
    assert not any(s.tokens for s in made.engine.slots)
    again = made.submit(Request(PROMPTS[1], max_new_tokens=6))
    made.run()
    assert again.tokens == want.tokens


def test_a_closed_scheduler_leaves_no_step_begun():
    made, _ = pair()
    ticket = made.submit(Request(PROMPTS[1], max_new_tokens=20))
    for _ in range(3):
        made.step()
    made.close()
    assert ticket.finished.why == "cancelled"
