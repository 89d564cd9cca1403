"""Calls of tools in every dialect, plain and streaming, as the official clients read them."""

import json

import httpx
import openai
import pytest
from pydantic import BaseModel
from server import says, served, service, templated
from templates import HERMES, LLAMA, XML

from riftco.serve.http.asked import Asked

ASK = [{"role": "user", "content": "Where is the key?"}]
SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}, "n": {"type": "integer"}}}
FUNCTION = {"name": "look", "description": "Look somewhere.", "parameters": SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS = [{"type": "function", "strict": False, **FUNCTION}]
CLAUDE_TOOLS = [{"name": "look", "description": "Look somewhere.", "input_schema": SCHEMA}]
ARGUMENTS = {"where": "under the mat", "n": 2}
SAID = {
    "hermes": f"Let me see.\n<tool_call>\n{json.dumps({'name': 'look', 'arguments': ARGUMENTS})}\n</tool_call>",
    "llama": f"<|python_tag|>{json.dumps({'name': 'look', 'parameters': ARGUMENTS})}",
    "xml": "Let me see.\n<tool_call>\n<function=look>\n<parameter=where>\nunder the mat\n</parameter>\n"
    "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
}
TEMPLATES = {"hermes": (HERMES, ()), "llama": (LLAMA, ("<|python_tag|>",)), "xml": (XML, ())}
LEARN = {"lora_id": "live", "lr": 1e-3}


@pytest.fixture(scope="module", params=SAID)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def made(kind, tokenizer, tmp_path_factory):
    own = templated(tokenizer, *TEMPLATES[kind])
    return service(own, tmp_path_factory.mktemp("train"), window=400)


def text_before(kind):
    return None if kind == "llama" else "Let me see."


def test_chat(gpt, made, kind):
    ask = {"model": "m", "messages": ASK, "tools": CHAT_TOOLS}
    with says(made, SAID[kind]):
        choice = gpt.chat.completions.create(**ask).choices[0]
        chunks = list(gpt.chat.completions.create(**ask, stream=True))
    assert choice.finish_reason == "tool_calls" and choice.message.content == text_before(kind)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "look", ARGUMENTS)
    deltas = [c.choices[0].delta for c in chunks]
    pieces = [piece for d in deltas for piece in d.tool_calls or ()]
    assert pieces[0].id and pieces[0].function.name == "look" and {p.index for p in pieces} == {0}
    assert json.loads("".join(p.function.arguments for p in pieces)) == ARGUMENTS
    assert "".join(d.content or "" for d in deltas) == (text_before(kind) or "")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


class Look(BaseModel):
    where: str
    n: int


def test_chat_streams_helper(gpt, made, kind):
    tools = [openai.pydantic_function_tool(Look, name="look")]
    with says(made, SAID[kind]), gpt.chat.completions.stream(model="m", messages=ASK, tools=tools) as stream:
        events = [e for e in stream if e.type.startswith("tool_calls")]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments == Look(**ARGUMENTS)
    assert events[-1].type == "tool_calls.function.arguments.done" and events[-1].name == "look"


