"""What a client may send that is no request: refused by name, and whoever waits beside it is served."""

import contextlib
import math
import threading

import pytest
import torch
from objective import SPEC, WINDOW, V, decoder, engine, prefill, tokens
from test_bytes import state_bytes as everything
from test_scheduler import LONG, PROMPTS, Clock, answers, scheduler

from riftco.adapters import LoraSpec
from riftco.models import Decoder, DecoderConfig, generate_tokens
from riftco.models.rotary import Rope
from riftco.serve import Batch, Engine, Refused, Request, Sampling, Scheduler, Teach
from riftco.serve.conversation import Chat

ODD = ["ab", [1.5, 2.0], ["a"], [True, False], [None], None, 5, [2**70], [[1, 2]], torch.tensor([1.0, 2.0])]
ODD += [torch.tensor([[1, 2]]), torch.tensor(5), torch.tensor([1, 2], device="meta"), {1: 2}.items()]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{odd!r:.30}")
def test_what_is_no_row_of_tokens_is_refused(odd):
    made = scheduler()
    answers(made, [Request([1, 2, 3], max_new_tokens=1)])
    before = everything(made.engine)
    for ids, labels in ((odd, [1, 2]), ([1, 2], odd)):
        assert made.engine.learn(0, 2, ids, labels, adapter="a", lr=1e-3).reason
    assert made.learn(0, odd, [1, 2], "a", 1e-3).reason and made.learn(0, [1, 2, 3], odd, "a", 1e-3).reason
    for request in (Request(odd), Request([1], teach=Teach("a", 1e-3, odd))):
        if odd is not None or request.teach is None:  # None: the reply that was served
            with pytest.raises(Refused):
                made.submit(request)
    assert everything(made.engine) == before and not made.waiting
    (got,), _ = answers(made, [Request(PROMPTS[0], max_new_tokens=3)])
    assert got == list(generate_tokens(made.engine.model, PROMPTS[0], max_new_tokens=3))


@pytest.mark.parametrize("odd", [[1.5], ["a"], torch.tensor([1.0]), torch.tensor([[1]]), None, [2**70]], ids=str)
def test_a_batch_of_no_tokens_is_refused(odd):
    for given in (
        {"tokens": odd},
        {"tokens": [1], "label": odd},
        {"tokens": [1], "slot": "0"},
        {"tokens": [1], "position": 0.0},
    ):
        if given.get("label", 0) is not None:
            with pytest.raises(Refused):
                Batch.of(**{"slot": 0, "position": 0, "tokens": odd, **given})


SAMPLING = [
    {"seed": 2**64}, {"seed": -(2**63) - 1}, {"seed": "1"}, {"seed": 1.0}, {"top_k": 2.5}, {"top_k": "2"},
    {"top_k": True}, {"logprobs": 2.0}, {"logprobs": True}, {"temperature": None}, {"temperature": "1"},
    {"top_p": None}, {"frequency_penalty": None}, {"logit_bias": None}, {"logit_bias": {1: math.inf}},
    {"logit_bias": {1: 1e300}}, {"logit_bias": {1.5: 0.0}}, {"logit_bias": {"1": 0.0}}, {"logit_bias": {1: "1"}},
    {"logit_bias": dict.fromkeys(range(V), -math.inf)},
]  # fmt: skip
REQUESTS = [{"sampling": Sampling(**options)} for options in SAMPLING] + [
    {"sampling": None}, {"max_new_tokens": 1.5}, {"max_new_tokens": math.nan}, {"max_new_tokens": None},
    {"stop_ids": 5}, {"stop_ids": None}, {"stop_ids": "x"}, {"adapters": None}, {"adapters": ["a"]},
    {"adapters": {"a": "1"}}, {"adapters": {"a": math.inf}}, {"adapters": {5: 1.0}}, {"slot": "0"}, {"slot": 0.0},
    {"slot": -1}, {"slot": True}, {"teach": 5},
]  # fmt: skip


@pytest.mark.parametrize("odd", REQUESTS, ids=lambda odd: f"{odd!r:.60}")
def test_what_is_no_request_is_refused(odd):
    made = scheduler()
    with pytest.raises(Refused):
        made.submit(Request(**{"prompt": [1, 2], **odd}))
    assert not made.waiting and not made.turns


