"""Which tokens carry loss, on the four common templates; formats; bad lines."""

import json
import random
import re

import pytest
from data.fake_tokenizer import CHATML, END, GEMMA, TEMPLATES, FakeTokenizer

from riftco.data import DataError, load_examples, parse_record, render
from riftco.data.chat import _as_shown

TURNS = [
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "A number."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Also  one"},
]


def trained(example, tokenizer, weight=None):
    """The text of each run of trained tokens."""
    runs, before = [], False
    for token, w in zip(example.ids, example.weights, strict=True):
        now = w > 0 and weight in (None, w)
        if now and not before:
            runs.append("")
        if now:
            runs[-1] += tokenizer.vocabulary[token]
        before = now
    return runs


@pytest.mark.parametrize("name", TEMPLATES)
def test_loss_is_on_the_replies_and_their_end_of_turn(name):
    tokenizer = FakeTokenizer(TEMPLATES[name])
    example = render(parse_record({"messages": TURNS}), tokenizer)
    lead = " " if name == "mistral" else ""  # its template puts a space before the reply
    assert trained(example, tokenizer) == [f"{lead}A number.{END[name]}", f"{lead}Also  one{END[name]}"]
    assert tokenizer.decode(example.ids) == tokenizer.render_chat(TURNS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_before_a_reply_is_what_inference_sends(name):
    tokenizer = FakeTokenizer(TEMPLATES[name])
    example = render(parse_record({"messages": TURNS[:2]}), tokenizer)
    first = next(i for i, w in enumerate(example.weights) if w)
    prompt = tokenizer.render_chat(TURNS[:1], add_generation_prompt=True)
    assert list(example.ids[:first]) == tokenizer.encode(prompt)


def test_message_weights():
    tokenizer = FakeTokenizer()
    turns = [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[2], {**TURNS[3], "weight": 0.5}]
    example = render(parse_record({"messages": turns}), tokenizer)
    assert trained(example, tokenizer) == ["Also  one<|im_end|>"]
    assert trained(example, tokenizer, weight=0.5) == ["Also  one<|im_end|>"]


def test_sharegpt_and_alpaca_mean_the_same_as_messages():
    tokenizer = FakeTokenizer()
    want = render(parse_record({"messages": TURNS}), tokenizer)
    names = {"user": "human", "assistant": "gpt"}
    share = {"conversations": [{"from": names[t["role"]], "value": t["content"]} for t in TURNS]}
    assert render(parse_record(share), tokenizer) == want
    alpaca = {"instruction": "Add.", "input": "1 2", "output": "3"}
    plain = [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]
    assert render(parse_record(alpaca), tokenizer) == render(parse_record({"messages": plain}), tokenizer)
    known = {**alpaca, "history": [["What is two?", "A number."]]}
    assert render(parse_record(known), tokenizer) == render(parse_record({"messages": [*TURNS[:2], *plain]}), tokenizer)


def test_openai_content_parts():
    tokenizer = FakeTokenizer()
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "two?"}]
    turns = [{"role": "user", "content": parts}, TURNS[1]]
    want = render(parse_record({"messages": TURNS[:2]}), tokenizer)
    assert render(parse_record({"messages": turns}), tokenizer) == want


def test_plain_text_is_trained_on_entirely_and_ends():
    tokenizer = FakeTokenizer()
    example = render(parse_record({"text": "abc"}), tokenizer)
    assert tokenizer.decode(example.ids) == "abc</s>"
    assert example.weights == (1.0,) * 4
    assert example.n_labelled == 3  # the first has nothing before it


def test_a_token_that_straddles_prompt_and_reply_is_prompt():
    class Merged(FakeTokenizer):
        def encode_with_offsets(self, text):
            ids, offsets = super().encode_with_offsets(text)
            at = next(i for i, (a, _) in enumerate(offsets) if text[a:].startswith("\nA number"))
            return ids[:at] + ids[at + 1 :], [*offsets[:at], (offsets[at][0], offsets[at + 1][1]), *offsets[at + 2 :]]

    tokenizer = Merged()
    assert trained(render(parse_record({"messages": TURNS[:2]}), tokenizer), tokenizer) == [" number.<|im_end|>"]


