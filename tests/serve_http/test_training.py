"""/train: a file learned in the background, beside what is served."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import gguf
import httpx
import pytest
import torch
from server import refused, served, service

from riftco.data import parse_record, render
from riftco.functional import GGUFWeight
from riftco.nn import GGUFLinear, NF4Linear

CHAT = {"messages": [{"role": "user", "content": "Where is the key?"}], "max_tokens": 2}
ROWS = [
    {"messages": [{"role": "user", "content": f"Where is box {i}?"}, {"role": "assistant", "content": "In the hall."}]}
    for i in range(3)
] + [{"text": "The key hangs on the hook."}]
JOB = {"lora_id": "live", "lr": 5e-3}


@pytest.fixture
def made(tokenizer, tmp_path):
    return service(tokenizer, tmp_path)


def ended(client, id):
    for _ in range(600):
        job = client.get(f"/train/{id}").json()
        if job["status"] not in ("queued", "running"):
            return job
        time.sleep(0.05)
    raise AssertionError(f"the job has not ended: {job}")


def test_a_file_is_learned(client, made, tmp_path):
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "chats.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    asked = client.post("/train", json={**JOB, "file": "chats.jsonl", "epochs": 4, "batch_size": 2})
    assert asked.status_code == 202 and asked.json()["steps"] == 8 and asked.json()["object"] == "train.job"
    job = ended(client, asked.json()["id"])
    assert job["status"] == "done" and job["step"] == 8 and len(job["losses"]) == 8
    assert sum(job["losses"][-2:]) < sum(job["losses"][:2])
    assert made.engine.learner.pupils["live"].step == 8 and made.scheduler.totals.learned == 8
    lines = client.get("/learn/log").json()["data"]
    assert [line["kind"] for line in lines] == ["create"] + 8 * ["learn"] and {line["job"] for line in lines[1:]} == {
        job["id"]
    }
    assert [line["loss_before"] for line in lines[1:]] == job["losses"] and "tokens_sha256" not in lines[1]
    assert client.get("/train").json()["data"][0]["id"] == job["id"]
    assert client.delete(f"/learn/log/{job['id']}").json()["lines"] == 8
    assert not any("tokens_sha256" in line for line in made.engine.store.audit.lines())


def test_it_is_the_step_that_a_trainer_takes(client, made):
    """The loss of a whole text is the model's own under the shadow."""
    job = ended(client, client.post("/train", json={**JOB, "records": ROWS[-1:]}).json()["id"])
    ids = torch.tensor([render(parse_record(ROWS[-1]), made.tokenizer).ids])
    with torch.no_grad():
        expected = float(made.engine.model.loss(ids[:, :-1], ids[:, 1:]))
    assert job["losses"] == pytest.approx([expected], rel=1e-5)


