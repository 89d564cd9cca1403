"""Several choices and several prompts in one request, adapters as models, and replies that go on with a text."""

import math
import time

import httpx
import openai
import pytest

from riftco.serve import Sampling

ASK = [{"role": "user", "content": "Where is the key?"}]


def chat(gpt, **options):
    return gpt.chat.completions.create(**{"model": "m", "messages": ASK, "max_tokens": 6, "seed": 5, **options})


def alone(gpt, seed, **options):
    return chat(gpt, seed=seed, **options).choices[0].message.content


def test_each_choice_draws_by_a_seed_of_its_own(gpt):
    answer = chat(gpt, n=3)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == [alone(gpt, seed) for seed in (5, 6, 7)]
    assert answer.usage.completion_tokens == 18
    assert answer.usage.prompt_tokens == chat(gpt).usage.prompt_tokens  # the prompt counts once
    assert chat(gpt, n=2, seed=2**63 - 1).choices[1].message.content  # the next seed has a sign


def test_streamed_choices_are_the_same(gpt):
    chunks = list(chat(gpt, n=3, stream=True, stream_options={"include_usage": True}))
    texts = [""] * 3
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in chat(gpt, n=3).choices]
    assert chunks[-1].usage.completion_tokens == 18 and [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert sorted(c.index for x in chunks for c in x.choices if c.finish_reason) == [0, 1, 2]


def test_several_prompts(gpt, made):
    prompts = ["The key is", made.tokenizer.encode("On the hook")]
    ask = {"model": "m", "max_tokens": 4, "seed": 3, "logprobs": 1}
    answer = gpt.completions.create(prompt=prompts, n=2, **ask)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    each = [gpt.completions.create(prompt=p, **{**ask, "seed": seed}) for p in prompts for seed in (3, 4)]
    assert [c.text for c in answer.choices] == [e.choices[0].text for e in each]
    assert answer.usage.prompt_tokens == each[0].usage.prompt_tokens + each[2].usage.prompt_tokens
    texts = [""] * 4
    for chunk in gpt.completions.create(prompt=prompts, n=2, stream=True, **ask):
        for choice in chunk.choices:
            if choice.logprobs:
                assert choice.logprobs.text_offset[0] == len(texts[choice.index])
            texts[choice.index] += choice.text
    assert texts == [c.text for c in answer.choices]
    for choice in answer.choices:
        offsets, tokens = choice.logprobs.text_offset, choice.logprobs.tokens
        assert offsets[0] == 0 and offsets[-1] == len("".join(tokens[:-1])) and math.isfinite(sum(offsets))


BAD = {
    "a list of such": {"prompt": ["a", 3]},
    "prompt must be": {"prompt": []},
    "best_of: not supported here; leave it out": {"prompt": "a", "best_of": 2},
    "suffix": {"prompt": "a", "suffix": "b"},
    "n:": {"prompt": "a", "n": 129},
    "token ids, or a list": {"prompt": [["x"], [1]]},
    "at most 256 turns may wait; send fewer": {"prompt": ["a"] * 129, "n": 2},
}


@pytest.mark.parametrize("why", BAD)
def test_bad_requests(gpt, made, why):
    with pytest.raises(openai.BadRequestError, match=why):
        gpt.completions.create(model="m", max_tokens=2, **BAD[why])


def test_too_many_prompts_are_refused_before_one_is_read(gpt, made, monkeypatch):
    monkeypatch.setattr(made, "tokens_of", None)
    with pytest.raises(openai.BadRequestError, match="300 choices at once; at most 256 turns may wait"):
        gpt.completions.create(model="m", prompt=["a"] * 300)


def test_choices_that_find_no_room_leave_none_waiting(gpt, made, monkeypatch):
    with made.scheduler.lock:  # nobody gets a slot
        others = [made.submit([1, 2], Sampling(), 1) for _ in range(3)]
        monkeypatch.setattr(made.scheduler, "limit", 9)
        with pytest.raises(openai.InternalServerError, match="wait already"):
            chat(gpt, n=8, max_tokens=60)
    assert all(len(list(ticket)) == 1 for ticket in others)
    monkeypatch.undo()
    assert chat(gpt).choices[0].finish_reason  # nobody is before it for good


def test_an_adapter_may_be_named_as_the_model(gpt, made):
    cards = {card.id: card for card in gpt.models.list()}
    assert set(cards) == {"tiny", "live"} and cards["live"].model_extra["parent"] == "tiny"
    assert gpt.models.retrieve("live").id == "live" and gpt.models.retrieve("tiny").model_extra["adapters"]
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        gpt.models.retrieve("other")
    for create in (lambda model: chat(gpt, model=model), lambda model: gpt.responses.create(model=model, input="x")):
        for model, used in (("live", {"live"}), ("tiny", set()), ("any", set())):
            create(model)
            newest = max(made.engine.slots, key=lambda s: s.used)
            assert {use.id for use in newest.key} == used, model


def test_a_reply_goes_on_with_a_text(gpt, claude, made):
    """Anthropic's clients end a conversation with the beginning of the reply; others ask for it."""
    begun = [*ASK, {"role": "assistant", "content": "It hangs on"}]
    head = made.tokenizer.render_chat(ASK, add_generation_prompt=True)
    claude.messages.create(model="m", messages=begun, max_tokens=2)
    assert held(made) == f"{head}It hangs on"
    counted = claude.messages.count_tokens(model="m", messages=begun).input_tokens
    assert counted == len(made.tokenizer.encode(f"{head}It hangs on"))
    chat(gpt, messages=begun, max_tokens=2, extra_body={"continue_final_message": True})
    assert held(made) == f"{head}It hangs on"
    chat(gpt, messages=begun, max_tokens=2)
    assert held(made) == made.tokenizer.render_chat(begun, add_generation_prompt=True)


def held(made):
    """The prompt of the newest turn of two tokens."""
    slot = max(made.engine.slots, key=lambda s: s.used)
    return made.tokenizer.decode(slot.tokens[:-1])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "plain"])
def test_a_client_that_hangs_up_ends_all_of_its_choices(url, made, stream):
    body = {"messages": ASK, "n": 6, "max_tokens": 120, "stream": stream, "ignore_eos": True}
    before = made.scheduler.totals.predicted
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=httpx.Timeout(60, read=0.3)) as client:
        slow = made.engine.decode

        def waits(batch):
            time.sleep(0.1)
            return slow(batch)

        made.engine.decode = waits
        try:
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                next(answer.iter_lines())
                raise httpx.ReadTimeout("enough")
        finally:
            del made.engine.decode
    until = time.monotonic() + 20
    while (made.scheduler.turns or made.scheduler.waiting) and time.monotonic() < until:
        time.sleep(0.05)
    assert not made.scheduler.turns and not made.scheduler.waiting
    assert made.scheduler.totals.predicted - before < 6 * 120
