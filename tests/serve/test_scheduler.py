"""Requests on slots: what they give alone, together, and while others learn."""

import threading

import pytest
import torch
from objective import V, add, decoder, engine, tokens

from riftco.models import generate_tokens
from riftco.serve import Engine, Finished, Refused, Request, Sampling, Scheduler, Teach
from riftco.serve.sampling import Sampler
from riftco.serve.slots import State

PROMPTS = [tokens(n, seed).tolist() for seed, n in enumerate((5, 9, 13, 3, 7))]
LONG = tokens(40, 77).tolist()


def scheduler(slots=3, clock=None, speculate=0, **options):
    made = engine(slots=slots, **options)
    return Scheduler(made, speculate=speculate, **({} if clock is None else {"clock": clock}))


def answers(made, requests):
    tickets = [made.submit(r) for r in requests]
    made.run()
    return [t.tokens for t in tickets], [t.finished for t in tickets]


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_together_as_alone(slots):
    """More requests than slots, prompts longer than a chunk: every reply is what generate gives."""
    made = scheduler(slots, chunk=8)
    got, ends = answers(made, [Request(p, max_new_tokens=6) for p in PROMPTS])
    assert got == [list(generate_tokens(decoder(), p, max_new_tokens=6)) for p in PROMPTS]
    assert all(e.why == "length" and e.prompt == len(p) for e, p in zip(ends, PROMPTS))
    assert all(s.state is State.IDLE for s in made.engine.slots)


def test_a_prompt_is_read_in_larger_parts_while_nobody_waits_for_a_token(monkeypatch):
    made = scheduler(slots=2, chunk=4)
    assert made.engine.alone == 4, "a chunk that was asked for is the most rows of any forward"
    made.engine.alone = 16  # as on a GPU, where none was asked for
    sizes, decode = [], made.engine.decode
    monkeypatch.setattr(made.engine, "decode", lambda batch: sizes.append(len(batch)) or decode(batch))
    first = made.submit(Request(LONG[:20], max_new_tokens=6))
    made.step(), made.step()
    second = made.submit(Request(LONG[5:19], max_new_tokens=2))
    made.run()
    assert sizes == [16, 4, 4, 4, 4, 4, 3, 1], "then three rows of the second's 14 beside each token of the first"
    for ticket, prompt in ((first, LONG[:20]), (second, LONG[5:19])):
        n = ticket.request.max_new_tokens
        assert ticket.tokens == list(generate_tokens(decoder(), prompt, max_new_tokens=n))


def test_a_reply_ends_at_a_stop_token_at_the_window_or_when_told():
    reply = answers(scheduler(), [Request(PROMPTS[0], max_new_tokens=5)])[0][0]
    (got,), (end,) = answers(scheduler(), [Request(PROMPTS[0], max_new_tokens=5, stop_ids={reply[2]})])
    assert end.why == "stop" and got == reply[: reply.index(reply[2]) + 1]
    (got,), (end,) = answers(scheduler(), [Request(LONG, max_new_tokens=99)])
    assert end.why == "length" and len(LONG) + len(got) == 48 + 1, "the last token needs no row"
    made = scheduler()
    ticket = made.submit(Request(PROMPTS[0], max_new_tokens=20))
    made.step()
    ticket.stop()
    made.run()
    assert ticket.finished.why == "stop" and len(ticket.tokens) == 2


def test_the_next_turn_reads_only_what_is_new():
    made = scheduler(slots=2)
    (reply,), _ = answers(made, [Request(LONG[:20], max_new_tokens=4)])
    again = [*LONG[:20], *reply, *LONG[20:25]]
    (got,), (end,) = answers(made, [Request(again, max_new_tokens=4)])
    assert end.cached == 20 + 3, "the reply's last token was never read"
    assert got == list(generate_tokens(decoder(), again, max_new_tokens=4))
    _, (end,) = answers(made, [Request(again, max_new_tokens=1)])
    assert end.cached == len(again) - 1, "the last row is read again for its logits"


