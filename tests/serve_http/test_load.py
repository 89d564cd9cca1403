"""Many clients at once, and everything at once: a server in a process of its own, and one slot that many want."""

import asyncio
import threading

import httpx
import pytest
from server import served, service

from riftco.bench import serve_load, serve_soak

ASK = {"messages": [{"role": "user", "content": "Where is the key?"}], "max_tokens": 4, "temperature": 0}
LEARN = {"lora_id": "live", "lr": 1e-2, "reply": "On the hook."}


def test_one_slot_and_a_client_that_takes_it_all_the_time(tokenizer, tmp_path):
    """Carried lessons are learned on their slot, 4 of 4; one sent by itself may find another prompt there."""
    made = service(tokenizer, tmp_path, slots=1)
    served_meanwhile, stop, wrong = [], threading.Event(), []

    def take_the_slot(i):
        with httpx.Client(base_url=url, timeout=60) as client:
            while not stop.is_set():
                other = {"messages": [{"role": "user", "content": f"Other question {i}"}], "max_tokens": 3}
                answer = client.post("/v1/chat/completions", json=other)
                (served_meanwhile if answer.status_code == 200 else wrong).append(answer)

    with served(made) as url, httpx.Client(base_url=url, timeout=60) as client:
        others = [threading.Thread(target=take_the_slot, args=(i,)) for i in range(2)]
        for thread in others:
            thread.start()
        outcomes = []
        for _ in range(4):
            answer = client.post("/v1/chat/completions", json={**ASK, "learn": LEARN})
            outcomes.append(answer.json()["learn"])
        alone = client.post("/learn", json={**LEARN, "reply": None, "messages": [
            *ASK["messages"], {"role": "assistant", "content": "On the hook."}]})  # fmt: skip
        stop.set()
        for thread in others:
            thread.join()
    losses = [outcome["loss_before"] for outcome in outcomes]
    assert all(outcome["success"] for outcome in outcomes) and losses == sorted(losses, reverse=True)
    assert len(served_meanwhile) >= 4 and not wrong
    assert alone.status_code == 200 or "serve" in alone.json()["error"]["message"], (
        "refused with the remedy, or learned"
    )


LONG = "long " * 20
SAID = [{"role": "assistant", "content": "On the hook."}]
LONG_ASKS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": LONG, "max_output_tokens": 1},
    "/v1/completions": {"prompt": LONG, "max_tokens": 1},
    "/completion": {"prompt": LONG, "n_predict": 1},
    "/v1/embeddings": {"input": LONG},
    "/apply-template": {"messages": [{"role": "user", "content": LONG}]},
    "/tokenize": {"content": LONG},
    "/learn": {**LEARN, "reply": None, "messages": [{"role": "user", "content": LONG}, *SAID]},
}


@pytest.mark.parametrize("path", LONG_ASKS)
def test_a_long_text_holds_up_nobody_else(tokenizer, tmp_path, monkeypatch, path):
    """Megabytes are seconds of the tokenizer's time, in which everything else is answered."""
    made = service(tokenizer, tmp_path)
    reading, go_on = threading.Event(), threading.Event()
    encode = type(tokenizer).encode

    def slow(self, text, **options):
        if LONG in text:
            reading.set()
            assert go_on.wait(60)
        return encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", slow)
    with served(made) as url:
        answers = []
        ask = threading.Thread(target=lambda: answers.append(httpx.post(url + path, json=LONG_ASKS[path], timeout=60)))
        ask.start()
        try:
            assert reading.wait(30)
            assert httpx.get(f"{url}/health", timeout=20).status_code == 200
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=20).is_success
        finally:
            go_on.set()
            ask.join()
        assert answers[0].status_code == (400 if path == "/learn" else 200), answers[0].text


def test_learns_that_wait_for_their_time_hold_up_no_prompt(tokenizer, tmp_path, monkeypatch):
    """More of them than threads that wait for anything."""
    made = service(tokenizer, tmp_path)
    go_on, waiting = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(made.scheduler.duty, "wait", lambda: (waiting.release(), go_on.wait(60)))
    lesson = {**LEARN, "reply": None, "messages": [*ASK["messages"], {"role": "assistant", "content": "On the hook."}]}
    with served(made) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/v1/chat/completions", json=ASK).is_success
        learns = [
            threading.Thread(target=lambda: httpx.post(f"{url}/learn", json=lesson, timeout=60)) for _ in range(40)
        ]
        for thread in learns:
            thread.start()
        try:
            assert waiting.acquire(timeout=30)
            assert client.post("/v1/chat/completions", json=ASK, timeout=20).is_success
            assert client.get("/learn/log", timeout=20).is_success
            undo = client.post("/learn/undo", json={"lora_id": "live"}, timeout=20)
            assert "0" in undo.json()["error"]["message"], "who looks after the server is not held up either"
        finally:
            go_on.set()
            for thread in learns:
                thread.join()


@pytest.fixture
def model(tokenizer, tmp_path):
    return serve_load.small_model(tmp_path / "model")


def test_the_command_serves_many_clients(model, tmp_path):
    """`riftco serve` itself, as long as a fast test may take."""
    with serve_load.serving(model, tmp_path / "run", "--slots", "4") as server:
        result = asyncio.run(serve_load.many_clients(server, 12, 2.0))
    assert result["errors"] == [] and result["fewest_turns"] >= 1 and result["turns"] >= 12


@pytest.mark.slow
def test_64_clients_for_two_minutes(model, tmp_path):
    with serve_load.serving(model, tmp_path / "run", "--slots", "8") as server:
        result = asyncio.run(serve_load.many_clients(server, 64, 120))
    print(result)
    assert result["errors"] == []
    assert result["rss_growth_mib"] < 16, "flat"
    assert result["slowest_client_over_median"] < 2 and result["fewest_turns"] > 0.5 * result["most_turns"], "fair"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_soak_of_twenty_minutes_loses_nothing(model, tmp_path):
    result = serve_soak.soaked(model, tmp_path / "run", 1200)
    print(result)
    assert result["errors"] == [] and result["idle_slot_unchanged"] and result["rss_growth_mib"] < 32
    for what in ("learned", "promote", "undo", "rollback", "train", "hung up", "refused", "saved and restored"):
        assert result["done"][what] > 10, what