THINKING = CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
)
INSERTED = CHATML.replace(
    "{{ m['content'] }}", "{{ '<think></think>' if loop.last and loop.index > 3 }}{{ m['content'] }}"
)
# the token that ends a conversation, where no reply is asked for
CLOSED = CHATML.replace("{% endif %}", "{% else %}<|endoftext|>{% endif %}")
ASKS_TO_THINK = CHATML.replace("assistant\n{% endif %}", "assistant\n<|think|>{% endif %}")


@pytest.mark.parametrize(
    ("template", "want"),
    [
        (THINKING, ["A number.<|im_end|>", "Also  one<|im_end|>"]),
        (INSERTED, ["A number.<|im_end|>", "<think></think>Also  one<|im_end|>"]),
        (CLOSED, ["A number.<|im_end|>", "Also  one<|im_end|>"]),
        (ASKS_TO_THINK, ["A number.<|im_end|>", "Also  one<|im_end|>"]),
    ],
    ids=["thoughts", "inserted", "closed", "asks-to-think"],
)
def test_replies_that_are_shown_otherwise_at_the_end_are_marked_as_the_text_has_them(template, want):
    """As Qwen3 shows thoughts in its last reply alone, and Phi-3 closes a conversation."""
    tokenizer = FakeTokenizer(template)
    example = render(parse_record({"messages": TURNS}), tokenizer)
    assert trained(example, tokenizer) == want
    assert tokenizer.decode(example.ids) == tokenizer.render_chat(TURNS)


def test_a_thought_of_an_earlier_reply_is_not_trained_on_where_the_template_leaves_it_out():
    tokenizer = FakeTokenizer(THINKING)
    turns = [TURNS[0], {"role": "assistant", "content": "<think>hm</think>A number."}, *TURNS[2:]]
    example = render(parse_record({"messages": turns}), tokenizer)
    assert trained(example, tokenizer) == ["A number.<|im_end|>", "Also  one<|im_end|>"]
    example = render(parse_record({"messages": turns[:2]}), tokenizer)
    assert trained(example, tokenizer) == ["<think>hm</think>A number.<|im_end|>"]


def test_the_part_of_a_reply_that_is_shown_is_the_longest_that_the_text_begins_with():
    rng = random.Random(3)
    for n in (0, 1, 40, 63, 64, 65, 130, 300):
        for _ in range(20):
            reply = "".join(rng.choices("ab", weights=(9, 1), k=n))
            text = reply[rng.randint(0, n) :] + "".join(rng.choices("ab", k=rng.randint(0, 80)))
            want = next((reply[k:] for k in range(n) if text.startswith(reply[k:])), None)
            assert _as_shown(reply, text, {}) == want


def test_long_thoughts_are_told_from_the_answer_in_one_pass():
    """The pieces of what follows are not copied for each character of a thought: that took minutes."""
    read = list[int]()

    class Text(str):
        def startswith(self, prefix):
            read.append(len(prefix))
            return super().startswith(prefix)

    reply = "<think>" + "hm " * 10**4 + "</think>A number."
    assert _as_shown(reply, Text("A number. And so on, which is more than sixty-four characters of text."), {})
    assert sum(read) < 3 * len(reply)


