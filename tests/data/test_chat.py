"""Which tokens carry loss, on the four common templates; formats; bad lines."""

import json

import pytest
from data.fake_tokenizer import CHATML, END, GEMMA, TEMPLATES, FakeTokenizer

from riftco.data import DataError, load_examples, parse_record, render

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


def test_a_template_that_rewrites_earlier_turns_is_refused():
    forgetful = CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.last else 'x' }}")
    with pytest.raises(DataError, match="give each reply a line of its own"):
        render(parse_record({"messages": TURNS}), FakeTokenizer(forgetful))


BAD = {
    "{": "not valid JSON",
    '{"text": "\\ud83d"}': "surrogates not allowed",
    "[1]": "expected a JSON object",
    '{"prompt": 1}': "no known keys \\(prompt\\)",
    '{"messages": []}': "at least one message",
    '{"messages": [{"role": "robot", "content": "x"}]}': "role 'robot' is not known",
    '{"messages": [{"role": "user", "content": 3}]}': "'content' must be a string",
    '{"messages": [{"role": "user", "content": "x"}]}': "nothing to train on",
    '{"messages": [{"role": "user", "content": "x", "weight": 1}]}': "assistant messages only",
    '{"messages": [{"role": "assistant", "content": "x", "weight": -1}]}': "number of 0 or more",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "starts with a system or user",
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "'image_url' is not supported",
    '{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}': "'tools' definitions",
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