def test_responses(gpt, made, kind):
    ask = {"model": "m", "input": "Where is the key?", "tools": RESPONSES_TOOLS}
    with says(made, SAID[kind]):
        answer = gpt.responses.create(**ask)
        events = list(gpt.responses.create(**ask, stream=True))
        with gpt.responses.stream(**ask) as stream:
            kinds = [e.type for e in stream]
            final = stream.get_final_response()
    for response in (answer, events[-1].response, final):
        call = response.output[-1]
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", ARGUMENTS)
        assert call.call_id and call.status == "completed" and response.status == "completed"
        assert response.output_text == (text_before(kind) or "") and len(response.output) == 1 + (kind != "llama")
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert kinds[-5:] == [
        "response.output_item.added", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    at = events[-5].output_index
    assert all(e.output_index == at for e in events[-5:-1]) and events[-4].item_id == events[-5].item.id


def test_messages(claude, made, kind):
    ask = {"model": "m", "messages": ASK, "tools": CLAUDE_TOOLS, "max_tokens": 200}
    with says(made, SAID[kind]):
        answer = claude.messages.create(**ask)
        events = list(claude.messages.create(**ask, stream=True))
        with claude.messages.stream(**ask) as stream:
            final = stream.get_final_message()
    for message in (answer, final):
        assert message.stop_reason == "tool_use" and [b.type for b in message.content][-1:] == ["tool_use"]
        call = message.content[-1]
        assert (call.name, call.input) == ("look", ARGUMENTS) and call.id
        assert [b.text for b in message.content[:-1]] == ([] if kind == "llama" else ["Let me see."])
    kinds = [e.type for e in events]
    assert kinds[-5:] == [
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"
    ]  # fmt: skip
    assert [e.index for e in events if e.type == "content_block_start"] == list(range(len(answer.content)))
    counted = claude.messages.count_tokens(model="m", messages=ASK, tools=CLAUDE_TOOLS).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert counted > claude.messages.count_tokens(model="m", messages=ASK).input_tokens


def prompt_of(made):
    """What the newest turn was asked."""
    slot = max(made.engine.slots, key=lambda s: s.used)
    return made.tokenizer.decode(slot.tokens)


IN_PROMPT = {
    "hermes": '<tool_call>{"name": "look", "arguments": {"where": "under the mat", "n": 2}}</tool_call>',
    "llama": '{"name": "look", "parameters": {"where": "under the mat", "n": 2}}',
    "xml": "<function=look><parameter=where>under the mat</parameter><parameter=n>2</parameter></function>",
}


def test_a_conversation_with_calls_goes_on_in_each_dialect_alike(gpt, claude, url, made, kind):
    arguments = json.dumps(ARGUMENTS)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    chat = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "A key."}]}]  # fmt: skip
    items = [
        *ASK, {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "A key."},
    ]  # fmt: skip
    blocks = [
        *ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": ARGUMENTS}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "A key."}]},
    ]  # fmt: skip
    prompts = []
    with says(made, "Under the mat."):
        answer = gpt.chat.completions.create(model="m", messages=chat, tools=CHAT_TOOLS)
        prompts.append(prompt_of(made))
        gpt.responses.create(model="m", input=items, tools=RESPONSES_TOOLS)
        prompts.append(prompt_of(made))
        said = claude.messages.create(model="m", messages=blocks, tools=CLAUDE_TOOLS, max_tokens=20)
        prompts.append(prompt_of(made))
    assert answer.choices[0].message.content == "Under the mat." == said.content[0].text
    assert answer.choices[0].finish_reason == "stop" and not answer.choices[0].message.tool_calls
    assert len(set(prompts)) == 1 and IN_PROMPT[kind] in prompts[0] and "A key." in prompts[0]
    assert "<tool_response name=look>" in prompts[0]
    assert '"name": "look"' in prompts[0] and "Look somewhere." in prompts[0], "the tools are in the prompt"


def test_calls_without_ids_have_answers_all_the_same(gpt, made):
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "A key."}]
    with says(made, "Under the mat."):
        gpt.chat.completions.create(model="m", messages=chat, tools=CHAT_TOOLS)
    assert "<tool_response name=look>A key." in prompt_of(made)


def test_what_only_looks_like_a_call_stays_text(gpt, made, monkeypatch):
    """Where nothing holds it to be one (llguidance would)."""
    monkeypatch.setattr(Asked, "_held", lambda *_: None)
    said = "<tool_call>\nlook(under the mat)\n</tool_call>"
    with says(made, said):
        answer = gpt.chat.completions.create(model="m", messages=ASK, tools=CHAT_TOOLS)
    assert answer.choices[0].message.content == said and answer.choices[0].finish_reason == "stop"


def test_without_tools_a_call_is_text(gpt, made, kind):
    with says(made, SAID[kind]):
        plain = gpt.chat.completions.create(model="m", messages=ASK)
        none = gpt.chat.completions.create(model="m", messages=ASK, tools=CHAT_TOOLS, tool_choice="none")
    for answer in (plain, none):
        assert "look" in answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_tools_that_may_not_be_called_are_in_the_prompt_all_the_same(gpt, made, kind, monkeypatch):
    monkeypatch.setattr(Asked, "_held", lambda *_: None)  # or the call would be one of the other
    others = [*CHAT_TOOLS, {"type": "function", "function": {"name": "wait"}}]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "wait"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    with says(made, SAID[kind]):
        answer = gpt.chat.completions.create(model="m", messages=ASK, tools=others, tool_choice=choice)
    assert not answer.choices[0].message.tool_calls and "look" in answer.choices[0].message.content
    assert '"name": "look"' in prompt_of(made) and '"name": "wait"' in prompt_of(made)