CALLING = (
    "{% if tools %}<|im_start|>system\n{{ tools[0]['function']['name'] }}<|im_end|>\n{% endif %}"
    + CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}"
        "{% for c in m['tool_calls'] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}"
        "{% if m['role'] == 'tool' %}{{ m['name'] }}{% endif %}",
    )
)
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def calls(arguments, **ids):
    made = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    answer = {"role": "tool", "content": "wet "}
    return [
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [made | ({"id": "a"} if ids else {})]},
        answer | ids,
        {"role": "assistant", "content": "Rain."},
    ]


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'], ids=["object", "string"])
@pytest.mark.parametrize("ids", [{}, {"tool_call_id": "a"}], ids=["bare", "ids"])
def test_calls_are_trained_on_as_the_template_writes_them(arguments, ids):
    tokenizer = FakeTokenizer(CALLING)
    record = {"messages": calls(arguments, **ids), "tools": TOOLS}
    example = render(parse_record(record), tokenizer)
    assert trained(example, tokenizer) == ["lookRome<|im_end|>", "Rain.<|im_end|>"]
    text = tokenizer.decode(example.ids)
    assert text.startswith("<|im_start|>system\nlook<|im_end|>") and "wet look" in text
    assert render(parse_record({**record, "tools": json.dumps(TOOLS)}), tokenizer) == example


def test_calls_and_tools_that_the_template_leaves_out_are_refused():
    with pytest.raises(DataError, match="message 1: the chat template has no place for tool_calls"):
        render(parse_record({"messages": calls({})}), FakeTokenizer())
    with pytest.raises(DataError, match="no place for 'tools'"):
        render(parse_record({"messages": TURNS, "tools": TOOLS}), FakeTokenizer())


def test_a_thought_beside_the_content_has_a_place_or_is_refused():
    shows = CHATML.replace("{{ m['content'] }}", "{{ m['reasoning_content'] if loop.last }}{{ m['content'] }}")
    turns = [TURNS[0], *({**TURNS[i], "reasoning_content": "hm "} if i != 2 else TURNS[2] for i in (1, 2, 3))]
    tokenizer = FakeTokenizer(shows)
    example = render(parse_record({"messages": turns}), tokenizer)
    assert trained(example, tokenizer) == ["A number.<|im_end|>", "hm Also  one<|im_end|>"]
    with pytest.raises(DataError, match="message 3: the chat template has no place for reasoning_content"):
        render(parse_record({"messages": turns}), FakeTokenizer())


def test_a_record_may_have_options_of_its_chat_template():
    tokenizer = FakeTokenizer("{{ mood }}" + CHATML)
    record = {"messages": TURNS, "chat_template_kwargs": {"mood": "calm"}}
    assert tokenizer.decode(render(parse_record(record), tokenizer).ids).startswith("calm<|im_start|>")


def test_loss_is_on_the_completion_alone():
    tokenizer = FakeTokenizer()
    example = render(parse_record({"prompt": "One and ", "completion": "two"}), tokenizer)
    assert trained(example, tokenizer) == ["two</s>"] and tokenizer.decode(example.ids) == "One and two</s>"
    tokenizer = FakeTokenizer()
    example = render(parse_record({"prompt": TURNS[:3], "completion": TURNS[3:]}), tokenizer)
    assert trained(example, tokenizer) == ["Also  one<|im_end|>"]
    assert tokenizer.decode(example.ids) == tokenizer.render_chat(TURNS)


class Words(FakeTokenizer):
    """A word is a token, with the space before it."""

    def encode_with_offsets(self, text):
        found = list(re.finditer(r" ?\w+|.", text))
        return [self._id(m.group()) for m in found], [m.span() for m in found]

    def encode(self, text, *, add_special_tokens=False):
        return self.encode_with_offsets(text)[0]


def test_a_completion_within_a_token_of_the_prompt_is_refused():
    tokenizer = Words()
    with pytest.raises(DataError, match="white space between them belongs to the completion"):
        render(parse_record({"prompt": "Is it? ", "completion": "yes"}), tokenizer)
    example = render(parse_record({"prompt": "Is it?", "completion": " yes"}), tokenizer)
    assert trained(example, tokenizer) == [" yes</s>"]
    example = render(parse_record({"prompt": "Is it? ", "completion": "yes it is"}), tokenizer)
    assert trained(example, tokenizer) == [" it is</s>"]


