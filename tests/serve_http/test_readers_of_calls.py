"""Calls out of a reply's text, in every format, however the text is cut; what is no call stays text."""

import json

import pytest

from riftco.serve.calls import Call, Reader, Tool
from riftco.serve.calls.formats import Hermes, Llama
from riftco.serve.calls.xml import Xml

TOOLS = {
    "look": Tool("look", "", {"properties": {"where": {"type": "string"}, "n": {"type": "integer"}}}),
    "wait": Tool("wait"),
}  # fmt: skip
KEY = Call("look", '{"where": "under the mat"}')
WAIT = Call("wait", "{}")


def read(format, text, size, most=None):
    """(text, calls) of a reply that comes in pieces of `size` characters."""
    reader, parts = Reader(format, TOOLS, most), []
    for i in range(0, len(text), size):
        parts += reader.add(text[i : i + size])
    parts += reader.rest()
    return "".join(p for p in parts if isinstance(p, str)), [p for p in parts if isinstance(p, Call)]


def hermes(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


HERMES = {
    "one": (hermes("look", where="under the mat"), "", [KEY]),
    "text before": ("Let me see.\n\n" + hermes("wait"), "Let me see.", [WAIT]),
    "two": (hermes("look", where="under the mat") + "\n" + hermes("wait") + "\n", "", [KEY, WAIT]),
    "a mark in an argument": (hermes("wait", a="</tool_call>"), "", [Call("wait", '{"a": "</tool_call>"}')]),
    "no mark at the end": (hermes("wait").removesuffix("\n</tool_call>"), "", [WAIT]),
    "text behind": (hermes("wait") + "\nDone.", "Done.", [WAIT]),
    "no JSON": ("<tool_call>\nlook()\n</tool_call> ok", "<tool_call>\nlook()\n</tool_call> ok", []),
    "half of one": ('a <tool_call>{"name": "lo', 'a <tool_call>{"name": "lo', []),
    "of a tool that was not offered": (hermes("run"), hermes("run"), []),
    "arguments that are no object": ('<tool_call>{"name": "wait", "arguments": [1]}</tool_call>',) * 2 + ([],),
    "a tag of something else": ("a <tool> b\n", "a <tool> b\n", []),
    "arguments as a string of JSON": ('<tool_call>{"name": "wait", "arguments": "{}"}</tool_call>', "", [WAIT]),
    "a broken one, then another": ("<tool_call>x</tool_call>\n" + hermes("wait"), "<tool_call>x</tool_call>", [WAIT]),
}  # fmt: skip
LLAMA = {
    "one": ('{"name": "look", "parameters": {"where": "under the mat"}}', "", [KEY]),
    "behind its mark": ('<|python_tag|>{"name": "wait", "parameters": {}}', "", [WAIT]),
    "two": ('{"name": "wait", "parameters": {}}; {"name": "wait", "parameters": {}}', "", [WAIT, WAIT]),
    "JSON that is no call": ('{"name": "Ann", "parameters": 3} is she', '{"name": "Ann", "parameters": 3} is she', []),
    "in the middle of text": ('So: {"name": "wait", "parameters": {}}', 'So: {"name": "wait", "parameters": {}}', []),
    "half of one": ('{"name": "wait", "para', '{"name": "wait", "para', []),
    "its mark behind a call": (
        '{"name": "wait", "parameters": {}} <|python_tag|>{"name": "wait", "parameters": {}}', "", [WAIT, WAIT]
    ),
    "code": ('<|python_tag|>look.call("x")', 'look.call("x")', []),
}  # fmt: skip
XML = {
    "one": (
        "<tool_call>\n<function=look>\n<parameter=where>\nunder the mat\n</parameter>\n</function>\n</tool_call>",
        "", [KEY],
    ),
    "numbers and text of several lines": (
        "Yes.\n<tool_call>\n<function=look>\n<parameter=n>\n3\n</parameter>\n<parameter=where>\n12\n</b>\n</parameter>\n"
        "</function>\n</tool_call>", "Yes.", [Call("look", '{"n": 3, "where": "12\\n</b>"}')],
    ),
    "without its outer tag": ("<function=wait>\n</function>", "", [WAIT]),
    "two": ("<tool_call>\n<function=wait>\n</function>\n</tool_call>\n" * 2, "", [WAIT, WAIT]),
    "no number where there should be one": (
        "<function=look>\n<parameter=n>\nmany\n</parameter>\n</function>", "", [Call("look", '{"n": "many"}')]
    ),
    "another tool": ("<function=run>\n</function>", "<function=run>\n</function>", []),
    "half of one": ("<tool_call>\n<function=look>\n<parameter=n>\n3",) * 2 + ([],),
    "something else in its tag, then a call": (
        "<tool_call>\nx\n</tool_call>\n<function=wait>\n</function>", "<tool_call>\nx\n</tool_call>", [WAIT]
    ),
    "JSON in its tag": ('<tool_call>\n{"name": "wait"}\n</tool_call>',) * 2 + ([],),
}  # fmt: skip
ALL = [(f, name) for f, cases in ((Hermes(), HERMES), (Llama(), LLAMA), (Xml(), XML)) for name in cases]
OF = {Hermes: HERMES, Llama: LLAMA, Xml: XML}


@pytest.mark.parametrize("format,name", ALL, ids=lambda v: v if isinstance(v, str) else type(v).__name__)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_reply(format, name, size):
    said, text, calls = OF[type(format)][name]
    assert read(format, said, size) == (text, calls)


def test_no_more_than_may_be():
    assert read(Hermes(), hermes("wait") + hermes("wait") + "more", 2, most=1) == ("", [WAIT])


def test_text_is_shown_as_it_comes():
    reader = Reader(Hermes(), TOOLS)
    assert reader.add("So a <to") == ["So a"] and reader.add("y> b") == [" <toy> b"]


UNREADABLE = {
    "a name that is a list": '{"name": ["wait"], "arguments": {}}',
    "no number of JSON": '{"name": "wait", "arguments": {"a": NaN}}',
    "a number beyond all": '{"name": "wait", "arguments": {"a": 1e999}}',
    "the same in a string": json.dumps({"name": "wait", "arguments": '{"a": -Infinity}'}),
    "nested deeper than readers go": '{"name": "wait", "arguments": ' + '{"a":' * 500 + "1" + "}" * 500 + "}",
    "nested deeper than Python reads": '{"name": "wait", "arguments": ' + "[" * 20_000 + "}",
}


@pytest.mark.parametrize("json", UNREADABLE.values(), ids=UNREADABLE)
def test_what_no_client_could_read_is_text(json):
    assert read(Hermes(), f"<tool_call>{json}</tool_call>", 10_000) == (f"<tool_call>{json}</tool_call>", [])
    assert read(Llama(), json.replace("arguments", "parameters"), 10_000)[1] == []


def test_half_a_surrogate_pair_is_replaced():
    """Nothing that holds one can be sent."""
    text = '<tool_call>{"name": "wait", "arguments": {"a": "\\ud83d", "b": "\\ud83d\\ude00"}}</tool_call>'
    assert read(Hermes(), text, 9) == ("", [Call("wait", '{"a": "\ufffd", "b": "\U0001f600"}')])


@pytest.mark.parametrize("end", ["</function>\nx</tool_call>", "<parameter=b>\nhalf of", "</function></tool_call>"])
def test_long_calls_in_tags_are_read_in_no_time(end):
    """Broken ones, too: a reply that was cut off is searched for its end once, not once for each way to cut it."""
    body = "".join(f"<parameter=a{i}>\n{i}\n</parameter>\n" for i in range(2000))
    text = f"<tool_call>\n<function=wait>\n{body}{end}"
    shown, calls = read(Xml(), text, 1000)
    whole = end == "</function></tool_call>"
    assert len(calls) == whole and (shown == "" if whole else shown == text)
    if whole:
        assert json.loads(calls[0].arguments) == {f"a{i}": i for i in range(2000)}


def test_numbers_that_are_none_are_text_in_tags():
    text = "<function=wait><parameter=a>NaN</parameter><parameter=b>1e999</parameter></function>"
    assert read(Xml(), text, 7) == ("", [Call("wait", '{"a": "NaN", "b": "1e999"}')])


@pytest.mark.parametrize("format", [Hermes(), Xml()], ids=["Hermes", "Xml"])
def test_a_model_that_repeats_a_closing_mark_is_not_waited_for(format):
    """Each mark could be part of an argument, and all would be tried again for each token."""
    begins = '{"name": "wait", "arguments": {"a": "' if isinstance(format, Hermes) else "<function=wait><parameter=a>"
    reader, text, shown = Reader(format, TOOLS), f"<tool_call>{begins}", ""
    for piece in (text, *["</tool_call>"] * 100):
        shown += "".join(reader.add(piece))
    assert shown == text + "</tool_call>" * 100
