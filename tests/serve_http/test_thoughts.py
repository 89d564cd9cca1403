"""What a model thinks before it answers: apart from the answer in every dialect, plain and streaming."""

import json

import httpx
import pytest
from server import says, served, service, templated
from templates import HERMES

from riftco.serve.grammar import Grammar
from riftco.serve.thoughts import Thoughts

ASK = [{"role": "user", "content": "Where is the key?"}]
THOUGHT, ANSWER = "It was under\n\nthe mat <b>.", "Under the mat."
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
CLOSED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
OPENED = "{% if opened %}<think>\n{% endif %}"
TEMPLATE = HERMES.removesuffix("{% endif %}") + OPENED + CLOSED + "{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def in_pieces(text, size, inside=False):
    made, thoughts = [], Thoughts(inside)
    for at in range(0, len(text), size):
        made += thoughts.add(text[at : at + size])
    made += thoughts.rest()
    assert all(piece for _, piece in made)
    return tuple("".join(piece for thinks, piece in made if thinks is which) for which in (True, False))


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "inside", "wanted"),
    [
        (SAID, False, (THOUGHT, ANSWER)),
        (f" \n{SAID}", False, (THOUGHT, ANSWER)),
        (f"{THOUGHT}</think>{ANSWER}", True, (THOUGHT, ANSWER)),
        (SAID, True, (THOUGHT, ANSWER)),
        (f"<think>\n\n</think>\n\n{ANSWER}", False, ("", ANSWER)),
        ("<think>\nnot yet </thi", False, ("not yet </thi", "")),
        ("not yet", True, ("not yet", "")),
        ("<think>", False, ("", "")),
        ("<think> a </think>", False, ("a", "")),
        (f" {ANSWER} <think>x</think>", False, ("", f" {ANSWER} <think>x</think>")),
        ("<thin", False, ("", "<thin")),
        ("<think>a</think>b</think> <think>c", False, ("a", "b</think> <think>c")),
        ("<think>\n<think>a</think>b", False, ("<think>a", "b")),
        ("<think>\n<think>a</think>b", True, ("<think>a", "b")),
        ("<think>x < y</think><", False, ("x < y", "<")),
        ("", True, ("", "")),
        ("", False, ("", "")),
    ],
)
def test_a_reply(text, inside, wanted, size):
    assert in_pieces(text, size, inside) == wanted


def test_thoughts_are_given_as_they_come():
    thoughts = Thoughts()
    given = [thoughts.add(piece) for piece in ("<thi", "nk>\n", "so ", "it ", "goes\n</", "think>\n\n", "Yes", " .")]
    assert [[piece for _, piece in made] for made in given] == [[], [], ["so"], [" it"], [" goes"], [], ["Yes"], [" ."]]


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    return service(templated(tokenizer, TEMPLATE), tmp_path_factory.mktemp("train"), window=400)