class Begins(FakeTokenizer):
    """One that puts a token before plain text."""

    def __init__(self):
        super().__init__()
        self.bos_id = self._id("<s>")

    def encode(self, text, *, add_special_tokens=False):
        return [self.bos_id] * add_special_tokens + super().encode(text)


def test_plain_text_begins_once():
    tokenizer = Begins()
    one = render(parse_record({"text": "ab"}), tokenizer)
    assert tokenizer.decode(one.ids) == "<s>ab</s>"
    assert render(parse_record({"text": "<s>ab"}), tokenizer) == one  # it has its own
    example = render(parse_record({"prompt": "a", "completion": "b"}), tokenizer)
    assert example.ids == one.ids and trained(example, tokenizer) == ["b</s>"]


def test_other_names_for_the_same_turns():
    tokenizer = FakeTokenizer()
    want = render(parse_record({"messages": [{"role": "system", "content": "Be brief."}, *TURNS]}), tokenizer)
    share = {"system": "Be brief.", "conversations": [{"from": t["role"], "value": t["content"]} for t in TURNS]}
    assert render(parse_record(share), tokenizer) == want
    assert render(parse_record({"system": "Be brief.", "conversations": TURNS}), tokenizer) == want
    named = [{"role": "developer", "content": "Be brief."}, *TURNS]
    assert render(parse_record({"messages": named}), tokenizer) == want


def test_a_template_that_rewrites_earlier_turns_is_refused():
    forgetful = CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else 'x' }}")
    with pytest.raises(DataError, match="give each reply a line of its own"):
        render(parse_record({"messages": TURNS}), FakeTokenizer(forgetful))


