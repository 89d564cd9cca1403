"""Ten forms of one generation, read by the official clients, and the learn at the end of each."""

import json

import httpx
import pytest

ASK = [{"role": "user", "content": "Where is the key?"}]
LEARN = {"lora_id": "live", "lr": 1e-3, "reply": "On the hook."}
EXTRA = {"learn": LEARN}


def learned(parts):
    """The outcomes that stand anywhere in an answer's parts, each a client's object."""
    return [p.model_extra["learn"] for p in parts if (p.model_extra or {}).get("learn")]


def lines(url, path, body):
    """The data of a raw event stream."""
    with httpx.stream("POST", url + path, json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(d) for d in data if d != "[DONE]"], data[-1] == "[DONE]"


def chat(gpt, **options):
    return gpt.chat.completions.create(
        model="m", messages=ASK, max_tokens=3, temperature=0, extra_body=EXTRA, **options
    )  # fmt: skip


def test_chat(gpt):
    answer = chat(gpt)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == 3 and answer.usage.total_tokens == answer.usage.prompt_tokens + 3
    (outcome,) = learned([answer])
    assert outcome["success"] and outcome["adapter"] == "live"


@pytest.mark.parametrize("with_usage", [False, True])
def test_chat_stream(gpt, with_usage):
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    chunks = list(chat(gpt, stream=True, **options))
    assert len(learned(chunks)) == 1 and learned(chunks[-1:])
    assert chunks[0].choices[0].delta.role == "assistant"
    last = chunks[-2 if with_usage else -1]
    assert last.choices[0].finish_reason == "length" and (chunks[-1].usage is not None) == with_usage
    assert len({c.id for c in chunks}) == 1


def test_chat_streams_helper(gpt):
    options = {"model": "m", "messages": ASK, "max_tokens": 12, "temperature": 0}
    whole = gpt.chat.completions.create(**options).choices[0].message.content
    with gpt.chat.completions.stream(**options, stop=[whole[-2:]], extra_body=EXTRA) as stream:
        chunks = [e.chunk for e in stream if e.type == "chunk"]
        final = stream.get_final_completion()
    assert len(learned(chunks)) == 1
    assert final.choices[0].message.content == whole[: whole.find(whole[-2:])]


def test_completions(gpt):
    ask = {"model": "m", "prompt": "The key is", "max_tokens": 3, "temperature": 0, "extra_body": EXTRA, "logprobs": 2}
    answer = gpt.completions.create(**ask)
    assert learned([answer])[0]["success"] and len(answer.choices[0].logprobs.tokens) == 3
    chunks = list(gpt.completions.create(**ask, stream=True))
    assert len(learned(chunks)) == 1 and learned(chunks[-1:])
    assert "".join(c.choices[0].text for c in chunks) == answer.choices[0].text
    assert chunks[-1].usage.completion_tokens == 3


def test_responses(gpt):
    ask = {"model": "m", "input": "Where is the key?", "temperature": 0, "extra_body": EXTRA}
    answer = gpt.responses.create(**ask, max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert learned([answer])[0]["success"] and answer.usage.output_tokens == 3
    events = list(gpt.responses.create(**ask, max_output_tokens=3, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete" and len(learned([events[-1].response])) == 1
    assert len(learned(events)) == 1, "at the event's top level too, on the last one alone"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text


def test_responses_streams_helper(gpt, made):
    ask = {"model": "m", "input": "Where is the key?", "temperature": 0, "extra_body": EXTRA}
    with gpt.responses.stream(**ask) as stream:  # to the window's end, or a stop token
        kinds = [e.type for e in stream]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_messages(claude):
    ask = {"model": "m", "max_tokens": 3, "messages": ASK, "system": "Be short.", "extra_body": EXTRA}
    answer = claude.messages.create(**ask)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 3
    counted = claude.messages.count_tokens(model="m", messages=ASK, system="Be short.").input_tokens
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == counted
    assert learned([answer])[0]["success"]
    events = list(claude.messages.create(**ask, stream=True))
    kinds = [e.type for e in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert len(learned(events)) == 1 and learned(events[-2:-1])
    started = events[0].message.usage
    assert started.input_tokens + started.cache_read_input_tokens == counted
    with claude.messages.stream(**ask) as stream:
        deltas = [e for e in stream if e.type == "message_delta"]
        final = stream.get_final_message()
    assert len(learned(deltas)) == 1 and final.usage.output_tokens == 3


def test_native(url):
    ask = {"prompt": "The key is", "n_predict": 3, "temperature": 0, "learn": LEARN}
    answer = httpx.post(f"{url}/completion", json=ask, timeout=60).json()
    assert answer["learn"]["success"] and answer["tokens_predicted"] == 3 and answer["stop_type"] == "limit"
    chunks, done = lines(url, "/completion", {**ask, "stream": True})
    assert not done and [("learn" in c) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "".join(c["content"] for c in chunks) == answer["content"]


def test_stop_strings_end_a_reply(gpt, claude):
    ask = {"model": "m", "messages": ASK, "max_tokens": 12}
    whole = gpt.chat.completions.create(**ask, temperature=0).choices[0].message.content
    stop = whole[len(whole) // 2 :][:3]
    cut = whole[: whole.find(stop)]
    answer = gpt.chat.completions.create(**ask, temperature=0, stop=[stop])
    assert answer.choices[0].message.content == cut and answer.choices[0].finish_reason == "stop"
    chunks = gpt.chat.completions.create(**ask, temperature=0, stop=[stop], stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == cut
    said = claude.messages.create(**ask, stop_sequences=[stop], extra_body={"temperature": 0})
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)


def test_a_refused_lesson_is_said_once_and_the_turn_is_served(gpt, made):
    bad = {"learn": {**LEARN, "lora_id": "other"}}
    answer = gpt.chat.completions.create(model="m", messages=ASK, max_tokens=2, extra_body=bad)
    outcome = answer.model_extra["learn"]
    assert answer.usage.completion_tokens == 2 and not outcome["success"]
    assert outcome["reason"] == "no adapter 'other'; loaded: live"
    assert made.scheduler.totals.refused == 1
