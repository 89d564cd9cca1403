"""Guessed tokens change how fast a reply comes, and nothing of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective import engine, tokens
from test_scheduler import PROMPTS, answers, scheduler

from riftco.models import generate_tokens
from riftco.serve import Batch, Request, Sampling, Teach
from riftco.serve.draft import LONGEST, SHORTEST, Draft
from riftco.serve.sampling import Sampler

AGAIN = (PROMPTS[0] * 4)[:17]  # a text that repeats itself


def naive(text, count):
    for n in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                return [*text, *(text[end:] * count)][end : end + count]
    return []


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 6))
def test_the_index_finds_what_a_search_finds(text, count):
    assert Draft(text).next(count) == naive(text, count)


@pytest.mark.parametrize("options", [{}, {"cache_dtype": "q8_0"}, {"page_size": 5}, {"chunk": 6}])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=0.7, seed=3, repetition_penalty=1.3)],
    ids=["greedy", "sampled", "penalised"],
)
def test_replies_are_what_they_are_without(sampling, options):
    prompts = [AGAIN, *PROMPTS[1:4]]
    requests = [Request(p, max_new_tokens=14, sampling=sampling) for p in prompts]
    plain, _ = answers(scheduler(**options), requests)
    made = scheduler(speculate=4, **options)
    got, ends = answers(made, requests)
    assert got == plain
    assert all(0 <= end.accepted <= end.drafted for end in ends)
    assert sum(e.drafted for e in ends) > 0
    for slot in made.engine.slots:
        assert made.engine.cache.lengths[slot.id] == len(slot.tokens) and not slot.unsure
    if sampling == Sampling() and not options:
        assert plain[0] == list(generate_tokens(made.engine.model, AGAIN, max_new_tokens=14))


def test_right_guesses_save_iterations():
    """A model that repeats itself: its guesses are right, and several tokens come of one forward."""
    made, steps = scheduler(slots=1, speculate=4), []
    with torch.no_grad():
        made.engine.model.lm_head.weight.zero_()
    real = made.engine.decode
    made.engine.decode = lambda batch: steps.append(len(batch)) or real(batch)
    (got,), (end,) = answers(made, [Request([0, 0, 0], max_new_tokens=20)])
    assert got == [0] * 20 and end.accepted == end.drafted and len(steps) <= 6


def test_a_stop_token_among_right_guesses_ends_the_reply():
    made = scheduler(slots=1, speculate=4)
    with torch.no_grad():
        made.engine.model.lm_head.weight.zero_()
    (got,), (end,) = answers(made, [Request([0, 0, 0], max_new_tokens=20, stop_ids={0})])
    assert got == [0] and end.why == "stop"
    (got,), (end,) = answers(made, [Request([0, 0, 0], max_new_tokens=3)])
    assert got == [0, 0, 0] and end.accepted == end.drafted
    ticket = made.submit(Request([0, 0, 0], max_new_tokens=20))
    made.step()
    ticket.stop()
    made.run()
    assert ticket.finished.why == "stop" and len(ticket.tokens) == 2
    assert ticket.finished.drafted == 4 and ticket.finished.accepted == 1, "what stands behind the stop was not used"
    assert len(made.engine.slots[0].tokens) == 3 + 1


def test_a_turn_is_learned_with_guesses_as_without():
    """Both ways to finish a reply learn before the slot is released, and learn the same."""
    outcomes = []
    for speculate in (0, 4):
        _, (end,) = answers(scheduler(speculate=speculate), [Request(AGAIN, max_new_tokens=12, teach=Teach("a", 1e-2))])
        outcomes.append(end.learn)
    assert outcomes[0].success and outcomes[1].loss_before == pytest.approx(outcomes[0].loss_before, rel=1e-5)
    assert outcomes[1].gradient_norm == pytest.approx(outcomes[0].gradient_norm, rel=1e-3)


def test_rows_that_may_be_taken_back_are_not_learned_behind():
    made = engine()
    made.decode(Batch.of(0, 0, tokens(8)))
    made.slots[0].unsure = 2
    outcome = made.learn(0, 5, [1, 2], [2, 3], adapter="a", lr=1e-3)
    assert outcome.reason == "slot 0: 2 of its rows may yet be taken back; learn once that is decided"
    made.cut(0, 6)
    assert made.learn(0, 5, [1, 2], [2, 3], adapter="a", lr=1e-3).success


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_is_the_distribution_without_a_draft(seed):
    """A row of logits repeated: tokens come as drawn one by one, with the generator where it would be."""
    logits = torch.randn(6, generator=torch.Generator().manual_seed(seed))
    one, two = (Sampler(Sampling(temperature=1.0, seed=seed), (), 6, torch.device("cpu")) for _ in range(2))
    drawn = [int(one.choose(logits)) for _ in range(40)]
    taken = []
    while len(taken) < 40:
        draft = drawn[len(taken) : len(taken) + 3] if len(taken) % 2 else [0, 1, 2]
        taken += two.accept(logits.expand(1 + len(draft), -1), draft)
    assert taken[:40] == drawn
