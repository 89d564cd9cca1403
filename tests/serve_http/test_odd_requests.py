"""What is wrong on purpose: paths that lead elsewhere, keys that do not suffice, values that nobody means."""

import functools
import itertools
import json

import httpx
import pytest
from server import KEY, check_shape, templated

from riftco.models import ModelError


def test_every_operation_asks_for_a_key(guarded):
    """All that the OpenAPI document names, and the document itself."""
    paths = httpx.get(f"{guarded}/openapi.json", headers=KEY).json()["paths"]
    assert httpx.get(f"{guarded}/openapi.json").status_code == 401 and len(paths) > 25
    for path, methods in paths.items():
        for method in methods:
            answer = httpx.request(method, guarded + path.replace("{id}", "0"), headers={"x-api-key": "wrong"})
            assert answer.status_code == (200 if path == "/health" else 401), path
            if answer.status_code == 401:
                check_shape(answer, path)


ADMINS = ["/learn", "/learn/undo", "/adapters/live/promote", "/adapters/live/rollback", "/adapters/load", "/train",
          "/train/x/cancel", "/lora-adapters", "/slots/0?action=erase", "/slots/0?action=save"]  # fmt: skip
BODIES = {
    "/learn": {"lora_id": "live", "lr": 1e-3, "messages": [{"role": "assistant", "content": "x"}]},
    "/learn/undo": {"lora_id": "live"}, "/adapters/live/rollback": {"version": 1},
    "/adapters/load": {"id": "a", "path": "a"}, "/train": {"lora_id": "live", "lr": 1e-3, "records": [{"text": "x"}]},
    "/lora-adapters": [], "/slots/0?action=save": {"filename": "x"},
}  # fmt: skip


@pytest.mark.parametrize("path", ADMINS)
def test_what_changes_something_asks_for_the_admins_key(guarded, path):
    answer = httpx.post(guarded + path, json=BODIES.get(path), headers={"x-api-key": "user"})
    assert answer.status_code == 403, answer.text
    check_shape(answer, path)


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
def test_paths_lead_nowhere(guarded, place):
    for path in (f"/ui/{place}", f"/slots/{place}", f"/adapters/{place}/promote", f"/train/{place}", f"/{place}"):
        for method in ("GET", "POST"):
            answer = httpx.request(method, guarded + path, headers=KEY)
            assert answer.status_code in (400, 404, 405), (path, answer.status_code)
            check_shape(answer, path)
            assert "root:" not in answer.text
    for path, body in (
        ("/slots/0?action=save", {"filename": place}), ("/slots/0?action=restore", {"filename": place}),
        ("/adapters/load", {"id": "a", "path": place}), ("/adapters/load", {"id": place, "path": "a"}),
        ("/train", {"lora_id": "live", "lr": 1e-3, "file": place}),
    ):  # fmt: skip
        answer = httpx.post(guarded + path, json=body, headers=KEY)
        assert answer.status_code in (400, 404), (path, answer.text)
        check_shape(answer, path)


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
    check_shape(client.post(path, content=raw, headers={"content-type": "application/json"}), path)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/apply-template", "/learn"])
def test_odd_contents_of_messages(guarded, path):
    with httpx.Client(base_url=guarded, headers=KEY, timeout=60) as client:
        for name in ("model", "content", "chat_template_kwargs", "lora", "tools"):
            for odd in (
                "\ud800",
                [{}],
                {"messages": 1},
                {"add_generation_prompt": False},
                {"chat_template": "x"},
                {"go_on": 1},
            ):
                send_odd(client, path, {**ASKS[path], name: odd})
        at = "input" if path == "/v1/responses" else "messages"
        for odd in ODD if at in ASKS[path] else ():
            send_odd(client, path, {**ASKS[path], at: [{"role": "user", "content": odd}]})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/apply-template", "/learn"])
def test_what_is_nested_deeply_is_refused(guarded, path):
    """JSON's reader takes nearly as much as Python's stack, and what reads messages needs more of it for each level."""
    at = "input" if path == "/v1/responses" else "messages"
    for depth in (100, 400, 700, 950, 100_000):
        nest = '{"a":' * depth + "1" + "}" * depth
        body = json.dumps({**ASKS[path], at: [{"role": "user", "content": "x", "z": "NEST"}]})
        raw = body.replace('"NEST"', nest)
        answer = httpx.post(guarded + path, content=raw[: 1 << 16], headers={**KEY, "content-type": "application/json"})
        check_shape(answer, path)


def test_a_template_that_is_given_what_is_nested_too_deeply(tokenizer):
    """Its own recursion is a refusal, which readers of training data leave out, too."""
    deep = functools.reduce(lambda made, _: [made], range(2000), 0)
    shows = templated(tokenizer, "{% for m in messages %}{{ m.content }}{{ tools | tojson }}{% endfor %}")
    with pytest.raises(ModelError, match="nested too deeply"):
        shows.render_chat([{"role": "user", "content": "x"}], tools=[{"a": deep}])


def test_half_characters_inside_of_options(guarded):
    """What an answer may repeat is text, at whatever depth it stands."""
    with httpx.Client(base_url=guarded, headers=KEY, timeout=60) as client:
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions", "/completion"):
            for name in ("lora_id", "reply", "id"):
                options = {"lora_id": "live", "lr": 1e-3, "reply": "x", name: "\ud800"}
                send_odd(client, path, {**ASKS[path], "learn": options})
            send_odd(client, path, {**ASKS[path], "lora": [{"id": "\ud800"}]})
        for name in ("lora_id", "reply", "id"):
            send_odd(client, "/learn", {**ASKS["/learn"], name: "\ud800"})
        send_odd(client, "/lora-adapters", [{"id": "\ud800"}])
        send_odd(client, "/v1/completions", {"prompt": ["a", "\ud800"]})
        send_odd(client, "/v1/embeddings", {"input": ["a", "\ud800"]})


@pytest.mark.slow
@pytest.mark.parametrize("path", ASKS)
def test_odd_values_in_every_field(guarded, path):
    with httpx.Client(base_url=guarded, headers=KEY, timeout=60) as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"].values()
        fields = {name for schema in schemas for name in schema.get("properties", {})}
        for name in sorted(fields - {"max_tokens", "n_predict", "max_output_tokens", "stream"}):
            for odd in ODD:
                send_odd(client, path, {**ASKS[path], name: odd})
        at = "input" if path == "/v1/responses" else "messages"
        for odd, role in itertools.product(ODD if at in ASKS[path] else (), ["system", "assistant", "tool", 5, None]):
            first = {"role": "user", "content": "x"}
            send_odd(client, path, {**ASKS[path], at: [first, {"role": role, "content": odd}]})
