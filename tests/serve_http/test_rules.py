"""Errors, keys, limits, and learning on its own route."""

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
from server import WINDOW, served, service

from riftco.serve import LearnOutcome
from riftco.serve.http import Limits
from riftco.serve.http.auth import Keys, check_bind
from riftco.serve.http.generation import End, Stops, generation
from riftco.serve.http.models import LearnOptions
from riftco.serve.requests import Finished, Request, Ticket
from riftco.serve.sampling import Chosen

ASK = [{"role": "user", "content": "Where is the key?"}]
REPLY = [*ASK, {"role": "assistant", "content": "On the hook."}]
CHAT = {"messages": ASK, "max_tokens": 2}
LEARN = {"lora_id": "live", "lr": 1e-3, "messages": REPLY}


@pytest.fixture
def client(tokenizer, tmp_path):
    made = service(tokenizer, tmp_path / "train")
    with served(made, train_dir=tmp_path / "train") as url, httpx.Client(base_url=url, timeout=60) as talks:
        yield talks


def error(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


BAD = {
    "messages: List should have at least 1": {"messages": []},
    "temperature: ": {**CHAT, "temperature": -1},
    "max_tokens: ": {**CHAT, "max_tokens": 0},
    "n: ": {**CHAT, "n": 0},
    "functions: ": {**CHAT, "functions": [{"name": "f"}]},
    "one prompt, and n of 1": {**CHAT, "n": 2, "learn": {"lora_id": "live", "lr": 1e-3}},
    "no text to go on with": {**CHAT, "continue_final_message": True},
    "learn.lr: ": {**CHAT, "learn": {"lora_id": "live", "lr": "nan"}},
    "learn.typo: ": {**CHAT, "learn": {"lora_id": "live", "lr": 1e-3, "typo": 1}},
    "logit_bias: 99999999": {**CHAT, "logit_bias": {99999999: 1}},
    "no adapter 'x'; loaded: live": {**CHAT, "lora": [{"id": "x"}]},
    "the chat template refuses": {"messages": [{"role": "user"}]},
    "the context holds": {"messages": [{"role": "user", "content": "word " * WINDOW}]},
    "the reply to learn is empty": {**CHAT, "learn": {"lora_id": "live", "lr": 1e-3, "reply": ""}},
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_bad_requests_are_400_in_the_dialects_shape(client, path):
    for why, body in BAD.items():
        if path == "/v1/messages" and why.startswith(("n:", "functions", "one prompt", "no text", "the chat template")):
            continue  # no options there, and refused before the template sees it
        answer = client.post(path, json={"max_tokens": 2, **body})
        said = error(answer, 400)
        assert why.split(":")[0] in said["message"] or why in said["message"], (why, said)
        assert answer.headers["x-should-retry"] == "false"
        if path == "/v1/messages":
            assert answer.json()["type"] == "error" and said["type"] == "invalid_request_error"
        else:
            assert isinstance(said["code"], str) and said["type"] == "invalid_request_error"


def test_what_is_not_there_and_what_is_no_json(client):
    assert error(client.get("/nothing"), 404)["type"] == "not_found_error"
    assert error(client.get("/learn"), 405)
    broken = client.post("/v1/chat/completions", content=b'{"a": 1,}', headers={"content-type": "application/json"})
    said = error(broken, 400)
    assert said["message"].startswith("body: not JSON at character 8: ") and said["param"] is None
    for body, why in ((b'{"a": "\xe9"}', "not UTF-8"), (b"[" * 100000, "nested too deeply"), (b"1" * 5000, "digits")):
        broken = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert why in error(broken, 400)["message"]


def test_fields_that_are_not_read_are_named_in_the_log(client, caplog, monkeypatch):
    from riftco.serve.http import models

    monkeypatch.setattr(models, "unread", models.Unread(8))
    count = {"model": "any", "messages": CHAT["messages"]}  # as Anthropic's client sends it
    assert client.post("/v1/messages/count_tokens", json=count).status_code == 200
    assert not [r for r in caplog.records if "is not read" in r.message]
    asked = {**CHAT, "max_tokens": 1, "temprature": 0}
    assert [client.post("/v1/chat/completions", json=asked).status_code for _ in range(2)] == [200, 200]
    assert [r.message for r in caplog.records if "temprature" in r.message] == [
        "ChatRequest: field 'temprature' is not read"
    ]


def test_who_sends_requests_does_not_fill_the_log(caplog):
    from riftco.serve.http.models import Unread

    unread = Unread(4)
    for i in range(9):
        unread.tell("ChatRequest", ["seed2", f"x{i}\n{'y' * 99}"])
    told = [r.message for r in caplog.records]
    assert len(told) == 5 and "seed2" in told[0] and "not named" in told[-1]
    assert all(len(line) < 120 and "\n" not in line for line in told)


def test_learning_behind_a_served_conversation(client):
    served_turn = client.post("/v1/chat/completions", json={**CHAT, "temperature": 0}).json()
    losses = [client.post("/learn", json=LEARN).json()["learn"]["loss_before"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    again = client.post("/v1/chat/completions", json={**CHAT, "temperature": 0}).json()
    assert again["choices"] == served_turn["choices"], "a shadow serves nobody"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= again["usage"]["prompt_tokens"] - 1
    assert client.post("/adapters/live/promote").json()["version"] == 2
    (card,) = client.get("/adapters").json()["data"]
    assert (card["version"], card["step"], card["undoable"]) == (2, 3, 3)
    assert client.post("/learn/undo", json={"lora_id": "live", "n": 2}).json()["step"] == 1
    assert "the journal holds 1" in error(client.post("/learn/undo", json={"lora_id": "live", "n": 2}), 400)["message"]


def test_another_prompt_is_refused_with_its_position(client):
    client.post("/v1/chat/completions", json={**CHAT, "id_slot": 0})
    other = [{"role": "user", "content": "Where is the box?"}, REPLY[-1]]
    answer = client.post("/learn", json={**LEARN, "messages": other, "id_slot": 0})
    said = error(answer, 400)
    assert "slot 0 served another prompt: it differs at token" in said["message"] and said["code"] == "learn_refused"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "last,why",
    [
        ({"role": "user", "content": "x"}, "must be the assistant's"),
        ({"role": "assistant", "content": ""}, "is empty"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "with tool_calls"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, "with reasoning_content"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "with media"),
    ],
)
def test_what_cannot_be_learned(client, last, why):
    assert why in error(client.post("/learn", json={**LEARN, "messages": [*ASK, last]}), 400)["message"]


def test_a_learn_id_is_learned_once(client):
    client.post("/v1/chat/completions", json=CHAT)
    first = client.post("/learn", json={**LEARN, "id": "mine"}).json()
    assert client.post("/learn", json={**LEARN, "id": "mine"}).json() == first
    assert client.get("/adapters").json()["data"][0]["step"] == 1
    turn = {**CHAT, "learn": {"lora_id": "live", "lr": 1e-3, "reply": "On the hook.", "id": "mine"}}
    assert client.post("/v1/chat/completions", json=turn).json()["learn"] == first["learn"]
    assert client.get("/adapters").json()["data"][0]["step"] == 1


def test_what_learned_nothing_leaves_its_id_free(client):
    client.post("/v1/chat/completions", json=CHAT)
    dry = client.post("/learn", json={**LEARN, "id": "mine", "dry_run": True}).json()["learn"]
    assert client.get("/adapters").json()["data"][0]["step"] == 0
    assert error(client.post("/learn", json={**LEARN, "id": "mine", "lora_id": "x"}), 400)
    real = client.post("/learn", json={**LEARN, "id": "mine"}).json()["learn"]
    assert real["step"] == 1 and real["loss_before"] == dry["loss_before"]
    turn = {**CHAT, "learn": {"lora_id": "live", "lr": 1e-3, "dry_run": True}}
    assert "an option of POST /learn" in error(client.post("/v1/chat/completions", json=turn), 400)["message"]
    assert client.get("/adapters").json()["data"][0]["step"] == 1


def test_a_lesson_waits_for_the_duty_cycle(tokenizer, tmp_path, monkeypatch):
    made = service(tokenizer, tmp_path / "train")
    waits = []
    monkeypatch.setattr(made.scheduler.duty, "wait", lambda: waits.append(made.scheduler.totals.learned))
    with served(made) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/v1/chat/completions", json=CHAT)
        assert client.post("/learn", json=LEARN).status_code == 200
    assert waits == [0] and made.scheduler.totals.learned == 1, "before it learns"


def test_lessons_that_waited_together_go_on_one_by_one(tokenizer, tmp_path, monkeypatch):
    """Each leaves the time to others that the one before it owes; else all would go on at the end of the first wait."""
    made, began = service(tokenizer, tmp_path), []
    monkeypatch.setattr(made.scheduler.duty, "busy", lambda: True)
    made.scheduler.duty.fraction = 0.5

    def learn(*arguments, **options):
        began.append((made.scheduler.duty.debt, time.perf_counter()))
        time.sleep(0.1)
        made.scheduler.worked(0.1)
        return LearnOutcome(True)

    monkeypatch.setattr(made.scheduler, "learn", learn)
    made.scheduler.worked(0.3)
    options = LearnOptions(lora_id="live", lr=1e-3, reply_tokens=[5])
    threads = [threading.Thread(target=made.learn, args=(0, [5, 6], options, "")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [debt for debt, _ in began] == [0.0] * 4
    assert all(later - before >= 0.2 for (_, before), (_, later) in itertools.pairwise(began))


def test_slots_and_prefixes(client):
    client.post("/v1/chat/completions", json={**CHAT, "id_slot": 1})
    slot = client.get("/slots").json()[1]
    body = {"lora_id": "live", "lr": 1e-3, "id_slot": 1, "n_prefix": slot["n_tokens"], "reply": "Yes."}
    assert client.post("/learn", json=body).json()["learn"]["success"]
    too_far = {**body, "n_prefix": slot["n_tokens"] + 1}
    assert f"holds {slot['n_tokens']} rows" in error(client.post("/learn", json=too_far), 400)["message"]
    assert error(client.post("/learn", json={**body, "id_slot": 9}), 404)
    assert error(client.post("/learn", json={"lora_id": "live", "lr": 1e-3, "reply": "x"}), 400)


def test_without_a_folder_nothing_learns(tokenizer):
    with served(service(tokenizer)) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/props").json()["learns"] is False
        for path, body in (("/learn", LEARN), ("/learn/undo", {"lora_id": "live"}), ("/adapters/live/promote", {})):
            assert error(client.post(path, json=body), 404)["code"] == "learning_disabled"
        turn = {**CHAT, "learn": {"lora_id": "live", "lr": 1e-3}}
        assert error(client.post("/v1/chat/completions", json=turn), 404)["code"] == "learning_disabled"


def test_keys(tokenizer, tmp_path):
    made = service(tokenizer, tmp_path / "train")
    with served(made, keys=Keys("user", "root")) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/health").json() == {"status": "ok"}
        for path in ("/props", "/slots", "/metrics", "/docs", "/openapi.json", "/v1/models"):
            assert error(client.get(path), 401)["type"] == "authentication_error", path
        for headers in ({"Authorization": "Bearer user"}, {"X-Api-Key": "user"}):
            assert client.get("/props", headers=headers).status_code == 200
            assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
            assert error(client.post("/learn", json=LEARN, headers=headers), 403)["type"] == "permission_error"
            turn = {**CHAT, "learn": {"lora_id": "live", "lr": 1e-3}}
            assert error(client.post("/v1/chat/completions", json=turn, headers=headers), 403)
        root = {"X-Api-Key": "root"}
        assert client.post("/learn", json=LEARN, headers=root).json()["learn"]["success"]
        assert made.engine.store.audit.lines()[-1]["caller"] not in ("", "root")
    for host, keys, insecure, refused in (
        ("0.0.0.0", Keys(), False, True), ("0.0.0.0", Keys("k"), False, False), ("0.0.0.0", Keys(), True, False),
        ("127.0.0.1", Keys(), False, False), ("::", Keys(), False, True),
    ):  # fmt: skip
        if refused:
            with pytest.raises(ValueError, match="lets other machines in"):
                check_bind(host, keys, insecure)
        else:
            check_bind(host, keys, insecure)


def test_caps(tokenizer, tmp_path):
    made = service(tokenizer, tmp_path / "train", limits=Limits(reply_tokens=3, learns_per_minute=2))
    with served(made, largest=2000) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/v1/chat/completions", json=CHAT)
        long = [*ASK, {"role": "assistant", "content": "one two three four five"}]
        assert "at most 3 tokens" in error(client.post("/learn", json={**LEARN, "messages": long}), 400)["message"]
        short = [*ASK, {"role": "assistant", "content": "Yes"}]
        assert client.post("/learn", json={**LEARN, "messages": short}).status_code == 200
        answer = client.post("/learn", json={**LEARN, "messages": short})
        assert error(answer, 429)["type"] == "rate_limit_error" and "x-should-retry" not in answer.headers
        assert error(client.post("/tokenize", json={"content": "x" * 3000}), 413)


def test_files_outside_of_the_folder_are_refused(client):
    for path in ("../x", "..", "/etc/passwd", "a/b", "", ".hidden", "x" * 200):
        assert (
            "a name has letters" in error(client.post("/adapters/load", json={"id": "b", "path": path}), 400)["message"]
        )
    assert error(client.post("/adapters/load", json={"id": "b", "path": "absent"}), 404)


def test_a_client_that_goes_away_frees_its_slot(client, tokenizer):
    with client.stream("POST", "/v1/chat/completions", json={**CHAT, "max_tokens": 100, "stream": True}) as answer:
        next(answer.iter_lines())
    for _ in range(200):
        if all(s["state"] == "idle" for s in client.get("/slots").json()):
            break
    assert all(s["state"] == "idle" for s in client.get("/slots").json())


def test_small_routes(client, tokenizer):
    ids = client.post("/tokenize", json={"content": "The key."}).json()["tokens"]
    assert ids == tokenizer.encode("The key.")
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "The key."
    assert error(client.post("/detokenize", json={"tokens": [10**9]}), 400)
    template = client.post("/apply-template", json={"messages": ASK}).json()
    assert "Where is the key?" in template["prompt"] and template["tokens"] == tokenizer.encode(template["prompt"])
    client.post("/v1/chat/completions", json=CHAT)
    text = client.get("/metrics").text
    assert "riftco_tokens_predicted_total 2.0" in text and 'riftco_adapter_version{adapter="live"} 1.0' in text
    assert client.get("/v1/models").json()["data"][0]["adapters"][0]["version"] == 1


def test_text_that_may_begin_a_stop_string_is_held_back():
    stops = Stops(["STOP", "END"])
    assert [stops.add(t) for t in ("a S", "T", "x E", "N", "Dz", "more")][:5] == ["a ", "", "STx ", "", ""]
    assert stops.found == "END"


def test_a_client_that_hangs_up_ends_its_turn(tokenizer):
    """A plain answer that nobody waits for any more is not made to its end, and a stream's neither."""
    made = service(tokenizer)
    slow_down(made)
    with served(made) as url, httpx.Client(base_url=url) as client:
        for path, body in (
            ("/v1/chat/completions", CHAT), ("/v1/messages", CHAT), ("/v1/completions", {"prompt": "The key"}),
            ("/v1/responses", {"input": "The key"}), ("/completion", {"prompt": "The key"}),
        ):  # fmt: skip
            long = {**body, "max_tokens": 100, "max_output_tokens": 100, "n_predict": 100, "temperature": 0}
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=long, timeout=0.2)
            idle(made)
            with client.stream("POST", path, json={**long, "stream": True}, timeout=60):
                pass
            idle(made)
        assert made.scheduler.totals.predicted < 10 * 60, "none came near its 100 tokens"


def test_a_client_that_hangs_up_while_it_waits_is_not_served(tokenizer):
    """For a slot that another has; and while its prompt is read into tokens, or its grammar compiled."""
    made = service(tokenizer, slots=1)
    slow_down(made)
    long = {**CHAT, "max_tokens": 100}
    with served(made) as url, httpx.Client(base_url=url) as client:
        with client.stream("POST", "/v1/chat/completions", json={**long, "stream": True}, timeout=60) as other:
            next(other.iter_lines())
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=long, timeout=0.2)
            waited(lambda: not made.scheduler.waiting)
            assert made.scheduler.turns and made.requests == 2
        idle(made)
        prompt_of = made.prompt_of
        made.prompt_of = lambda *a: time.sleep(0.5) or prompt_of(*a)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=long, timeout=0.1)
        waited(lambda: made.requests == 3)
        idle(made)
        assert made.scheduler.totals.predicted < 60, "none came near its 100 tokens"


def waited(until):
    for _ in range(400):
        if until():
            return
        time.sleep(0.01)
    raise AssertionError(until)


def idle(made):
    for _ in range(400):
        if not made.scheduler.turns and not made.scheduler.waiting:
            return
        time.sleep(0.01)
    raise AssertionError(made.scheduler.turns)


def slow_down(made):
    """A turn lasts longer than its client waits."""
    step = type(made.scheduler).step

    def slowly():
        time.sleep(0.02)
        return step(made.scheduler)

    made.scheduler.step = slowly


def test_half_characters_have_their_own_bytes(client, tokenizer):
    ids = tokenizer.encode("😀")
    assert len(ids) > 1 and b"".join(map(tokenizer.bytes_of, ids)) == "😀".encode()
    answer = client.post("/v1/chat/completions", json={
        "messages": ASK, "max_tokens": 1, "logprobs": True, "top_logprobs": 1, "logit_bias": {ids[0]: 100},
    }).json()  # fmt: skip
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert bytes(entry["bytes"]) == tokenizer.bytes_of(ids[0]) != "\ufffd".encode()
    (top,) = entry["top_logprobs"]
    assert top["token"] == bytes(top["bytes"]).decode(errors="replace")


def test_what_is_learned_is_no_part_of_the_replys_time(tokenizer, monkeypatch):
    """`timings` is of the tokens; how long the learn took stands in its outcome."""
    clock = [1.0]
    monkeypatch.setattr("riftco.serve.http.generation.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    one, two = tokenizer.encode("ab cd")[:2]
    ticket = Ticket(Request([1, 2], max_new_tokens=2))
    coming = iter([(3.0, Chosen(one)), (4.5, Chosen(two)), (60.0, Finished("length", 0, 0, 2, LearnOutcome(True)))])

    def step():
        clock[0], event = next(coming)
        ticket.put(event)

    async def read():
        parts = generation(ticket, tokenizer, [])
        asyncio.get_running_loop().call_soon(step)
        said = []
        async for part in parts:
            said.append(part)
            if not isinstance(part, End):
                step()
        return said[-1]

    end = asyncio.run(read())
    assert end.tokens == 2 and end.learn is not None
    assert (end.seconds_prompt, end.seconds_text) == (2.0, 1.5)