def test_numbers_of_numpy_and_torch_are_numbers():
    np = pytest.importorskip("numpy")
    plain, _ = answers(scheduler(), [Request(PROMPTS[0], max_new_tokens=4)])
    for prompt in (np.array(PROMPTS[0]), torch.tensor(PROMPTS[0]), [torch.tensor(t) for t in PROMPTS[0]]):
        request = Request(prompt, np.int64(4), Sampling(top_k=np.int64(0), logprobs=2), slot=np.int64(1))
        assert answers(scheduler(speculate=3), [request])[0] == plain


@pytest.mark.parametrize(
    "odd", [{"lr": "1"}, {"lr": None}, {"adapter": []}, {"n_cached": 9.0}, {"n_cached": "9"}, {"slot": None},
            {"slot": "0"}, {"slot": 0.0}, {"weights": ["a", "b"]}, {"weights": [None, 1]}, {"weights": "ab"},
            {"weights": {1: 2}}, {"weights": [1e38, 1e38]}],
    ids=str,
)  # fmt: skip
def test_a_learn_of_odd_arguments_is_refused(odd):
    made = engine()
    prefill(made, 0, tokens(10))
    made.learner.pupil("a")
    before = everything(made)
    given = {"slot": 0, "n_cached": 9, "tokens": [1, 2], "labels": [2, 3], "adapter": "a", "lr": 1e-3, **odd}
    outcome = made.learn(**given)
    assert not outcome.success and outcome.reason
    assert everything(made) == before


@pytest.mark.parametrize("id", ["..", ".", ".a", "a/b", "", "a" * 129, "१", "²", "Ａ", "a\n", None, 5])
def test_what_is_no_name_of_a_folder_is_no_adapter(id):
    with pytest.raises(Refused, match="adapter id"):
        engine().create(id, SPEC)


@pytest.mark.parametrize("steps", [0, -1, 1.0, "1", None, True, 2])
def test_undo_takes_steps_that_there_are(steps):
    made = engine()
    prefill(made, 0, tokens(10))
    assert made.learn(0, 9, [1], [2], adapter="a", lr=1e-3).success
    with pytest.raises(Refused):
        made.undo("a", steps)
    assert made.undo("a") == 0


def test_what_the_sender_changes_afterwards_changes_nothing():
    made, prompt, adapters = scheduler(slots=1), list(PROMPTS[0]), {}
    ticket = made.submit(Request(prompt, max_new_tokens=4, adapters=adapters))
    prompt.append(1)
    adapters["a"] = 1.0
    made.run()
    assert [ticket.tokens] == answers(scheduler(), [Request(PROMPTS[0], max_new_tokens=4)])[0]
    made.engine.create("b", SPEC)
    state = {name: t.clone() for name, t in made.engine.bank.adapters["b"].versions[0].items()}
    made.engine.create("c", SPEC, state=state)
    for t in state.values():
        t.fill_(9)
    c = made.engine.bank.adapters["c"].versions[0]
    assert all(torch.equal(t, c[n]) for n, t in made.engine.bank.adapters["b"].versions[0].items())


def test_an_end_can_be_read_twice():
    made = scheduler()
    ticket = made.submit(Request(PROMPTS[0], max_new_tokens=2))
    made.run()
    assert len(list(ticket)) == 2 and list(ticket) == [] and ticket.next(1) is ticket.finished


def test_nobody_waits_for_a_scheduler_that_is_closed():
    made = scheduler()
    made.start()
    with pytest.raises(RuntimeError, match="starts once"):
        made.start()
    made.close()
    with pytest.raises(Refused, match="closed"):
        made.submit(Request([1]))


@pytest.mark.parametrize("where", ["riftco.serve.scheduler.Sampler.__init__", "riftco.serve.scheduler.choose"])
def test_an_error_ends_its_turn_and_not_the_thread(where, monkeypatch):
    made = scheduler(slots=1)
    made.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(where, lambda *_: (_ for _ in ()).throw(RuntimeError("injected")))
            broken = made.submit(Request(PROMPTS[0], max_new_tokens=3, sampling=Sampling(temperature=0.5)))
            while broken.finished is None:
                broken.next(timeout=30)
        assert broken.finished.why == "error" and "injected" in broken.finished.error
        whole = made.submit(Request(PROMPTS[0], max_new_tokens=3))
        while whole.finished is None:
            whole.next(timeout=30)
        assert whole.finished.why == "length"
    finally:
        made.close()


