"""Requests made from the OpenAPI document, and what is wrong with them on purpose: refused in shape, never a 500."""

import itertools
import json

import httpx
import pytest
from server import served, service

from riftco.serve.http.auth import Keys
from riftco.serve.saved_slots import SlotFiles

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

KEY = {"x-api-key": "root"}


@pytest.fixture(scope="module")
def url(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    made = service(tokenizer, folder)
    files = SlotFiles(folder / "slots", "digest")
    with served(made, keys=Keys("user", "root"), train_dir=folder, slot_files=files, largest=1 << 16) as address:
        yield address


@pytest.fixture(scope="module")
def schema(url):
    return schemathesis.openapi.from_url(f"{url}/openapi.json", headers=KEY)


def check(answer, path):
    """An answer, or a refusal in the dialect's shape."""
    assert answer.status_code < 500 or answer.status_code in (501, 503), (path, answer.status_code, answer.text[:500])
    if answer.status_code < 400:
        return
    said = answer.json()
    error = said["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str), said
    if path.startswith("/v1/messages"):
        assert said["type"] == "error"
    else:
        assert isinstance(error["code"], str) and "param" in error
    assert answer.headers.get("x-should-retry") in ("false", ["false"]) or answer.status_code in (429, 503)


def sample(schema, url, examples):
    """Examples of each operation, valid ones and such that the document rules out."""
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=examples, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes)))
        def send(case):
            check(case.call(base_url=url, headers=KEY, timeout=60), case.operation.path)

        send()


def test_a_sample_of_every_operation(schema, url):
    sample(schema, url, 4)
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_many_of_every_operation(schema, url):
    sample(schema, url, 150)
    assert httpx.get(f"{url}/health").status_code == 200


def test_every_operation_asks_for_a_key(schema, url):
    open_to_all = {"/health"}
    for result in schema.get_all_operations():
        operation = result.ok()
        path = operation.path.replace("{id}", "0")
        answer = httpx.request(operation.method, url + path, headers={"x-api-key": "wrong"})
        assert answer.status_code == (200 if path in open_to_all else 401), path
        if answer.status_code == 401:
            check(answer, path)


ADMINS = ["/learn", "/learn/undo", "/adapters/live/promote", "/adapters/live/rollback", "/adapters/load", "/train",
          "/train/x/cancel", "/lora-adapters", "/slots/0?action=erase", "/slots/0?action=save"]  # fmt: skip
BODIES = {
    "/learn": {"lora_id": "live", "lr": 1e-3, "messages": [{"role": "assistant", "content": "x"}]},
    "/learn/undo": {"lora_id": "live"}, "/adapters/live/rollback": {"version": 1},
    "/adapters/load": {"id": "a", "path": "a"}, "/train": {"lora_id": "live", "lr": 1e-3, "records": [{"text": "x"}]},
    "/lora-adapters": [], "/slots/0?action=save": {"filename": "x"},
}  # fmt: skip


@pytest.mark.parametrize("path", ADMINS)
def test_what_changes_something_asks_for_the_admins_key(url, path):
    answer = httpx.post(url + path, json=BODIES.get(path), headers={"x-api-key": "user"})
    assert answer.status_code == 403, answer.text
    check(answer, path)


PLACES = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "....//etc/passwd",
    "%00",
    "~root",
    "a\\..\\b",
]


@pytest.mark.parametrize("place", PLACES)
def test_paths_lead_nowhere(url, place):
    for path in (f"/ui/{place}", f"/slots/{place}", f"/adapters/{place}/promote", f"/train/{place}", f"/{place}"):
        for method in ("GET", "POST"):
            answer = httpx.request(method, url + path, headers=KEY)
            assert answer.status_code in (400, 404, 405), (path, answer.status_code)
            check(answer, path)
            assert "root:" not in answer.text
    for path, body in (
        ("/slots/0?action=save", {"filename": place}), ("/slots/0?action=restore", {"filename": place}),
        ("/adapters/load", {"id": "a", "path": place}), ("/adapters/load", {"id": place, "path": "a"}),
        ("/train", {"lora_id": "live", "lr": 1e-3, "file": place}),
    ):  # fmt: skip
        answer = httpx.post(url + path, json=body, headers=KEY)
        assert answer.status_code in (400, 404), (path, answer.text)
        check(answer, path)


ASKS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/completion": {"prompt": "x", "n_predict": 1},
    "/apply-template": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"content": "x"},
    "/learn": {"lora_id": "live", "lr": 1e-3, "messages": [{"role": "assistant", "content": "x"}]},
    "/train": {"lora_id": "live", "lr": 1e-3, "records": [{"messages": []}]},
}
ODD = [None, 5, 1.5, True, "", [], {}, [None], [5], ["x"], [{}], [{"type": "text"}], [{"type": "text", "text": 5}],
       {"a": 1}, "\ud800", 10**30, -1, [[[]]], "\0", "<|im_end|>"]  # fmt: skip


def send_odd(client, path, body):
    raw = json.dumps(body).encode()
    check(client.post(path, content=raw, headers={"content-type": "application/json"}), path)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/apply-template", "/learn"])
def test_odd_contents_of_messages(url, path):
    with httpx.Client(base_url=url, headers=KEY, timeout=60) as client:
        for name in ("model", "content", "chat_template_kwargs", "lora", "tools"):
            for odd in ("\ud800", [{}], {"messages": 1}, {"add_generation_prompt": False}, {"chat_template": "x"}):
                send_odd(client, path, {**ASKS[path], name: odd})
        at = "input" if path == "/v1/responses" else "messages"
        for odd in ODD if at in ASKS[path] else ():
            send_odd(client, path, {**ASKS[path], at: [{"role": "user", "content": odd}]})


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKS)
def test_odd_values_in_every_field(url, path):
    with httpx.Client(base_url=url, headers=KEY, timeout=60) as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"].values()
        fields = {name for schema in schemas for name in schema.get("properties", {})}
        for name in sorted(fields - {"max_tokens", "n_predict", "max_output_tokens", "stream"}):
            for odd in ODD:
                send_odd(client, path, {**ASKS[path], name: odd})
        at = "input" if path == "/v1/responses" else "messages"
        for odd, role in itertools.product(ODD if at in ASKS[path] else (), ["system", "assistant", "tool", 5, None]):
            first = {"role": "user", "content": "x"}
            send_odd(client, path, {**ASKS[path], at: [first, {"role": role, "content": odd}]})