def test_a_prefix_is_copied_from_a_busy_neighbour():
    made = scheduler(slots=2, cache_dtype="q8_0")
    first = made.submit(Request(LONG, max_new_tokens=8))
    while not first.tokens:
        made.step()
    (got,), (end,) = answers(made, [Request([*LONG[:35], 1], max_new_tokens=3)])
    assert end.cached == 35 and first.finished.slot != end.slot
    plain = scheduler(slots=1, cache_dtype="q8_0")
    answers(plain, [Request(LONG, max_new_tokens=8)])
    assert answers(plain, [Request([*LONG[:35], 1], max_new_tokens=3)])[0] == [got]


def test_rows_of_another_adapter_are_not_used():
    made = scheduler(slots=1)
    base, _ = answers(made, [Request(LONG[:20], max_new_tokens=6)])
    (other,), (end,) = answers(made, [Request(LONG[:20], max_new_tokens=6, adapters={"a": 1.0})])
    assert end.cached == 0 and [other] != base
    _, (end,) = answers(made, [Request(LONG[:20], max_new_tokens=6, adapters={"a": 0.5})])
    assert end.cached == 0
    _, (end,) = answers(made, [Request(LONG[:20], max_new_tokens=6, adapters={"a": 0.5})])
    assert end.cached == 19


def test_slots_of_different_adapters_run_in_one_iteration():
    requests = [Request(p, max_new_tokens=5, adapters=a) for p, a in zip(PROMPTS, ({}, {"a": 1.0}, {"a": -1.0}))]
    assert answers(scheduler(), requests)[0] == [answers(scheduler(), [r])[0][0] for r in requests]


def test_a_slot_of_ones_own_is_waited_for():
    made = scheduler(slots=2)
    first = made.submit(Request(PROMPTS[0], max_new_tokens=6, slot=1))
    mine = made.submit(Request(PROMPTS[1], max_new_tokens=2, slot=1))
    other = made.submit(Request(PROMPTS[2], max_new_tokens=2))
    made.run()
    assert [t.finished.slot for t in (first, mine, other)] == [1, 1, 0]


REFUSED = {
    "empty": Request([]),
    "more than the window of 48": Request([1] * 49),
    "token 50 is outside": Request([50]),
    "max_new_tokens": Request([1], max_new_tokens=0),
    "no adapter 'b'": Request([1], adapters={"b": 1.0}),
    "no slot 9": Request([1], slot=9),
    "temperature must be between": Request([1], sampling=Sampling(temperature=-1.0)),
    "top_p must be": Request([1], sampling=Sampling(top_p=float("nan"))),
    "logit_bias: 50": Request([1], sampling=Sampling(logit_bias={50: 1.0})),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_can_never_run_is_refused_at_once(why):
    made = scheduler()
    with pytest.raises(Refused, match=why):
        made.submit(REFUSED[why])
    assert not made.waiting


def test_a_full_queue_is_refused():
    made = Scheduler(engine(), queue=2)
    for _ in range(2):
        made.submit(Request([1]))
    with pytest.raises(Refused, match="2 requests wait already"):
        made.submit(Request([1]))


def test_a_cancelled_turn_frees_its_slot_and_learns_nothing():
    made = scheduler(slots=1)
    teach = Teach("a", 1e-3)
    tickets = [made.submit(Request(PROMPTS[i], max_new_tokens=9, teach=teach if i < 2 else None)) for i in range(3)]
    made.step()
    tickets[0].cancel()
    tickets[1].cancel()
    made.run()
    assert [t.finished.why for t in tickets] == ["cancelled", "cancelled", "length"]
    assert tickets[0].finished.learn is None and not made.engine.learner.pupils


def test_a_failed_batch_ends_its_turns_and_nothing_else(monkeypatch):
    made = scheduler(slots=1)
    ticket = made.submit(Request(PROMPTS[0], max_new_tokens=9))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_forward", lambda *_: (_ for _ in ()).throw(RuntimeError("injected")))
        made.step()
    assert ticket.finished == Finished("error", 0, error="RuntimeError: injected")
    assert answers(made, [Request(PROMPTS[0], max_new_tokens=6)])[0] == [
        list(generate_tokens(decoder(), PROMPTS[0], max_new_tokens=6))
    ]


def test_a_turn_is_learned_on_its_slot_before_it_is_released():
    """Its own reply, and a correction; the neighbours' replies are what they are without it."""
    plain = answers(scheduler(), [Request(p, max_new_tokens=8) for p in PROMPTS[:3]])[0]
    made, correction = scheduler(), tokens(6, 50).tolist()
    requests = [
        Request(PROMPTS[0], max_new_tokens=8, teach=Teach("a", 1e-2)),
        Request(PROMPTS[1], max_new_tokens=8, teach=Teach("a", 1e-2, correction)),
        Request(PROMPTS[2], max_new_tokens=8),
    ]
    got, ends = answers(made, requests)
    assert got == plain
    assert ends[0].learn.success and ends[0].learn.n_labelled == 8 and ends[2].learn is None
    assert ends[1].learn.success and ends[1].learn.n_labelled == 6
    alone = engine()
    alone.decode(_rows(PROMPTS[1][:-1]))
    wanted = alone.learn(0, 8, [PROMPTS[1][-1], *correction[:-1]], correction, adapter="a", lr=1e-2, dry_run=True)
    first = min((e.learn for e in ends[:2]), key=lambda o: o.step)
    if first is ends[1].learn:
        assert first.loss_before == pytest.approx(wanted.loss_before, rel=1e-4)
    _, (end,) = answers(made, [Request([*PROMPTS[1], *got[1], 3], max_new_tokens=1)])
    assert end.cached == len(PROMPTS[1]) + 7, "the next turn finds its rows"


def _rows(ids):
    from riftco.serve import Batch

    return Batch.of(0, 0, ids)


def test_a_refused_lesson_is_said_and_the_turn_is_served():
    made = scheduler()
    for teach, why in (
        (Teach("b", 1e-3), "no adapter 'b'"),
        (Teach("a", 9.0), "lr must"),
        (Teach("a", 1e-3, []), "empty"),
    ):
        (got,), (end,) = answers(made, [Request(PROMPTS[0], max_new_tokens=3, teach=teach)])
        assert len(got) == 3 and not end.learn.success and why in end.learn.reason


def test_a_lesson_that_breaks_is_said_and_the_turn_is_served(monkeypatch):
    made = scheduler()
    monkeypatch.setattr("riftco.serve.learner.walk", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("injected")))
    (got,), (end,) = answers(made, [Request(PROMPTS[0], max_new_tokens=3, teach=Teach("a", 1e-3))])
    assert len(got) == 3 and end.learn.reason == "RuntimeError: injected"