def test_adapters_that_do_not_fit_together_are_refused_at_once():
    made = scheduler()
    for id in ("big", "huge"):
        made.engine.create(id, LoraSpec(rank=200, alpha=8))
    both = {"big": 1.0, "huge": 1.0}
    neighbour = made.submit(Request(PROMPTS[0], max_new_tokens=3))
    with pytest.raises(Refused, match="ranks"):
        made.submit(Request(PROMPTS[1], adapters=both))
    made.run()
    assert neighbour.finished.why == "length"
    made.engine.use(1, both)
    before = everything(made.engine)
    with pytest.raises(Refused, match="ranks"):
        made.engine.decode(Batch.join([Batch.of(0, len(made.engine.slots[0].tokens), [1]), Batch.of(1, 0, [1])]))
    assert everything(made.engine) == before


def test_an_adapter_that_comes_again_has_nothing_of_the_one_before():
    """Rows, shadow and optimizer of the same id and version are another adapter's."""
    made = scheduler(slots=1)
    request = Request(LONG[:20], max_new_tokens=6, adapters={"a": 1.0})
    before, _ = answers(made, [request])
    made.engine.learn(0, 5, [1, 2], [2, 3], adapter="a", lr=1e-1)
    running = made.submit(request)
    made.step()
    with pytest.raises(Refused, match="in use on slot 0"):
        made.engine.remove("a")
    running.cancel()
    made.run()
    waiting = made.submit(request)
    made.engine.remove("a")
    made.run()
    assert waiting.finished.why == "error" and "no adapter 'a'" in waiting.finished.error
    made.engine.create("a", SPEC, seed=3)
    plain, _ = answers(scheduler(slots=1), [Request(LONG[:20], max_new_tokens=6)])
    after, (end,) = answers(made, [request])
    assert after == plain != before and end.cached == 0
    assert made.engine.learner.pupil("a").step == 0
    assert all(p is made.engine.bank.shadow("a")[n] for n, p in made.engine.learner.pupil("a").shadow.items())


def sliding(undo, slots=1):
    torch.manual_seed(5)
    rope = Rope(16, 1e4)
    shape = {"sliding_window": 6, "sliding_layers": (0,), "attention_softcap": 20.0, "final_softcap": 10.0}
    model = Decoder(DecoderConfig("gemma2", V, 64, 64, 2, 4, 2, 16, 64, rope, **shape))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6)
    return Engine(model, slots=slots, window=WINDOW, cache_dtype="float32", chunk=8, undo=undo)


def test_guesses_that_sliding_windows_cannot_take_back_are_refused():
    with pytest.raises(ValueError, match="undo=4 or more"):
        Scheduler(sliding(3), speculate=4)
    again = (PROMPTS[0] * 4)[:17]
    for undo in (4, None):
        made, plain = Scheduler(sliding(undo), speculate=4), Scheduler(sliding(undo))
        request = Request(again, max_new_tokens=14)
        got, (end,) = answers(made, [request])
        assert (
            got == answers(plain, [request])[0] == [list(generate_tokens(made.engine.model, again, max_new_tokens=14))]
        )
        assert end.drafted


def test_a_forward_that_broke_leaves_no_row_of_a_sliding_window(monkeypatch):
    """Layer 0 had written over older rows when layer 1 failed: none of them is used again."""
    made = Scheduler(sliding(0))
    ticket = made.submit(Request(LONG[:20], max_new_tokens=9))
    while not ticket.tokens:
        made.step()
    with monkeypatch.context() as patch:
        last = made.engine.model.model.layers[1]
        patch.setattr(last, "forward", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("injected")))
        made.step()
    assert ticket.finished.why == "error"
    got, (end,) = answers(made, [Request([*LONG[:20], *ticket.tokens], max_new_tokens=6)])
    assert end.cached == 0
    assert got == [list(generate_tokens(made.engine.model, [*LONG[:20], *ticket.tokens], max_new_tokens=6))]


PAGES = {"page_size": 4, "pages": 12}  # 48 rows: one slot's window


