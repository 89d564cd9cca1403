"""Replies that keep to a schema or a grammar: a random model's are valid all the same, and nobody else notices."""

import contextlib
import json
import sys
from typing import Literal

import anthropic
import httpx
import openai
import pytest
import torch
from pydantic import BaseModel, Field
from server import says, served, service, templated
from templates import HERMES, LLAMA, XML

from riftco.serve import Refused, Request, Sampling, Scheduler
from riftco.serve.grammar import Grammars, from_gbnf, schema

pytest.importorskip("llguidance", reason="riftco[structured] is not installed")
ASK = [{"role": "user", "content": "Where is the key?"}]


class Place(BaseModel):
    where: Literal["mat", "hook"]
    n: int = Field(ge=0, le=99)
    note: str = Field(max_length=4)


SCHEMA = {**Place.model_json_schema(), "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
LOOK = {"type": "object", "properties": {"where": {"enum": ["mat", "hook"]}, "n": {"$ref": "#/$defs/few"},
        "note": {"type": "string", "maxLength": 3}}, "required": ["where", "n"], "additionalProperties": False,
        "$defs": {"few": {"type": "integer", "minimum": 0, "maximum": 9}}}  # fmt: skip
FUNCTIONS = [{"name": "look", "parameters": LOOK}, {"name": "wait", "parameters": {"additionalProperties": False}}]
CHAT_TOOLS = [{"type": "function", "function": f} for f in FUNCTIONS]


@pytest.fixture(scope="module")
def made(tokenizer):
    return service(templated(tokenizer, HERMES), window=600, speculate=3)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_chat(gpt, temperature):
    ask = {"model": "m", "messages": ASK, "temperature": temperature, "seed": 5}
    for seed in range(2):
        choice = gpt.chat.completions.create(**{**ask, "seed": seed}, response_format=FORMAT).choices[0]
        Place.model_validate_json(choice.message.content)
        assert choice.finish_reason == "stop"
    chunks = gpt.chat.completions.create(**ask, response_format=FORMAT, stream=True)
    Place.model_validate_json("".join(c.choices[0].delta.content or "" for c in chunks))
    assert gpt.chat.completions.parse(**ask, response_format=Place).choices[0].message.parsed.n >= 0
    with gpt.chat.completions.stream(**ask, response_format=Place) as stream:
        assert stream.get_final_completion().choices[0].message.parsed.where in ("mat", "hook")


def test_any_json_object(gpt, made):
    """It begins as one; a random model does not come to its end."""
    ask = {"model": "m", "messages": ASK, "max_tokens": 30, "response_format": {"type": "json_object"}}
    answer = gpt.chat.completions.create(**ask)
    assert answer.choices[0].message.content.startswith("{")
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_responses(gpt):
    parsed = gpt.responses.parse(model="m", input="Where is the key?", text_format=Place)
    assert parsed.output_parsed.where in ("mat", "hook") and parsed.status == "completed"
    with gpt.responses.stream(model="m", input="Where is the key?", text_format=Place) as stream:
        assert stream.get_final_response().output_parsed.n >= 0


def test_messages(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = claude.messages.create(model="m", messages=ASK, max_tokens=300, output_config=config)
    Place.model_validate_json(answer.content[0].text)
    assert answer.stop_reason == "end_turn"


def test_native(url):
    answer = httpx.post(f"{url}/completion", json={"prompt": "x", "json_schema": SCHEMA}, timeout=60).json()
    Place.model_validate_json(answer["content"])
    gbnf = 'root ::= "yes" | "no, " [a-c]{2}'
    for seed in range(3):
        body = {"prompt": "x", "grammar": gbnf, "seed": seed, "temperature": 1.0}
        answer = httpx.post(f"{url}/completion", json=body, timeout=60).json()
        assert answer["content"] == "yes" or (len(answer["content"]) == 6 and answer["content"][:4] == "no, ")
        assert answer["stop_type"] == "eos"


TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # tokens that are shown, in Qwen's vocabularies


@pytest.mark.parametrize("shown", [(), TAGS], ids=["text", "tokens"])
@pytest.mark.parametrize("template", [HERMES, LLAMA, XML], ids=["hermes", "llama", "xml"])
def test_calls_that_must_be_made(tokenizer, template, shown):
    made = service(templated(tokenizer, template, ["<|python_tag|>"], shown), window=900)
    with served(made) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as gpt:
        ask = {"model": "m", "messages": ASK, "tools": CHAT_TOOLS, "seed": 1, "parallel_tool_calls": False}
        named = gpt.chat.completions.create(
            **ask, tool_choice={"type": "function", "function": {"name": "look"}}
        ).choices[0]  # fmt: skip
        (call,) = named.message.tool_calls
        look = json.loads(call.function.arguments)
        assert look["where"] in ("mat", "hook") and 0 <= look["n"] <= 9 and len(look.get("note", "")) <= 3
        assert named.finish_reason == "tool_calls" and named.message.content is None
        some = gpt.chat.completions.create(**ask, tool_choice="required").choices[0]
        (call,) = some.message.tool_calls
        assert call.function.name in ("look", "wait")
        flat = [{"type": "function", **f} for f in FUNCTIONS]
        answer = gpt.responses.create(
            model="m", input="Where?", tools=flat, tool_choice="required", parallel_tool_calls=False
        )
        assert [item.type for item in answer.output] == ["function_call"]
        both = gpt.chat.completions.create(**ask, response_format=FORMAT).choices[0]
        if both.message.tool_calls is None:
            Place.model_validate_json(both.message.content)
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
            tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
            choice = {"type": "tool", "name": "look", "disable_parallel_tool_use": True}
            said = claude.messages.create(model="m", messages=ASK, tools=tools, max_tokens=300, tool_choice=choice)
        assert [(b.type, b.name) for b in said.content] == [("tool_use", "look")] and said.stop_reason == "tool_use"


@contextlib.contextmanager
def begins(made, text):
    """Within the block every reply begins with this text, and goes on as the model likes."""
    engine, script = made.engine, made.tokenizer.encode(text)
    decode = engine.decode

    def scripted(batch):
        served, row = decode(batch), 0
        logits = served.logits.clone()
        for run in batch.runs():
            if batch.output[run.start : run.end].any():
                said = len(made.scheduler.turns[run.slot].reply)
                if said < len(script):
                    logits[row] = torch.zeros_like(logits[row]).index_fill_(0, torch.tensor(script[said]), 1e4)
                row += 1
        return served._replace(logits=logits, likeliest=logits.argmax(-1))

    engine.decode = scripted
    try:
        yield
    finally:
        del engine.decode


OWN = {"hermes": (HERMES, "See: <tool_call>"), "llama": (LLAMA, "<|python_tag|>"), "xml": (XML, "See:\n<tool_call>")}


@pytest.mark.parametrize("shown", [(), TAGS], ids=["text", "tokens"])
@pytest.mark.parametrize("kind", OWN)
def test_calls_of_its_own_accord_are_held_to_their_schemas(tokenizer, kind, shown):
    """From the mark on a random model calls a tool that was offered, with arguments that are allowed, each time; text
    before and behind is its own."""
    template, mark = OWN[kind]
    made = service(templated(tokenizer, template, ["<|python_tag|>"], shown), window=900)
    ask = {"model": "m", "messages": ASK, "tools": CHAT_TOOLS, "max_tokens": 300, "parallel_tool_calls": False}
    with served(made) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as gpt:
        with begins(made, mark):
            for seed in range(4):
                choice = gpt.chat.completions.create(**ask, seed=seed).choices[0]
                (call,) = choice.message.tool_calls
                check_call(call.function.name, json.loads(call.function.arguments))
                assert choice.finish_reason == "tool_calls" and (choice.message.content or "See:") == "See:"
            many = gpt.chat.completions.create(**{**ask, "parallel_tool_calls": True}, seed=9).choices[0]
            check_call(
                many.message.tool_calls[0].function.name, json.loads(many.message.tool_calls[0].function.arguments)
            )
        with begins(made, "See: "):
            assert not gpt.chat.completions.create(**{**ask, "max_tokens": 20}).choices[0].message.tool_calls


def check_call(name, arguments):
    assert name in ("look", "wait")
    if name == "wait":
        assert arguments == {}
        return
    assert set(arguments) <= {"where", "n", "note"} and arguments["where"] in ("mat", "hook")
    assert 0 <= arguments["n"] <= 9 and len(arguments.get("note", "")) <= 3


def test_what_cannot_be_held_is_called_all_the_same(tokenizer, monkeypatch):
    """Neither a schema that llguidance does not follow nor its absence refuses tools that nobody has to call."""
    odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=.*a).*$"}}}
    made = service(templated(tokenizer, HERMES), window=400)
    text = '<tool_call>\n{"name": "look", "arguments": {"a": 5}}\n</tool_call>'
    with served(made) as url:
        for tools in ([{"type": "function", "function": {"name": "look", "parameters": odd}}], CHAT_TOOLS):
            body = {"messages": ASK, "tools": tools}
            with says(made, text):
                answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 5}'
            monkeypatch.setitem(sys.modules, "llguidance", None)