def test_another_prompt_than_the_slot_served_is_refused_with_its_position():
    made = scheduler(slots=1)
    answers(made, [Request(LONG[:30], max_new_tokens=2)])
    other = [*LONG[:23], (LONG[23] + 1) % V, *LONG[24:30]]
    outcome = made.learn(0, other, [1, 2], "a", 1e-3)
    assert outcome.reason.startswith("slot 0 served another prompt: it differs at token 23 of 29; serve this one")
    assert made.learn(0, LONG[:30], [1, 2], "a", 1e-3).success


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_learning_takes_a_tenth_of_the_time_while_others_wait(monkeypatch):
    """After a learn of t seconds the next one waits 9 t, bound to its slot, while another slot is busy."""
    clock = Clock()
    made = scheduler(slots=3, clock=clock)
    real = Engine.learn

    def slow(self, *args, **options):
        clock.now += 1.0
        return real(self, *args, **options)

    monkeypatch.setattr(Engine, "learn", slow)
    teachers = [made.submit(Request(p, max_new_tokens=2, teach=Teach("a", 1e-3))) for p in PROMPTS[:2]]
    other = made.submit(Request(PROMPTS[2], max_new_tokens=30))
    for _ in range(8):
        made.step()
    ended = [t.finished is not None for t in teachers]
    assert sorted(ended) == [False, True] and other.finished is None
    late = teachers[ended.index(False)]
    assert sum(s.state is State.LEARNING for s in made.engine.slots) == 1
    clock.now += 8.9
    made.step()
    assert late.finished is None
    clock.now += 0.2
    made.step()
    assert late.finished.learn.success
    third = made.submit(Request(PROMPTS[3], max_new_tokens=2, teach=Teach("a", 1e-3)))
    made.run()  # the debt is not waited for once nobody else is there
    assert third.finished.learn.success and other.finished.why == "length"


