"""Vectors of texts, as the official client reads them; slots do not notice."""

import base64
import json

import httpx
import numpy as np
import pytest
import torch
from server import WINDOW

from riftco.serve import embed as embedding

TEXTS = ["Where is the key?", "On the hook.", "The key hangs on the hook beside the door, where it always was."]


def wanted(made, text, pooling):
    tokens = made.tokens_of(text) if isinstance(text, str) else text
    with torch.no_grad():
        states = made.engine.model.hidden(torch.tensor([tokens]))[0]
    return torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)


def vectors(answer):
    assert [d.index for d in answer.data] == list(range(len(answer.data))) and answer.object == "list"
    return torch.tensor([d.embedding for d in answer.data])


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_texts(gpt, made, pooling, monkeypatch):
    want = torch.stack([wanted(made, t, pooling) for t in TEXTS])
    ask = {"model": "m", "extra_body": {"pooling": pooling}}
    for chunk in (512, 9, 5):  # together, some together, and the long one in pieces
        monkeypatch.setattr(made.engine, "chunk", chunk)
        answer = gpt.embeddings.create(input=TEXTS, **ask)
        torch.testing.assert_close(vectors(answer), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors(gpt.embeddings.create(input=TEXTS[0], **ask)), want[:1], atol=1e-5, rtol=0)
    tokens = [made.tokens_of(t) for t in TEXTS]
    torch.testing.assert_close(vectors(gpt.embeddings.create(input=tokens, **ask)), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors(gpt.embeddings.create(input=tokens[1], **ask)), want[1:2], atol=1e-5, rtol=0)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, tokens))


def test_forms_and_dimensions(url, made):
    def post(**options):
        body = {"input": TEXTS[0], **options}
        return httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).json()["data"][0]["embedding"]

    plain = post()
    assert np.frombuffer(base64.b64decode(post(encoding_format="base64")), "<f4").tolist() == plain
    assert sum(x * x for x in plain) == pytest.approx(1)
    short = post(dimensions=8)
    torch.testing.assert_close(torch.tensor(short), torch.nn.functional.normalize(torch.tensor(plain[:8]), dim=0))
    assert post(lora=[{"id": "live", "scale": 0}]) == plain


BAD = {
    "dimensions must be at most 32": {"dimensions": 33},
    "input must hold between 1 and 2048": {"input": []},
    "input 1: it is empty": {"input": ["a", ""]},
    "input 0: token 99999999 is outside": {"input": [99999999]},
    "the context holds": {"input": "word " * WINDOW},
    "no adapter 'x'": {"lora": [{"id": "x"}]},
    "encoding_format": {"encoding_format": "int8"},
    "half of a surrogate": {"input": "\ud800"},
}


@pytest.mark.parametrize("why", BAD)
def test_bad_requests(url, why):
    body = json.dumps({"input": "a", **BAD[why]})
    answer = httpx.post(f"{url}/v1/embeddings", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_slots_do_not_notice(gpt, made):
    """A reply that is under way goes on as if nobody had asked for vectors, and so does the next turn."""
    ask = {"model": "m", "messages": [{"role": "user", "content": TEXTS[0]}], "max_tokens": 40, "temperature": 0}
    plain = gpt.chat.completions.create(**ask)
    before = [(list(s.tokens), s.key) for s in made.engine.slots]
    stream = gpt.chat.completions.create(**ask, stream=True)
    text = next(stream).choices[0].delta.content
    gpt.embeddings.create(model="m", input=TEXTS)
    assert text + "".join(c.choices[0].delta.content or "" for c in stream) == plain.choices[0].message.content
    gpt.embeddings.create(model="m", input=TEXTS, extra_body={"lora": [{"id": "live"}]})
    assert [(list(s.tokens), s.key) for s in made.engine.slots] == before
    again = gpt.chat.completions.create(**ask)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


def test_rows_of_short_inputs_beside_a_long_one(made, monkeypatch):
    """No more rows are held than the inputs have, but for the rest of their pages."""
    taken = []
    real = embedding.KVCache
    monkeypatch.setattr(embedding, "KVCache", lambda *a, **k: taken.append(real(*a, **k)) or taken[-1])
    inputs = [[1], [2] * 40, [3], [4] * 17]
    found = {}
    for some in embedding.embed(made.engine, inputs):
        found |= some
    (cache,) = taken
    rows = (1 + 3 + 1 + 2) * embedding.PAGE
    assert cache.nbytes == rows * made.engine.cache.nbytes / (len(made.engine.slots) * WINDOW)
    for i, tokens in enumerate(inputs):
        torch.testing.assert_close(found[i], wanted(made, tokens, "mean"), atol=1e-5, rtol=0)


def test_too_many_that_wait_are_refused(url, made):
    with made.scheduler.lock:
        waiting = [made.scheduler.between(lambda: None) for _ in range(made.limits.queue)]
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=60)
    assert answer.status_code == 503 and "x-should-retry" not in answer.headers
    assert all(f.result(60) is None for f in waiting)


def test_one_forward_an_iteration(made):
    """Many that ask for vectors at once do not keep replies waiting: one of their forwards is run between two steps."""
    scheduler, seen = made.scheduler, []
    with scheduler.lock:  # the server's thread waits
        futures = [scheduler.between(lambda i=i: seen.append(i)) for i in range(3)]
        for n in range(1, 4):
            scheduler.step()
            assert len(seen) == n
    assert seen == [0, 1, 2] and all(f.done() for f in futures)