def test_serving_goes_on_and_a_job_is_cancelled(client, made):
    asked = client.post("/train", json={**JOB, "records": ROWS, "epochs": 1000}).json()
    second = client.post("/train", json={**JOB, "records": ROWS}).json()
    assert second["status"] == "queued"
    turns = [client.post("/v1/chat/completions", json=CHAT) for _ in range(10)]
    assert all(turn.status_code == 200 for turn in turns)
    assert client.post(f"/train/{second['id']}/cancel").json()["status"] == "cancelled"
    cancelled = client.post(f"/train/{asked['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" and cancelled["step"] < cancelled["steps"] == 4000
    with made.scheduler.lock:
        step = made.engine.learner.pupils["live"].step
    time.sleep(0.1)
    assert made.engine.learner.pupils["live"].step == step > 0, "what was learned stays, and nothing follows"
    assert ended(client, client.post("/train", json={**JOB, "records": ROWS}).json()["id"])["status"] == "done"


def test_a_long_step_holds_up_no_other_route(client, made):
    """Who asks while the engine learns is queued, and the rest of the server answers meanwhile."""
    with ThreadPoolExecutor() as pool:
        with made.scheduler.lock:  # a step that takes long
            turn = pool.submit(client.post, "/v1/chat/completions", json={**CHAT, "lora": [{"id": "live"}]})
            while not made.scheduler.waiting:
                time.sleep(0.01)
            for path in ("/health", "/props", "/slots", "/metrics", "/train", "/learn/log", "/"):
                assert client.get(path, timeout=10).status_code == 200
            assert not turn.done()
        assert turn.result().status_code == 200


def test_a_tenth_of_the_time_while_someone_is_served(client, made):
    job = client.post("/train", json={**JOB, "records": ROWS, "epochs": 1000}).json()
    for _ in range(3):  # the first turns warm up
        client.post("/v1/chat/completions", json=CHAT)
    began, before = time.perf_counter(), made.scheduler.totals.learn_seconds
    with client.stream(
        "POST", "/completion", json={"prompt": "a", "n_predict": 150, "stream": True, "ignore_eos": True}
    ) as s:
        pieces = sum(1 for _ in s.iter_lines())
    took, learned = time.perf_counter() - began, made.scheduler.totals.learn_seconds - before
    client.post(f"/train/{job['id']}/cancel")
    assert pieces > 20 and learned < 0.35 * took, "a tenth, and the step that was under way when the turn began"


def test_what_cannot_be_trained(client, made, tmp_path):
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "bad.jsonl").write_text('{"text": "x"}\n{"messages": []}\n')
    (tmp_path / "incoming" / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "incoming" / "empty").write_bytes(b"")
    (tmp_path / "incoming" / "link").symlink_to("/etc/passwd")
    before = made.engine.bank.promotable("live")
    for body, status, why in (
        ({"file": "bad.jsonl"}, 400, "bad.jsonl:"),
        ({"file": "binary"}, 400, "not UTF-8"),
        ({"file": "empty"}, 400, "no examples"),
        ({"file": "absent"}, 404, "no file 'absent'"),
        ({"file": "link"}, 400, "cannot be read"),
        ({"file": "../audit.jsonl"}, 400, "a name has letters"),
        ({"records": [{"text": "word " * 500}]}, 400, "more than the 160 allowed"),
        ({"records": ROWS, "file": "x"}, 400, "one of them"),
        ({}, 400, "one of them"),
        ({"records": []}, 400, "records"),
        ({"records": ROWS, "epochs": 0}, 400, "epochs"),
        ({"records": ROWS, "lr": 5.0}, 400, "lr must be between"),
        ({"records": ROWS, "lora_id": "x"}, 400, "no adapter 'x'"),
    ):
        refused(client.post("/train", json={**JOB, **body}), status, why)
    refused(client.get("/train/none"), 404, "no job")
    refused(client.post("/train/none/cancel"), 404, "no job")
    assert made.engine.bank.promotable("live") == before and client.get("/train").json()["data"] == []


def test_a_job_that_fails_says_why(client, made, monkeypatch):
    monkeypatch.setattr(made.engine.store, "_write", lambda *a: (_ for _ in ()).throw(OSError("no space")))
    job = ended(client, client.post("/train", json={**JOB, "records": ROWS}).json()["id"])
    assert job["status"] == "failed" and "no space" in job["reason"] and job["step"] == 0
    assert made.engine.learner.pupils["live"].step == 0, "the step was taken back"


def test_jobs_end_with_the_server(tokenizer, tmp_path):
    made = service(tokenizer, tmp_path)
    with served(made, train_dir=tmp_path) as url:
        job = httpx.post(f"{url}/train", json={**JOB, "records": ROWS, "epochs": 1000}).json()
    assert job["status"] in ("queued", "running")
    made.engine.store.close()
    step = made.engine.learner.pupils["live"].step
    again = service(tokenizer, tmp_path)
    assert again.engine.learner.pupils["live"].step == step, "every step that was made is on disk"


def test_without_a_folder_there_is_no_training(tokenizer):
    with served(service(tokenizer)) as url:
        refused(httpx.post(f"{url}/train", json={**JOB, "records": ROWS}), 404, "does not learn")
        refused(httpx.get(f"{url}/train"), 404, "does not learn")


def in_blocks(layer):
    packed = torch.from_numpy(gguf.quants.quantize(layer.weight.detach().numpy(), gguf.GGMLQuantizationType.Q8_0))
    return GGUFLinear.from_weight(GGUFWeight(packed, "Q8_0", tuple(layer.weight.shape)))


@pytest.mark.parametrize("frozen", [NF4Linear.from_linear, in_blocks], ids=["nf4", "gguf"])
def test_every_frozen_format_learns_by_both_routes(tokenizer, tmp_path, frozen):
    """No weight that serves is opaque to a learn: layers in blocks have gradients for what goes into them."""
    made = service(tokenizer, tmp_path, frozen=frozen)
    with served(made) as url, httpx.Client(base_url=url, timeout=60) as client:
        carried = {"learn": {"lora_id": "live", "lr": 1e-3, "reply": "On the hook."}}
        outcomes = [client.post("/v1/chat/completions", json={**CHAT, **carried}).json()["learn"] for _ in range(3)]
        job = ended(client, client.post("/train", json={**JOB, "records": ROWS[:1], "epochs": 3}).json()["id"])
    assert all(outcome["success"] and outcome["gradient_norm"] > 0 for outcome in outcomes)
    assert job["status"] == "done" and job["losses"][-1] < job["losses"][0]
