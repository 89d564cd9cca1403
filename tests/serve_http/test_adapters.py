"""Which adapters serve, what they learned, and the way back."""

import copy

import httpx
import pytest
import torch
from server import refused, served, service

from riftco.serve.http.errors import ApiError

ASK = [{"role": "user", "content": "Where is the key?"}]
CHAT = {"messages": ASK, "max_tokens": 4, "temperature": 0}
LEARN = {"lora_id": "live", "lr": 1e-2, "reply": "On the hook."}


@pytest.fixture
def made(tokenizer, tmp_path):
    return service(tokenizer, tmp_path)


def test_scales_of_who_names_none(client, made):
    (one,) = client.get("/lora-adapters").json()
    assert (one["id"], one["path"], one["scale"]) == ("live", "adapters/live/versions/1", 0.0)
    base = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
    for _ in range(3):
        client.post("/v1/chat/completions", json={**CHAT, "learn": LEARN})
    client.post("/adapters/live/promote")
    named = client.post("/v1/chat/completions", json={**CHAT, "lora": [{"id": "live"}]}).json()
    learned = named["choices"][0]["message"]["content"]
    assert learned != base
    assert client.post("/lora-adapters", json=[{"id": "live", "scale": 1.0}]).json() == {"success": True}
    assert client.get("/lora-adapters").json()[0]["scale"] == 1.0
    now = client.post("/v1/chat/completions", json=CHAT).json()
    assert now["choices"][0]["message"]["content"] == learned
    none = client.post("/v1/chat/completions", json={**CHAT, "lora": []}).json()
    assert none["choices"][0]["message"]["content"] == base, "a request that names its own is given those"
    refused(client.post("/lora-adapters", json=[{"id": "x"}]), 400, "no adapter 'x'")
    refused(client.post("/lora-adapters", json={"id": "live"}), 400, "list")
    assert client.get("/lora-adapters").json()[0]["scale"] == 1.0
    assert client.post("/lora-adapters", json=[]).status_code == 200
    again = client.post("/v1/chat/completions", json=CHAT).json()
    assert again["choices"][0]["message"]["content"] == base


def test_rollback_serves_earlier_weights_again(client, made, tokenizer, tmp_path):
    for _ in range(2):
        client.post("/v1/chat/completions", json={**CHAT, "learn": LEARN})
        client.post("/adapters/live/promote")
    adapter, pupil = made.engine.bank.of("live"), made.engine.learner.pupils["live"]
    before = pupil.moment()
    assert adapter.version == 3
    back = client.post("/adapters/live/rollback", json={"version": 2}).json()
    assert back == {"lora_id": "live", "version": 4, "digest": adapter.digests[1]}
    for name, p in pupil.shadow.items():
        assert torch.equal(p, adapter.versions[1][name]), "learning goes on from there"
    assert not pupil.moment().tensors, "with moments at rest"
    refused(client.post("/adapters/live/rollback", json={"version": 9}), 400, "no version 9; newest: 4")
    refused(client.post("/adapters/live/promote"), 400, "has learned nothing since version 4")
    client.post("/v1/chat/completions", json={**CHAT, "learn": LEARN})
    assert client.post("/adapters/live/rollback", json={"version": 4}).json()["version"] == 4, "the shadow alone"
    steps = len(pupil.journal)
    made.engine.store.close()
    again = service(tokenizer, tmp_path).engine
    assert again.bank.of("live").digests == adapter.digests
    assert len(again.learner.pupils["live"].journal) == steps == 5
    again.undo("live", 3)
    after = again.learner.pupils["live"].moment()
    assert after.step == before.step == 2
    assert all(torch.equal(after.shadow[n], t) for n, t in before.shadow.items())
    assert all(torch.equal(after.tensors[n], t) for n, t in before.tensors.items())


