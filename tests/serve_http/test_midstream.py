"""A turn that fails after its stream has begun: each dialect's clients hear of it, and the server goes on."""

import json

import anthropic
import httpx
import openai
import pytest
from server import served, service

ASK = [{"role": "user", "content": "Where is the key?"}]
LEARN = {"learn": {"lora_id": "live", "lr": 1e-3, "reply": "On the hook.", "id": "mine"}}


@pytest.fixture
def made(tokenizer, tmp_path, monkeypatch):
    """A service whose engine breaks once, at its fourth batch."""
    made = service(tokenizer, tmp_path)
    real, calls = made.engine._forward, []

    def breaks(*args):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("no memory")
        return real(*args)

    monkeypatch.setattr(made.engine, "_forward", breaks)
    return made


@pytest.fixture
def url(made):
    with served(made) as address:
        yield address


def goes_on(url, made):
    """The next turn is served and learned, under the id whose turn failed: nothing was learned under it."""
    body = {"messages": ASK, "max_tokens": 2, **LEARN}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["learn"]["success"] and answer["learn"]["step"] == 1 and made.scheduler.totals.learned == 1


@pytest.mark.parametrize("form", ["chat", "completions"])
def test_openai_raises(url, made, form):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        make, ask = {
            "chat": (client.chat.completions.create, {"messages": ASK}),
            "completions": (client.completions.create, {"prompt": "The key is"}),
        }[form]
        said = []
        with pytest.raises(openai.APIError, match="no memory"):
            for chunk in make(model="m", max_tokens=20, stream=True, extra_body=LEARN, **ask):
                said.append(chunk)
    assert said and all("learn" not in (chunk.model_extra or {}) for chunk in said)
    goes_on(url, made)


def test_responses_tell(url, made):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        events = list(client.responses.create(model="m", input="Where?", stream=True, extra_body=LEARN))
    assert [e.type for e in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.status == "failed" and "no memory" in events[-1].response.error.message
    assert [e.sequence_number for e in events] == list(range(len(events)))
    goes_on(url, made)


def test_anthropic_raises(url, made):
    with anthropic.Anthropic(base_url=url, api_key="none") as client, pytest.raises(anthropic.APIStatusError) as why:
        list(client.messages.create(model="m", max_tokens=20, messages=ASK, stream=True, extra_body=LEARN))
    assert why.value.body["error"]["type"] == "api_error" and "no memory" in why.value.body["error"]["message"]
    goes_on(url, made)


def test_native_tells(url, made):
    body = {"prompt": "The key is", "n_predict": 20, "stream": True, **LEARN}
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=60) as answer:
        data = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    assert "no memory" in data[-1]["error"]["message"] and not any("learn" in chunk for chunk in data)
    goes_on(url, made)


def test_a_plain_turn_that_fails_is_not_sent_again(url, made):
    """500, and x-should-retry: false, as a step may have been made: the client asks once."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client, pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="m", messages=ASK, max_tokens=20, extra_body=LEARN)
    assert made.requests == 1
    goes_on(url, made)
