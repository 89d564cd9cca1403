"""`riftco serve` on a GPU with SmolLM2's packed weights: it answers, learns, and takes back, over HTTP."""

import asyncio

import httpx
import pytest

from riftco.bench import serve_load
from riftco.models import smollm2_path

CORRECTION = "[-] 3 jar | honey | attic"


@pytest.fixture(scope="module")
def server(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with serve_load.serving(smollm2_path(), folder, "--slots", "8", device="cuda") as running:
        yield running


@pytest.mark.gpu
def test_a_correction_is_learned_promoted_and_taken_back(server):
    headers = {"x-api-key": serve_load.ADMIN}
    with httpx.Client(base_url=server.url, timeout=120, headers=headers) as client:

        def ask(**more):
            said = [{"role": "user", "content": "Three jars of honey broke in the attic."}]
            wanted = {"temperature": 0, "max_tokens": 24, "lora": [{"id": "live"}]}
            answer = client.post("/v1/chat/completions", json={"messages": said, **wanted, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()

        first = ask()["choices"][0]["message"]["content"]
        again = ask()["choices"][0]["message"]["content"]  # over the prompt's rows that are there: rounded otherwise
        learn = {"lora_id": "live", "lr": 1e-3, "reply": CORRECTION}
        losses = [ask(learn=learn)["learn"]["loss_before"] for _ in range(8)]
        assert losses == sorted(losses, reverse=True) and losses[-1] < 0.2, losses
        assert ask()["choices"][0]["message"]["content"] == again, "what serves did not change yet"
        assert client.post("/adapters/live/promote").status_code == 200
        assert ask()["choices"][0]["message"]["content"] == CORRECTION
        assert client.post("/adapters/live/rollback", json={"version": 1}).status_code == 200
        assert ask()["choices"][0]["message"]["content"] == first


@pytest.mark.gpu
def test_many_clients(server):
    result = asyncio.run(serve_load.many_clients(server, 12, 3.0))
    assert result["errors"] == [] and result["fewest_turns"] >= 1