def test_a_rollback_that_is_not_recorded_is_taken_back(made, monkeypatch):
    engine = made.engine
    engine.study([(torch.tensor([1, 2]), torch.tensor([2, 3]), None)], adapter="live", lr=1e-2)
    engine.promote("live")
    shadow, depth = engine.learner.pupils["live"].moment(), len(engine.learner.pupils["live"].journal)
    monkeypatch.setattr(engine.store, "record", lambda *a: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        engine.rollback("live", 1)
    pupil = engine.learner.pupils["live"]
    assert engine.bank.of("live").version == 2 and len(pupil.journal) == depth
    assert all(torch.equal(p, shadow.shadow[n]) for n, p in pupil.shadow.items())


def test_the_log_tells_what_was_learned(client, made):
    client.post("/v1/chat/completions", json={**CHAT, "learn": {**LEARN, "id": "mine"}})
    client.post("/learn/undo", json={"lora_id": "live"})
    lines = client.get("/learn/log").json()["data"]
    assert [line["kind"] for line in lines] == ["create", "learn", "undo"] and lines[1]["learn_id"] == "mine"
    assert client.get("/learn/log?limit=1").json()["data"] == lines[-1:]
    refused(client.get("/learn/log?limit=0"), 400, "limit")
    assert "tokens_sha256" in made.engine.store.audit.lines()[1]
    assert client.delete("/learn/log/mine").json() == {"learn_id": "mine", "lines": 1}
    assert "tokens_sha256" not in made.engine.store.audit.lines()[1]
    refused(client.delete("/learn/log/mine"), 400, "no learn 'mine'")
    audit = made.engine.store.audit
    for i in range(3000):
        audit._pending.append({"adapter": "live", "event": 100 + i})
    audit.append({"adapter": "live", "event": 5000})
    assert [line["event"] for line in audit.newest(1500)] == [*range(1601, 3100), 5000]


def test_small_routes_in_llama_cpps_shape(client, made):
    props = client.get("/props").json()
    assert props["total_slots"] == 2 and props["default_generation_settings"]["n_ctx"] == made.engine.window
    assert "assistant" in props["chat_template"] and props["eos_token"] and props["totals"]["tokens_predicted"] == 0
    client.post("/v1/chat/completions", json=CHAT)
    assert client.get("/props").json()["totals"]["tokens_predicted"] == 4
    pieces = client.post("/tokenize", json={"content": "key \U0001f511", "with_pieces": True}).json()["tokens"]
    assert pieces[0]["piece"] == "key"
    raw = b"".join(bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces)
    assert raw.decode() == "key \U0001f511", "bytes where a token is no whole character"


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_conversation_on_a_thinking_template_learns(tokenizer, tmp_path, thinking):
    """Serving and learning make the prompt by one function, with the request's own options of the template."""
    thinks = copy.copy(tokenizer)
    thinks.hf = copy.deepcopy(tokenizer.hf)
    thinks.hf.chat_template = THINKS
    made = service(thinks, tmp_path)
    options = {"chat_template_kwargs": {"enable_thinking": thinking}}
    answered = [*ASK, {"role": "assistant", "content": "On the hook."}]
    with served(made) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/v1/chat/completions", json={**CHAT, **options, "id_slot": 0})
        lesson = {"lora_id": "live", "lr": 1e-3, "messages": answered, "id_slot": 0}
        assert client.post("/learn", json={**lesson, **options}).json()["learn"]["success"]
        if thinking:  # the other way round, the slot holds that prompt too: it is the beginning of what was served
            other = {"chat_template_kwargs": {"enable_thinking": False}}
            refused(client.post("/learn", json={**lesson, **other}), 400, "it differs at token")


def test_the_servers_template_options_are_those_of_who_gives_none(tokenizer, tmp_path):
    """Served and learned alike; a request's own options come first; what is no option of a template is refused."""
    thinks = copy.copy(tokenizer)
    thinks.hf = copy.deepcopy(tokenizer.hf)
    thinks.hf.chat_template = THINKS
    made = service(thinks, tmp_path, template={"enable_thinking": False})
    off, on = (made.prompt_of(ASK, {"enable_thinking": t}) for t in (False, True))
    assert made.prompt_of(ASK, {}) == off != on == off[: len(on)]
    answered = [*ASK, {"role": "assistant", "content": "On the hook."}]
    with served(made) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/v1/chat/completions", json={**CHAT, "id_slot": 0})
        assert made.engine.slots[0].tokens[: len(off)] == off
        lesson = {"lora_id": "live", "lr": 1e-3, "messages": answered, "id_slot": 0}
        assert client.post("/learn", json=lesson).json()["learn"]["success"]
    with pytest.raises(ValueError, match="chat_template_kwargs: tokenize is no option of a template"):
        service(thinks, template={"tokenize": False})
    for name in ("go_on", "messages"):
        with pytest.raises(ApiError, match=f"{name} is no option of a template"):
            made.prompt_of(ASK, {name: 1})


def test_a_request_learns_at_its_own_rate(client, made):
    """Adam's first step is its rate wherever there is a gradient, so the largest change tells which rate it was."""
    for lora, lr, route in (("live", 3e-3, "a turn"), ("other", 7e-3, "/learn")):
        if lora == "other":
            made.engine.create("other", made.engine.bank.of("live").spec, seed=1)
        before = {name: p.detach().clone() for name, p in made.engine.bank.shadow(lora).items()}
        if route == "a turn":
            answer = client.post("/v1/chat/completions", json={**CHAT, "learn": {**LEARN, "lora_id": lora, "lr": lr}})
        else:
            messages = [*ASK, {"role": "assistant", "content": "On the hook."}]
            answer = client.post("/learn", json={"lora_id": lora, "lr": lr, "messages": messages})
        assert answer.json()["learn"]["success"]
        moved = max(float((p.detach() - before[n]).abs().max()) for n, p in made.engine.bank.shadow(lora).items())
        assert moved == pytest.approx(lr, rel=1e-2)
        assert made.engine.store.audit.newest(1)[0]["lr"] == lr