def test_idle_slots_give_their_pages_up():
    made = scheduler(slots=3, **PAGES)
    for prompt in PROMPTS[:3]:
        _, (end,) = answers(made, [Request(prompt, max_new_tokens=2)])
        assert end.why == "length"
    (got,), (end,) = answers(made, [Request(LONG, max_new_tokens=6)])
    assert end.why == "length" and got == list(generate_tokens(made.engine.model, LONG, max_new_tokens=6))


@pytest.mark.parametrize("speculate", [0, 4])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cuts", [(10, 10), (10, 10, 10), (30, 35), (35, 30, 5)], ids=str)
def test_turns_that_want_more_pages_than_there_are_take_turns(cuts, sampling, speculate):
    """The oldest go on, the others wait or read again; every reply is what it is alone."""
    requests = [Request(LONG[i : i + n], max_new_tokens=44 - n, sampling=sampling) for i, n in enumerate(cuts)]
    got, ends = answers(scheduler(slots=3, speculate=speculate, **PAGES), requests)
    assert [e.why for e in ends] == ["length"] * len(cuts)
    assert got == [answers(scheduler(slots=1), [r])[0][0] for r in requests]


def test_a_turn_that_no_page_is_left_for_hurts_nobody_else():
    made = scheduler(slots=3, page_size=4, pages=6)
    requests = [Request(LONG[:20], max_new_tokens=20), Request(PROMPTS[0], max_new_tokens=6), Request(LONG[:24])]
    got, ends = answers(made, requests)
    assert [e.why for e in ends] == ["error", "length", "error"] and "no page left" in ends[2].error
    assert got[1] == list(generate_tokens(made.engine.model, PROMPTS[0], max_new_tokens=6))
    assert got[0] == list(generate_tokens(made.engine.model, LONG[:20], max_new_tokens=20))[: len(got[0])] != []
    (again,), (end,) = answers(made, [Request(LONG[:20], max_new_tokens=3)])
    assert end.why == "length" and again == got[0][:3]


def test_a_prompt_that_all_pages_cannot_hold_is_refused_at_once():
    made = scheduler(slots=3, page_size=4, pages=6)
    with pytest.raises(Refused, match="the prompt has 25 tokens; all pages of the cache together hold 24"):
        made.submit(Request(LONG[:25]))
    assert answers(made, [Request(LONG[:24], max_new_tokens=1)])[1][0].why == "length"


@pytest.mark.parametrize("chunk,speculate", [(1, 0), (2, 0), (3, 3)])
def test_prompts_go_on_where_a_chunk_is_smaller_than_the_slots_that_decode(chunk, speculate):
    """Nobody waits for others to end: three replies run on while a fourth prompt is read, and each gets its turn."""
    made = scheduler(slots=4, chunk=chunk, speculate=speculate)
    early = [made.submit(Request(PROMPTS[0][i:], max_new_tokens=40)) for i in range(3)]
    while not all(t.tokens for t in early):
        made.step()
    late, before = made.submit(Request(PROMPTS[3], max_new_tokens=3)), [len(t.tokens) for t in early]
    while not late.tokens:
        made.step()
    assert all(t.finished is None for t in early)
    made.run()
    assert late.tokens == list(generate_tokens(decoder(), PROMPTS[3], max_new_tokens=3))
    for i, ticket in enumerate(early):
        assert ticket.tokens == list(generate_tokens(decoder(), PROMPTS[0][i:], max_new_tokens=40))
    assert max(before) - min(before) < 40


def test_many_threads_at_once():
    """Submit, learn, promote and undo from several threads: all end, and the engine's books agree."""
    made = scheduler(slots=2, speculate=3)
    made.start()
    odd = []

    def client(seed):
        try:
            for i in range(4):
                prompt = tokens(5 + (seed + i) % 9, seed * 10 + i).tolist()
                teach = Teach("a", 1e-3) if i % 2 else None
                ticket = made.submit(Request(prompt, max_new_tokens=4, adapters={"a": 1.0}, teach=teach))
                if (seed + i) % 5 == 4:
                    ticket.cancel()
                while ticket.finished is None:
                    ticket.next(timeout=60)
                if ticket.finished.slot is not None:
                    made.learn(ticket.finished.slot, prompt, [1, 2], "a", 1e-3)
                with made.lock:
                    for change in (made.engine.promote, made.engine.undo):
                        with contextlib.suppress(Refused):
                            change("a")
        except BaseException as why:
            odd.append(why)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    made.close()
    assert not odd and not made.turns and not made.waiting
    for slot in made.engine.slots:
        assert made.engine.cache.lengths[slot.id] == len(slot.tokens) and not slot.unsure