BAD = {
    "{": "not valid JSON",
    '{"text": "\\ud83d"}': "surrogates not allowed",
    "[1]": "expected a JSON object a line; got list; a JSON array becomes JSONL with: jq",
    "[": "not valid JSON in one line .*; a JSON array becomes JSONL with: jq",
    "3": "expected a JSON object with",
    '{"text": "x", "images": ["a.png"]}': "'images' are not supported",
    '{"instruction": "x", "output": "y", "history": [["a"]]}': "'history' must be a list of pairs",
    '{"instruction": "x", "output": "y", "history": 5}': "'history' must be a list of pairs",
    '{"text": "x", "tools": [{"name": "f"}]}': "'tools' are of conversations",
    '{"prompt": "x", "completion": "y", "chat_template_kwargs": {"a": 1}}': "'chat_template_kwargs' are of conv",
    '{"instruction": "x", "output": "y", "tools": [{"name": "f"}]}': "no place for 'tools'",
    '{"prompt": 1}': "no known keys \\(prompt\\)",
    '{"messages": []}': "at least one message",
    '{"messages": [{"role": "robot", "content": "x"}]}': "role 'robot' is not known",
    '{"messages": [{"role": "user", "content": 3}]}': "'content' must be a string",
    '{"messages": [{"role": "user", "content": "x"}]}': "nothing to train on",
    '{"messages": [{"role": "user", "content": "x", "weight": 1}]}': "assistant messages only",
    '{"messages": [{"role": "assistant", "content": "x", "weight": -1}]}': "number of 0 or more",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "starts with a system or user",
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "'image_url' is not supported",
    '{"messages": [{"role": "assistant", "content": "y"}], "tools": [3]}': "must be a list of objects",
    '{"messages": [{"role": "assistant", "content": "y"}], "tools": "{"}': "'tools' is no JSON",
    '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}': "must be of functions",
    '{"messages": [{"role": "assistant", "tool_calls": {"function": {"name": "f", "arguments": "3"}}}]}': "no JSON",
    '{"messages": [{"role": "assistant", "content": "y"}], "chat_template_kwargs": 1}': "must be an object",
    '{"messages": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "y"}], "chat_template_kwargs": '
    '{"messages": []}}': "messages is no option of a template",
    '{"prompt": "x", "completion": ["y"]}': "two strings or two lists",
    '{"prompt": "x", "completion": ""}': "'completion' is empty",
    '{"conversations": [{"from": "gpt", "value": "x"}], "system": 3}': "'system' must be a string",
    '{"conversations": [{"from": "bird", "value": "x"}]}': "from 'bird' is not known",
    '{"conversations": [{"from": ["human"], "value": "x"}]}': r"from \['human'\] is not known",
    '{"messages": [{"role": "assistant", "content": "x", "weight": 1e39}]}': "finite float32 number of 0 or more",
    '{"messages": [{"role": "assistant", "content": "x", "weight": 1%s}]}' % ("0" * 400): "finite float32 number",
    '{"instruction": "x"}': "'output' must be a string",
    '{"text": ""}': "not empty",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_names_file_and_line(tmp_path, line):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n\n" + line + "\n")
    with pytest.raises(DataError, match=BAD[line]) as refused:
        load_examples(file, FakeTokenizer())
    assert str(refused.value).startswith(f"{file}:3: ")
    assert "\n" not in str(refused.value)
    kept = load_examples(file, FakeTokenizer(), skip_bad=True)
    assert [e.line for e in kept.examples] == [1]
    assert len(kept.skipped) == 1


def test_json_inside_of_json_that_is_nested_too_deeply_is_a_bad_line(tmp_path):
    deep, file = "[" * 10**5, tmp_path / "bad.jsonl"
    call = {"role": "assistant", "tool_calls": {"function": {"name": "f", "arguments": deep}}}
    file.write_text("\n".join(map(json.dumps, (
        {"messages": TURNS}, {"messages": [TURNS[0], call]}, {"messages": TURNS, "tools": deep},
    ))))  # fmt: skip
    read = load_examples(file, FakeTokenizer(), skip_bad=True)
    assert len(read) == 1 and len(read.skipped) == 2
    assert "'f' are no JSON object" in read.skipped[0] and "'tools' is no JSON" in read.skipped[1]


def test_what_the_template_refuses_names_the_line(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "system", "content": "x"}, *TURNS]}) + "\n")
    with pytest.raises(DataError, match=r"bad.jsonl:1: .*System role not supported"):
        load_examples(file, FakeTokenizer(GEMMA))


def test_files_that_hold_nothing(tmp_path):
    file = tmp_path / "x.jsonl"
    with pytest.raises(DataError, match="no such file"):
        load_examples(file, FakeTokenizer())
    with pytest.raises(DataError, match="is a folder"):
        load_examples(tmp_path, FakeTokenizer())
    file.write_text("\n \n")
    with pytest.raises(DataError, match="it is empty"):
        load_examples(file, FakeTokenizer())
    file.write_text("{\n")
    with pytest.raises(DataError, match="all 1 lines are bad"):
        load_examples(file, FakeTokenizer(), skip_bad=True)
    file.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(DataError, match=r"x.jsonl:1: not UTF-8"):
        load_examples(file, FakeTokenizer())


def test_too_long_is_refused_or_cut_by_name(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"messages": TURNS}) + "\n")
    whole = load_examples(file, FakeTokenizer()).examples[0]
    with pytest.raises(DataError, match=rf"x.jsonl:1: the example has {len(whole)} tokens, more than the 60"):
        load_examples(file, FakeTokenizer(), max_length=60)
    cut = load_examples(file, FakeTokenizer(), max_length=60, truncate=True)
    assert cut.truncated == 1
    assert cut.examples[0].ids == whole.ids[:60]
    with pytest.raises(DataError, match="nothing to train on is left"):
        load_examples(file, FakeTokenizer(), max_length=10, truncate=True)