def test_a_thought_is_free(tokenizer):
    thinks = templated(tokenizer, HERMES + "{% if false %}<think></think>{% endif %}")
    made = service(thinks, window=400)
    text = "<think>\nI may <tool_call> or not.\n</think>\n\nNo."
    with served(made) as url, says(made, text):
        body = {"messages": ASK, "tools": CHAT_TOOLS}
        message = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("No.", "I may <tool_call> or not.")


BAD = {
    "response_format.type must be": {"type": "xml"},
    "json_schema needs a schema": {"type": "json_schema", "json_schema": {"name": "x"}},
    "the grammar is refused": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
}


def test_bad_requests(url):
    for why, given in BAD.items():
        body = {"messages": ASK, "response_format": given}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    deep = "root ::= " + "(" * 100_000
    for body in (
        {"grammar": "root ::= (("},
        {"grammar": deep},
        {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        {"grammar": 'root ::= "a"', "json_schema": {}},
    ):
        assert httpx.post(f"{url}/completion", json={"prompt": "x", **body}, timeout=60).status_code == 400


WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}, "required": ["p2999"]}


def test_a_schema_beyond_a_limit_is_refused_before_it_begins(url):
    """Its first token is within the limits, its second is not."""
    given = {"type": "json_schema", "json_schema": {"name": "wide", "schema": WIDE}}
    inside = {"type": "object", "properties": {"a": WIDE}, "required": ["a"]}
    for path, body in (
        ("/v1/chat/completions", {"messages": ASK, "response_format": given}),
        ("/v1/chat/completions", {"messages": ASK, "response_format": given, "stream": True}),
        ("/completion", {"prompt": "x", "json_schema": inside}),
    ):
        answer = httpx.post(f"{url}{path}", json=body, timeout=60)
        said = answer.json()["error"]
        assert answer.status_code == 400 and said["type"] == "invalid_request_error"
        assert "a limit of llguidance is reached (Parser Error: Current row has" in said["message"]
        assert "max is 2000" in said["message"] and len(said["message"]) < 500