@pytest.mark.parametrize("opened", [False, True])
def test_chat(gpt, made, opened):
    """Whether the model writes the mark itself, or the prompt ends with it."""
    ask = {"model": "m", "messages": ASK, "extra_body": {"chat_template_kwargs": {"opened": opened}}}
    with says(made, SAID.removeprefix("<think>\n") if opened else SAID):
        answer = gpt.chat.completions.create(**ask)
        chunks = list(gpt.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    message = answer.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == (ANSWER, THOUGHT)
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == ANSWER
    thinking = [d.model_extra.get("reasoning_content") for d in deltas]
    assert "".join(filter(None, thinking)) == THOUGHT and sum(map(bool, thinking)) > 2
    assert chunks[-1].usage.completion_tokens_details == answer.usage.completion_tokens_details


@pytest.mark.parametrize(
    ("begun", "said", "wanted"),
    [
        ("<think>\nIt was", f" there.</think>\n\n{ANSWER}", (" there.", ANSWER)),
        ("<think>\n", f"{THOUGHT}</think>{ANSWER}", (THOUGHT, ANSWER)),
        ("<think>It was.</think>", ANSWER, ("", ANSWER)),
        ("Write <think>", f"x</think>{ANSWER}", ("", f"x</think>{ANSWER}")),
        ("Write", " <think>x</think>", ("", " <think>x</think>")),
    ],
)
def test_a_reply_that_goes_on_with_a_thought(gpt, claude, made, begun, said, wanted):
    ask = {"model": "m", "messages": [*ASK, {"role": "assistant", "content": begun}]}
    more = {"continue_final_message": True}
    with says(made, said):
        message = gpt.chat.completions.create(**ask, extra_body=more).choices[0].message
        chunks = list(gpt.chat.completions.create(**ask, extra_body=more, stream=True))
        blocks = claude.messages.create(**ask, max_tokens=200).content
    assert (message.model_extra.get("reasoning_content", ""), message.content) == wanted
    deltas = [c.choices[0].delta for c in chunks]
    streamed = "".join(d.model_extra.get("reasoning_content") or "" for d in deltas)
    assert (streamed, "".join(d.content or "" for d in deltas)) == wanted
    by_kind = {block.type: block for block in blocks}
    assert by_kind["text"].text == wanted[1]
    assert getattr(by_kind.get("thinking"), "thinking", "") == wanted[0]


def test_it_goes_back_into_the_conversation(gpt, made):
    """Where a template has a place for it; the others do not show it."""
    with says(made, SAID):
        said = gpt.chat.completions.create(model="m", messages=ASK).choices[0].message
    more = [*ASK, said.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
    with says(made, ANSWER):
        message = gpt.chat.completions.create(model="m", messages=more).choices[0].message
    assert message.content == ANSWER and "reasoning_content" not in message.model_extra


def test_messages(claude, made):
    ask = {"model": "m", "messages": ASK, "max_tokens": 200}
    with says(made, SAID):
        answer = claude.messages.create(**ask)
        events = list(claude.messages.create(**ask, stream=True))
        with claude.messages.stream(**ask) as stream:
            final = stream.get_final_message()
    for content in (answer.content, final.content):
        assert [block.type for block in content] == ["thinking", "text"]
        assert (content[0].thinking, content[1].text) == (THOUGHT, ANSWER)
    kinds = [(e.type, e.index, getattr(getattr(e, "delta", None), "type", "")) for e in events if hasattr(e, "index")]
    assert list(dict.fromkeys(kinds)) == [
        ("content_block_start", 0, ""), ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"), ("content_block_stop", 0, ""),
        ("content_block_start", 1, ""), ("content_block_delta", 1, "text_delta"), ("content_block_stop", 1, ""),
    ]  # fmt: skip
    said = {"role": "assistant", "content": [block.model_dump() for block in answer.content]}
    more = [*ASK, said, {"role": "user", "content": "And?"}]
    with says(made, ANSWER):
        assert claude.messages.create(**{**ask, "messages": more}).content[0].text == ANSWER


def test_responses(gpt, made):
    ask = {"model": "m", "input": "Where is the key?"}
    with says(made, SAID):
        answer = gpt.responses.create(**ask)
        events = list(gpt.responses.create(**ask, stream=True))
        with gpt.responses.stream(**ask) as stream:
            list(stream)
            final = stream.get_final_response()
    for made_of in (answer, events[-1].response, final):
        thought, message = made_of.output
        assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
        assert (message.content[0].text, made_of.output_text) == (ANSWER, ANSWER)
        assert made_of.usage.output_tokens_details.reasoning_tokens > 0
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = list(dict.fromkeys((e.type, getattr(e, "output_index", None)) for e in events))
    assert kinds[2:6] == [
        ("response.output_item.added", 0), ("response.reasoning_text.delta", 0), ("response.reasoning_text.done", 0),
        ("response.output_item.done", 0),
    ]  # fmt: skip
    more = [{"role": "user", "content": "Where?"}, *(item.model_dump() for item in answer.output),
            {"role": "user", "content": "And?"}]  # fmt: skip
    with says(made, ANSWER):
        assert gpt.responses.create(model="m", input=more).output_text == ANSWER


def test_a_call_behind_a_thought(gpt, claude, made):
    """And one inside of a thought is none."""
    with says(made, f"<think>\nI could {CALL}\n</think>\n\n{CALL}"):
        choice = gpt.chat.completions.create(model="m", messages=ASK, tools=TOOLS).choices[0]
        tool = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
        answer = claude.messages.create(model="m", messages=ASK, tools=[tool], max_tokens=200)
        items = gpt.responses.create(
            model="m", input="x", tools=[{"type": "function", "strict": False, **TOOLS[0]["function"]}]
        )
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    assert choice.message.content is None and CALL in choice.message.model_extra["reasoning_content"]
    assert [block.type for block in answer.content] == ["thinking", "tool_use"]
    assert [item.type for item in items.output] == ["reasoning", "function_call"]


def test_a_turn_that_ends_while_it_thinks(gpt, claude, made):
    with says(made, SAID):
        choice = gpt.chat.completions.create(model="m", messages=ASK, max_tokens=6).choices[0]
        answer = claude.messages.create(model="m", messages=ASK, max_tokens=6)
        response = gpt.responses.create(model="m", input="x", max_output_tokens=6)
    assert choice.finish_reason == "length" and choice.message.content == ""
    assert THOUGHT.startswith(choice.message.model_extra["reasoning_content"])
    assert answer.stop_reason == "max_tokens" and answer.content[0].type == "thinking"
    assert response.status == "incomplete" and [item.type for item in response.output] == ["reasoning"]


BODIES = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/messages": {"messages": ASK, "max_tokens": 200},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("path", BODIES)
def test_it_can_be_switched_off(url, made, monkeypatch, path):
    def said(**more):
        with says(made, SAID):
            return httpx.post(f"{url}{path}", json={**BODIES[path], **more}, timeout=60).text

    whole = json.dumps(SAID)[1:-1]
    assert whole in said(reasoning_format="none") and whole not in said()
    monkeypatch.setattr(made, "reasoning", False)
    assert whole in said() and whole not in said(reasoning_format="auto")
    assert "reasoning_format" in said(reasoning_format="maybe")


def test_what_knows_of_no_thoughts_or_keeps_to_a_grammar_is_text(made, tokenizer):
    assert service(templated(tokenizer, HERMES)).thoughts(asked(grammar=None), None) is None
    assert made.thoughts(asked(grammar=Grammar(None, 0, None)), None) is None
    assert made.thoughts(asked(grammar=None), None) is not None
    assert not made.thoughts(asked(grammar=None, prompt=tokenizer.encode("<think>\n\n</think>\n\n")), None).inside
    assert made.thoughts(asked(grammar=None, prompt=tokenizer.encode("x<think>\n")), None).inside


def asked(grammar, prompt=(5, 6)):
    class Asked:
        request = type("Request", (), {"grammar": grammar, "prompt": list(prompt)})

    return Asked


def test_marks_that_are_control_tokens_are_read(tokenizer):
    """Some files say so of them: a token that is not shown is a mark all the same."""
    special = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    made = service(templated(tokenizer, TEMPLATE, special), window=400)
    with served(made) as url, says(made, f"<think>\nWhy?\n</think>\n\nHm. {CALL}"):
        message = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": ASK, "tools": TOOLS, "max_tokens": 60}, timeout=60
        ).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Why?", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "look", "arguments": "{}"}]


def test_a_call_that_is_asked_for_may_have_its_marks_as_control_tokens(tokenizer):
    pytest.importorskip("llguidance", reason="riftco[structured] is not installed")
    made = service(templated(tokenizer, TEMPLATE, ("<tool_call>", "</tool_call>")), window=400)
    assert len(made.tokenizer.ids_of(("<tool_call>", "</tool_call>"))) == 2
    with served(made) as url, says(made, CALL):
        body = {"messages": ASK, "tools": TOOLS, "max_tokens": 60, "tool_choice": "required"}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": "{}"}
    assert answer["usage"]["completion_tokens"] == len(made.tokenizer.encode(CALL)) + 1, "marks of one token each"