def slowly(made, clock, monkeypatch):
    real = Engine.learn

    def slow(self, *args, **options):
        clock.now += 1.0
        return real(self, *args, **options)

    monkeypatch.setattr(Engine, "learn", slow)


@pytest.mark.parametrize("which", ["teacher", "neighbour"])
def test_only_the_lesson_that_waited_takes_its_wait_along(which, monkeypatch):
    """A client that comes and goes beside a learning server does not make it learn more than its share."""
    clock = Clock()
    made = scheduler(slots=3, clock=clock)
    slowly(made, clock, monkeypatch)
    teachers = [made.submit(Request(p, max_new_tokens=2, teach=Teach("a", 1e-3))) for p in PROMPTS[:2]]
    other = made.submit(Request(PROMPTS[2], max_new_tokens=38))
    for _ in range(5):
        made.step()
    (late,) = [t for t in teachers if t.finished is None]
    assert made.duty.debt > 0 and other.finished is None
    if which == "teacher":
        late.stop()  # its reply has ended: nothing to stop
        made.step()
        assert late.finished is None
        late.cancel()
        made.step()
        assert late.finished.why == "cancelled" and late.finished.learn is None and not made.duty.debt
        return
    guest = made.submit(Request(PROMPTS[3], max_new_tokens=9))
    made.step()
    guest.cancel()
    made.step()
    assert late.finished is None and made.duty.debt > 0
    made.run()
    assert late.finished.learn.success


@pytest.mark.parametrize("steps", range(7))
def test_cancelled_at_any_step(steps):
    """Waiting, reading, decoding, done: the slot is free, and what it holds is what it read."""
    made = scheduler(slots=1, chunk=4, speculate=2)
    first = made.submit(Request(LONG[:14], max_new_tokens=3, teach=Teach("a", 1e-3)))
    second = made.submit(Request(PROMPTS[0], max_new_tokens=2))
    for _ in range(steps):
        made.step()
    first.cancel()
    made.run()
    assert first.finished.why in ("cancelled", "length") and second.finished.why == "length"
    assert second.tokens == list(generate_tokens(made.engine.model, PROMPTS[0], max_new_tokens=2))
    slot = made.engine.slots[0]
    assert made.engine.cache.lengths[0] == len(slot.tokens) and not made.turns


@pytest.mark.parametrize("speculate", [0, 4])
@pytest.mark.parametrize("chunk", [1, 3])
def test_chunks_smaller_than_what_wants_to_run(chunk, speculate):
    requests = [Request(p, max_new_tokens=9) for p in (*PROMPTS, (PROMPTS[0] * 4)[:17], tokens(WINDOW, 3).tolist())]
    got, ends = answers(scheduler(slots=3, chunk=chunk, speculate=speculate), requests)
    assert [e.why for e in ends] == ["length"] * len(requests) and len(got[-1]) == 1
    assert got[:-1] == [list(generate_tokens(decoder(), r.prompt, max_new_tokens=9)) for r in requests[:-1]]


class Words:
    """A tokenizer of one character a token."""

    stop_ids, eos_id = (0,), 0

    def encode(self, text):
        return [1 + ord(c) % (V - 1) for c in text]

    def decode(self, ids, **_):
        return "".join(chr(96 + i) for i in ids)

    def render_chat(self, messages, add_generation_prompt=False, **_):
        return "".join(m["content"] + "|" for m in messages)


def test_a_question_that_is_refused_is_no_part_of_the_conversation():
    made = scheduler()
    made.start()
    try:
        talk = Chat(made, Words(), adapter="a")
        with pytest.raises(Refused, match="more than the window"):
            talk.say("x" * 60)
        assert not talk.messages
        assert "".join(talk.say("ab", max_new_tokens=3)) == talk.messages[1]["content"]
        assert [m["role"] for m in talk.messages] == ["user", "assistant"]
        for _ in talk.say("cd", max_new_tokens=30):
            break  # its reader went away: the slot is free again, the conversation whole
        assert [m["role"] for m in talk.messages] == ["user", "assistant"] * 2
        with pytest.raises(Refused, match="no answer to correct"):
            talk.correct("no", lr=1e-3)
    finally:
        made.close()