def test_a_limit_that_is_reached_later_ends_the_turn_as_the_requests(made, url, monkeypatch):
    """Plain: 400. Streaming: an error event of that kind, behind what was said. Nobody else notices."""
    compiled = made.grammars.compile(f"start: /[a-c]{{99}}/ {schema(WIDE)}")
    monkeypatch.setattr(made.grammars, "compile", lambda _: compiled)
    chat = {"messages": ASK, "response_format": FORMAT, "max_tokens": 200}
    claude = {
        "messages": ASK,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "max_tokens": 200,
    }
    form = {"input": "x", "text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}}
    native = {"prompt": "x", "json_schema": SCHEMA, "n_predict": 200}
    for path, body in (
        ("/v1/chat/completions", chat), ("/v1/messages", claude), ("/v1/responses", form), ("/completion", native),
    ):  # fmt: skip
        answer = httpx.post(f"{url}{path}", json=body, timeout=60)
        assert answer.status_code == 400 and "a limit of llguidance is reached" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        beside = httpx.post(f"{url}/completion", json={"prompt": "x", "n_predict": 3}, timeout=60)
        assert beside.json()["tokens_predicted"] == 3
        stream = httpx.post(f"{url}{path}", json={**body, "stream": True}, timeout=60)
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        assert stream.status_code == 200 and len(events) > 2 and "a limit of llguidance is reached" in str(events[-1])
        kind = events[-1].get("error", {}).get("type") or events[-1]["response"]["error"]["code"]
        assert kind in ("invalid_request_error", "invalid_prompt")


def test_odd_arguments_of_a_tool_are_refused(tokenizer):
    """In the format whose tags are written here, not by the grammar's compiler."""
    with served(service(templated(tokenizer, XML))) as url:
        for odd in (
            {"type": "string", "maxLength": []},
            {"type": "string", "maxLength": -1},
            {"enum": 5},
            {"enum": []},
        ):
            tool = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"b": odd}}}}
            body = {"messages": ASK, "tools": [tool], "tool_choice": "required"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 400 and "the grammar is refused" in answer.json()["error"]["message"]


def test_what_is_not_installed_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with served(service(tokenizer)) as url:
        body = {"messages": ASK, "response_format": FORMAT}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "pip install 'riftco[structured]'" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, tokenizer.vocabulary_size)