@pytest.mark.parametrize("duty", [0.1, 1.0])
def test_what_neighbours_notice_of_a_client_that_always_learns(duty, monkeypatch):
    """A forward takes 1, a learn 10. With the rule 95 of 100 of a neighbour's tokens come as if nobody learned; without
    it learning has most of the time, and its tail is a learn longer."""
    clock, gaps = Clock(), []
    made = Scheduler(engine(slots=3), duty=duty, clock=clock)

    def takes(name, seconds):
        real = getattr(Engine, name)

        def slow(self, *args, **options):
            clock.now += seconds
            return real(self, *args, **options)

        monkeypatch.setattr(Engine, name, slow)

    takes("decode", 1.0)
    takes("learn", 10.0)
    readers = {n: made.submit(Request(PROMPTS[0], max_new_tokens=n)) for n in (30, 23)}  # one of them is always there
    learner, learned, read, last = made.submit(Request(PROMPTS[1], max_new_tokens=3, teach=Teach("a", 1e-3))), 0, 0, 0.0
    while len(gaps) < 400:
        made.step()
        if len(readers[30].tokens) > read:
            read, last = len(readers[30].tokens), (gaps.append(clock.now - last), clock.now)[1]
        for n, reader in readers.items():
            if reader.finished:
                readers[n], read = made.submit(Request(PROMPTS[0], max_new_tokens=n)), 0 if n == 30 else read
        if learner.finished:
            assert learner.finished.learn.success
            learned += 1
            learner = made.submit(Request(PROMPTS[1], max_new_tokens=3, teach=Teach("a", 1e-3)))
    p50, p95 = sorted(gaps)[200], sorted(gaps)[380]
    assert learned >= 3
    if duty < 1:
        assert p50 == p95 == 1.0 and 10 * learned <= duty * clock.now + 10
    else:
        assert p95 == 11.0 and 10 * learned > clock.now / 2


def test_a_lesson_on_its_own_waits_too_while_others_are_busy():
    clock, slept = Clock(), []
    made = scheduler(slots=2, clock=clock)
    made.duty._sleep = lambda seconds: (slept.append(seconds), setattr(clock, "now", clock.now + seconds))
    made.submit(Request(PROMPTS[0], max_new_tokens=9))
    made.step()
    made.duty.worked(1.0)
    made.duty.wait()
    assert sum(slept) == pytest.approx(9.0)
    made.run()
    made.duty.worked(1.0)
    made.duty.wait()
    assert sum(slept) == pytest.approx(9.0), "nobody is there"


def test_a_promoted_version_waits_for_the_next_prompt():
    made = scheduler(slots=1)
    request = Request(PROMPTS[1], max_new_tokens=10, adapters={"a": 1.0})
    before, _ = answers(made, [request])
    made.learn(0, PROMPTS[1], [7, 8, 9], "a", 1e-1)
    ticket = made.submit(request)
    made.step()
    made.engine.promote("a")
    made.run()
    assert [ticket.tokens] == before, "it began under version 1"
    after, (end,) = answers(made, [request])
    assert after != before and end.cached == 0
    made.engine.undo("a")
    assert answers(made, [request])[0] == after, "a version stays when the shadow goes back"


def test_on_a_thread():
    made = scheduler(slots=2)
    plain = [list(generate_tokens(decoder(), p, max_new_tokens=5)) for p in PROMPTS]
    made.start()
    try:
        got = [None] * len(PROMPTS)

        def client(i):
            got[i] = [c.token for c in made.submit(Request(PROMPTS[i], max_new_tokens=5))]

        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(PROMPTS))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert got == plain
        waiting = made.submit(Request(PROMPTS[0], max_new_tokens=40))
    finally:
        made.close()
    assert waiting.finished.why in ("cancelled", "length")


def draws(options, logits, n=4000, prompt=()):
    sampler = Sampler(Sampling(seed=1, **options), prompt, len(logits), torch.device("cpu"))
    return torch.bincount(torch.cat([sampler.choose(logits) for _ in range(n)]), minlength=len(logits)) / n


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -1.5])


def test_sampling_draws_from_the_distribution():
    torch.testing.assert_close(draws({"temperature": 1.0}, LOGITS), LOGITS.softmax(-1), atol=0.03, rtol=0)
    torch.testing.assert_close(draws({"temperature": 2.0}, LOGITS), (LOGITS / 2).softmax(-1), atol=0.03, rtol=0)
    assert draws({"temperature": 1e-9}, LOGITS)[0] == 1 == draws({}, LOGITS)[0]