def test_one_call_where_there_may_be_no_more(gpt, claude, made, kind):
    twice = SAID[kind] + {"llama": "; " + SAID[kind].removeprefix("<|python_tag|>")}.get(kind, "\n" + SAID[kind])
    with says(made, twice):
        both = gpt.chat.completions.create(model="m", messages=ASK, tools=CHAT_TOOLS).choices[0]
        ask = {"model": "m", "messages": ASK, "tools": CHAT_TOOLS, "parallel_tool_calls": False}
        one = gpt.chat.completions.create(**ask).choices[0]
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        said = claude.messages.create(
            model="m", messages=ASK, tools=CLAUDE_TOOLS, max_tokens=300, tool_choice=choice
        )  # fmt: skip
    assert len(both.message.tool_calls) == 2 and len({c.id for c in both.message.tool_calls}) == 2
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
    assert [b.type for b in said.content].count("tool_use") == 1 and said.stop_reason == "tool_use"


def test_a_call_is_not_learned(gpt, url, made, kind):
    """What is known to be a call is refused; what turns out to be one is served, and the outcome says why."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    ask = {"messages": ASK, "tools": CHAT_TOOLS, "learn": LEARN}
    with says(made, SAID[kind]):
        answer = gpt.chat.completions.create(model="m", messages=ASK, tools=CHAT_TOOLS, extra_body={"learn": LEARN})
        corrected = {**LEARN, "reply": "On the hook."}
        taught = gpt.chat.completions.create(model="m", messages=ASK, tools=CHAT_TOOLS, extra_body={"learn": corrected})
        body = {**LEARN, "messages": [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]}
        refused = httpx.post(f"{url}/learn", json=body, timeout=60)
        forced = httpx.post(f"{url}/v1/chat/completions", json={**ask, "tool_choice": "required"}, timeout=60)
    outcome = answer.model_extra["learn"]
    assert answer.choices[0].message.tool_calls and not outcome["success"]
    assert "a reply with tool_calls cannot be learned" in outcome["reason"]
    assert taught.model_extra["learn"]["success"]
    for said in (refused, forced):
        assert said.status_code == 400 and "with tool_calls cannot be learned" in said.json()["error"]["message"]
    with says(made, "On the hook."):
        answer = gpt.chat.completions.create(model="m", messages=ASK, tools=CHAT_TOOLS, extra_body={"learn": LEARN})
        learned = {**LEARN, "tools": CHAT_TOOLS, "messages": [*ASK, {"role": "assistant", "content": "On the hook."}]}
        again = httpx.post(f"{url}/learn", json=learned, timeout=60).json()["learn"]
    assert answer.model_extra["learn"]["success"] and again["success"]


BAD = {
    "tools.0.type must be function": {"tools": [{"type": "web_search"}]},
    "tools.0.function.name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "tool_choice: no tool 'x'; tools: look": {"tool_choice": {"type": "function", "function": {"name": "x"}}},
    "tool_choice must be": {"tool_choice": "always"},
    "tool_choice.type must be": {"tool_choice": {"type": "custom"}},
    "tool_choice asks for a call": {"tools": [], "tool_choice": "required"},
    "arguments of 'look' are no JSON": {"messages": [*ASK, {"role": "assistant", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{"}}]}]},
    "tools.0.function.properties": {"tools": [{"type": "function", "function": {
        "name": "a", "parameters": {"properties": 5}}}]},
    "tools.0.function.type": {"tools": [{"type": "function", "function": {
        "name": "a", "parameters": {"type": "string"}}}]},
    "tool_choice: no tool 'None'": {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [
        {"type": "function", "function": {}}]}}},
    "messages.1.tool_calls must be of functions": {"messages": [*ASK, {"role": "assistant", "tool_calls": 5}]},
    "messages.0.content holds a part of type 'image_url'": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
}  # fmt: skip


def test_bad_requests(tokenizer):
    with served(service(templated(tokenizer, HERMES))) as url:
        for why, bad in BAD.items():
            body = {"messages": ASK, "tools": CHAT_TOOLS, **bad}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
        body = {"messages": ASK, "max_tokens": 2, "tools": [{"type": "bash_20250124", "name": "bash"}]}
        answer = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
        assert answer.status_code == 400 and "no tool of the caller's own" in answer.json()["error"]["message"]


def test_a_model_without_tools_says_so(tokenizer):
    made = service(tokenizer)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    with served(made) as url:
        for body, why in (
            ({"tools": CHAT_TOOLS}, "this model's chat template takes no tools"),
            ({"messages": [*ASK, {"role": "assistant", "tool_calls": [call]}]}, "has no place for tool_calls"),
        ):
            answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": ASK, **body}, timeout=60)
            assert answer.status_code == 400 and why in answer.json()["error"]["message"]
    odd = service(templated(tokenizer, "{{ tools }}<tool_call><arg_key>" + tokenizer.hf.chat_template))
    with served(odd) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": ASK, "tools": CHAT_TOOLS}, timeout=60)
        assert answer.status_code == 400 and "in a format that is not known here" in answer.json()["error"]["message"]