def run(tokenizer, requests, speculate=0, slots=3):
    made = Scheduler(service(tokenizer, slots=slots).engine, speculate=speculate)
    tickets = [made.submit(r) for r in requests]
    made.run()
    return tickets


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=2)], ids=["greedy", "sampled"])
def test_guesses_and_neighbours_change_nothing(tokenizer, grammars, sampling):
    prompt = tokenizer.encode('{"where": "mat", "n": 1, "note": "a"} {"where": "mat", "n": 1, "note": ')
    kept = Request(prompt, sampling=sampling, grammar=grammars.compile(f"start: {schema(SCHEMA)}"), max_new_tokens=90)
    others = [Request(prompt[i:], sampling=sampling, max_new_tokens=20) for i in (3, 5)]
    (alone,) = run(tokenizer, [kept])
    Place.model_validate_json(tokenizer.decode(alone.tokens))
    assert alone.finished.why == "stop"
    plain = [t.tokens for t in run(tokenizer, others)]
    for speculate in (0, 3):
        tickets = run(tokenizer, [kept, *others], speculate)
        assert [t.tokens for t in tickets] == [alone.tokens, *plain]


def test_a_reply_that_no_token_is_left_for_ends_alone(tokenizer, grammars):
    (yes,) = tokenizer.encode("yes")
    forbidden = {t: -float("inf") for t in range(tokenizer.vocabulary_size - 1)}
    grammar = grammars.compile(from_gbnf('root ::= "yes"'))
    for speculate in (0, 3):
        broken, fine = run(tokenizer, [
            Request([yes] * 4, sampling=Sampling(logit_bias=forbidden), grammar=grammar),
            Request([yes] * 4, max_new_tokens=4),
        ], speculate)  # fmt: skip
        assert broken.finished.why == "error" and "leave no token that may come next" in broken.finished.error
        assert fine.finished.why == "length"
    with pytest.raises(Refused, match="grammar: 'x' is no such thing"):
        run(tokenizer, [Request([yes], grammar="x")])


def test_a_stop_token_ends_a_reply_that_might_go_on(tokenizer, grammars):
    grammar = grammars.compile("start: /[a-z]+/")
    (ticket,) = run(tokenizer, [Request([5, 6], sampling=Sampling(logit_bias={tokenizer.eos_id: 90}),
                                        stop_ids=tokenizer.stop_ids, grammar=grammar)])  # fmt: skip
    assert ticket.finished.why == "stop" and ticket.tokens[-1] in tokenizer.stop_ids and len(ticket.tokens) == 2
    assert tokenizer.decode(ticket.tokens[:-1]).isalpha()
