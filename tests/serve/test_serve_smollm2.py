"""Acceptance on the real model: a served answer is corrected, learned, promoted and taken back."""

import pytest
import torch
from real_model import smollm2_or_skip

from riftco.adapters import LoraSpec
from riftco.models import load_model
from riftco.serve import Chat, Engine, Refused, Request, Scheduler, reply_tokens, serving_prompt_tokens
from riftco.serve.conversation import end_of_turn

QUESTION = "Where do I keep the blue box with the spare keys?"
CORRECTION = "The blue box with the spare keys is on the second shelf in the hall."


@pytest.fixture(scope="module")
def loaded():
    return load_model(smollm2_or_skip(), weights="fp32")


def test_four_corrections_of_a_served_conversation(loaded):
    model, tokenizer = loaded
    engine = Engine(model, slots=2, window=256, cache_dtype="q8_0")
    engine.create("mine", LoraSpec(rank=8, alpha=16), seed=0)
    scheduler = Scheduler(engine)

    def ask(n=8):
        chat = Chat(scheduler, tokenizer, adapter="mine")
        pieces = chat.say(QUESTION, max_new_tokens=n)
        scheduler.run()
        return chat, "".join(pieces)

    neighbour = scheduler.submit(
        Request(serving_prompt_tokens(tokenizer, [{"role": "user", "content": "Hi"}]), max_new_tokens=4, slot=1)
    )
    scheduler.run()
    assert neighbour.finished.why in ("stop", "length")
    chat, first = ask()
    rows = [engine.cache.snapshot(i) for i in (0, 1)]
    outcomes = chat.correct(CORRECTION, lr=2e-3, steps=4)
    losses = [o.loss_before for o in outcomes]
    assert all(o.success and o.n_labelled == 17 for o in outcomes)
    assert losses == sorted(losses, reverse=True) and losses[0] > 1 and losses[-1] < 0.2
    for before, after in zip(rows, (engine.cache.snapshot(i) for i in (0, 1))):
        for (_, a), (_, b) in zip(before.rows, after.rows):
            assert all(torch.equal(s, t) for s, t in zip(a, b))
    assert engine.promote("mine") == 2
    assert ask(len(CORRECTION))[1] == CORRECTION
    engine.undo("mine", 4)
    engine.promote("mine")
    assert ask()[1] == first


def test_a_conversation_goes_on_from_its_rows(loaded):
    model, tokenizer = loaded
    scheduler = Scheduler(Engine(model, window=256, cache_dtype="float32"))
    chat = Chat(scheduler, tokenizer)
    for n, question in enumerate((QUESTION, "And the red one?")):
        pieces = chat.say(question, max_new_tokens=8)
        scheduler.run()
        assert "".join(pieces) == chat.messages[-1]["content"]
        assert chat.finished.cached >= (30 if n else 0)
    with pytest.raises(Refused, match="no adapter learns here"):
        chat.correct("x", lr=1e-3)


def test_what_can_be_learned_of_a_message(loaded):
    tokenizer = loaded[1]
    ids = reply_tokens(tokenizer, {"role": "assistant", "content": "Yes."})
    assert tokenizer.decode(ids) == "Yes.<|im_end|>" and ids[-1:] == end_of_turn(tokenizer)
    for message, why in (
        ({"role": "user", "content": "x"}, "must be the assistant's"),
        ({"role": "assistant", "content": ""}, "is empty"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "with media"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "with tool_calls cannot be learned"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, "with reasoning_content"),
    ):
        with pytest.raises(Refused, match=why):
            reply_tokens(tokenizer, message)