@pytest.mark.parametrize(
    "options,left",
    [
        ({"top_k": 2}, 2), ({"top_p": 0.6}, 1), ({"top_p": 0.7}, 2), ({"min_p": 0.1}, 3), ({"min_p": 0.99}, 1),
        ({"logit_bias": {3: -torch.inf, 4: -torch.inf}}, 3), ({"top_k": 9}, 5),
    ],
)  # fmt: skip
def test_cuts_leave_the_likeliest(options, left):
    wanted = LOGITS.masked_fill(torch.arange(5) >= left, -torch.inf).softmax(-1)
    torch.testing.assert_close(draws({"temperature": 1.0, **options}, LOGITS), wanted, atol=0.03, rtol=0)


def test_penalties_and_bias():
    def adjusted(options, prompt=(), chosen=()):
        sampler = Sampler(Sampling(**options), prompt, 5, torch.device("cpu"))
        for token in chosen:
            sampler.choose(torch.nn.functional.one_hot(torch.tensor(token), 5) * 1e3)
        return sampler.adjusted(LOGITS)

    torch.testing.assert_close(adjusted({"repetition_penalty": 2.0}, (0, 3)), torch.tensor([1.0, 1.0, 0.0, -2.0, -1.5]))
    torch.testing.assert_close(
        adjusted({"presence_penalty": 0.5}, (0,), (1, 1)), LOGITS - torch.tensor([0, 0.5, 0, 0, 0])
    )
    torch.testing.assert_close(
        adjusted({"frequency_penalty": 0.5}, (0,), (1, 1)), LOGITS - torch.tensor([0, 1.0, 0, 0, 0])
    )
    torch.testing.assert_close(adjusted({"logit_bias": {4: 9.0}}), LOGITS + torch.tensor([0, 0, 0, 0, 9.0]))


def test_a_seed_repeats_a_reply_whoever_is_beside_it():
    request = Request(PROMPTS[0], max_new_tokens=8, sampling=Sampling(temperature=1.0, top_p=0.9, seed=3, logprobs=2))
    alone, _ = answers(scheduler(), [request])
    assert answers(scheduler(), [*(Request(p, max_new_tokens=9) for p in PROMPTS[1:3]), request])[0][2] == alone[0]
    other = Request(PROMPTS[0], max_new_tokens=8, sampling=Sampling(temperature=1.0, top_p=0.9, seed=4))
    assert answers(scheduler(), [other])[0] != alone


def test_log_probabilities():
    made = scheduler()
    ticket = made.submit(Request(PROMPTS[0], max_new_tokens=2, sampling=Sampling(logprobs=3)))
    made.run()
    chosen = list(ticket)
    logp = decoder()(torch.tensor([PROMPTS[0]]))[0, -1].log_softmax(-1)
    values, ids = logp.topk(3)
    assert [t for t, _ in chosen[0].top] == ids.tolist() and chosen[0].token == int(ids[0])
    torch.testing.assert_close(torch.tensor([v for _, v in chosen[0].top]), values, rtol=1e-4, atol=1e-4)
    assert chosen[0].logprob == chosen[0].top[0][1]


def test_two_adapters_at_once():
    made = scheduler()
    add(made.engine, "b", made.engine.bank.adapters["a"].spec, seed=9)
    one, two = (
        answers(made, [Request(PROMPTS[0], max_new_tokens=6, adapters=a)])[0]
        for a in ({"a": 1.0}, {"a": 1.0, "b": 1.0})
    )
    assert one != two


def test_one_slot_and_a_client_that_takes_it_all_the_time():
    """Every turn that carries a lesson is learned, though another request always waits for the only slot."""
    made, outcomes, served = scheduler(slots=1), [], 0
    for _ in range(4):
        rivals = [made.submit(Request(PROMPTS[2], max_new_tokens=3))]
        mine = made.submit(Request(PROMPTS[0], max_new_tokens=2, teach=Teach("a", 1e-2, [7, 8, 9])))
        while mine.finished is None:
            made.step()
            if rivals[-1].finished is not None:
                rivals.append(made.submit(Request(PROMPTS[2], max_new_tokens=3)))
        outcomes.append(mine.finished.learn)
        made.run()
        served += sum(t.finished.why == "length" for t in rivals)
    assert all(o.success for o in outcomes) and served >= 4
    losses = [o.loss_before for o in outcomes]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
