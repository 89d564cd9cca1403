"""An engine on a CPU serves few rows by the compiled step: same replies, same learning; or it says why it does not."""

import logging
import pathlib
import re

import pytest
import torch
from objective import WINDOW, add, decoder, engine, prefill, tokens
from real_model import smollm2_or_skip
from test_scheduler import PROMPTS, answers

from riftco import cpu
from riftco.adapters import LoraSpec
from riftco.doctor.machine import device_state
from riftco.models import ModelError, load_model
from riftco.nn import NF4Linear
from riftco.serve import Batch, Engine, Request, Sampling, Scheduler, Teach
from riftco.train.use import explained

needs_compiler = pytest.mark.skipif(bool(cpu.why_not()), reason=cpu.why_not())
OTHER = LoraSpec(rank=3, alpha=2, target_modules=("o_proj", "up_proj", "lm_head"))


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"cache_dtype": "q8_0"}, {"page_size": 5}], ids=str)
def test_replies_are_those_of_python(options):
    """Several slots at once, adapters alone and together, guesses of several rows, versions promoted in between."""
    replies = []
    for compiled in (True, False):
        made = engine(compiled=compiled, **options)
        add(made, "b", OTHER, seed=3)
        scheduler = Scheduler(made, speculate=3)
        got, _ = answers(scheduler, [Request(p, max_new_tokens=8) for p in PROMPTS])
        sets = [{"a": 1.0}, {"a": 0.5, "b": 2.0}, {"b": 1.0}, {}]
        got += answers(scheduler, [Request(PROMPTS[i % 3], max_new_tokens=6, adapters=s) for i, s in enumerate(sets)])[
            0
        ]
        taught = Request(PROMPTS[0], max_new_tokens=3, teach=Teach("a", 1e-2, reply=[9, 9, 2]))
        (reply,), (end,) = answers(scheduler, [taught])
        assert end.learn.success and made.promote("a") == 2
        got += [reply, *answers(scheduler, [Request(PROMPTS[0], max_new_tokens=6, adapters={"a": 1.0})])[0]]
        replies.append((got, end.learn.loss_before))
        assert bool(made.compiled_steps.off) is not compiled
    assert replies[0][0] == replies[1][0] and replies[0][1] == pytest.approx(replies[1][1], rel=1e-4)


@needs_compiler
def test_a_row_has_the_same_bits_alone_and_in_company():
    """Unlike products of torch: a neighbour that comes or goes changes no bit of a decoding slot."""
    made = engine(compiled=True, cache_dtype="q8_0")
    for slot in range(3):
        prefill(made, slot, tokens(9, 1))
    alone = made.decode(Batch.of(0, 9, [3])).logits
    together = made.decode(Batch.join([Batch.of(1, 9, [3]), Batch.of(2, 9, [3, 4, 5, 6], output="all")])).logits
    assert torch.equal(alone[0], together[0]) and torch.equal(alone[0], together[1])


@needs_compiler
def test_more_rows_than_it_takes_are_read_in_python(monkeypatch):
    made = engine(compiled=True, chunk=64)
    monkeypatch.setattr("riftco.models.compiled.CompiledDecoder.logits", lambda *_: pytest.fail("too many rows"))
    prefill(made, 0, tokens(33, 1))


@needs_compiler
def test_a_hook_that_comes_later_sees_its_calls():
    made, calls = engine(compiled=True), []
    made.decode(Batch.of(0, 0, [1]))
    hook = made.model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    made.decode(Batch.of(0, 1, [1]))
    hook.remove()
    made.decode(Batch.of(0, 2, [1]))
    assert len(calls) == 1 and not made.compiled_steps.off


@needs_compiler
def test_sampling_and_penalties_see_the_same_logits():
    sampling = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=3)
    replies = []
    for compiled in (True, False):
        scheduler = Scheduler(engine(compiled=compiled))
        replies.append(answers(scheduler, [Request(PROMPTS[0], max_new_tokens=8, sampling=sampling)])[0])
    assert replies[0] == replies[1]


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine whose CXX names what is not there."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu._attempt.cache_clear()
    yield
    cpu._attempt.cache_clear()


def test_without_a_compiler_python_decodes_and_one_line_says_so(no_compiler, caplog):
    made = engine()
    with caplog.at_level(logging.WARNING):
        for position in range(3):
            made.decode(Batch.of(0, position, [1]))
    lines = [r.message for r in caplog.records if "decoding stays in Python" in r.message]
    assert len(lines) == 1 and "CXX names 'no-such-compiler', which is not there" in lines[0]
    assert made.compiled_steps.off in lines[0]
    with pytest.raises(ModelError, match="compiled=True: CXX names 'no-such-compiler'"):
        engine(compiled=True)


def test_explain_and_doctor_say_what_decodes(no_compiler, monkeypatch):
    (row,) = explained("cpu", "float32", "decode_step")
    assert row["implementation"] == "riftco.models.decoder:Decoder.hidden" and "no-such-compiler" in row["why"]
    assert "decoding stays in Python: CXX names 'no-such-compiler'" in device_state("cpu").detail
    monkeypatch.delenv("CXX")
    (row,) = explained("cpu", "float32", "decode_step")
    compiled = "compiled by" in row["why"]
    assert compiled is not bool(cpu.why_not()) and ("csrc/cpu" in row["implementation"]) is compiled
    assert not explained_on("cuda")


def explained_on(device: str) -> list[str]:
    return [row["op"] for row in explained(device, "float32", None) if row["op"] == "decode_step"]


def test_the_one_build_is_said_on_standard_error(monkeypatch, tmp_path, capsys):
    """How long it took, too; nothing is said where the library is there already."""

    def compiler(*arguments):
        if "-o" in arguments:
            pathlib.Path(arguments[-1]).write_bytes(b"built")
        return ""

    monkeypatch.setattr(cpu, "_run", compiler)
    monkeypatch.setattr(cpu, "compiler", lambda: "/usr/bin/g++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = cpu._built()
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first == "riftco: compiling the decoding on this CPU with /usr/bin/g++, once (some seconds)"
    assert re.fullmatch(rf"riftco: compiled in \d+\.\d s; kept as {re.escape(str(place))}", second) and not said.out
    assert cpu._built() == place and capsys.readouterr() == ("", "")
    place.write_bytes(b"half")
    cpu._built()
    assert len(capsys.readouterr().err.splitlines()) == 2, "one that is damaged is built again"


def test_a_compiler_that_fails_is_asked_once(monkeypatch, tmp_path):
    """What it said is in the line, and no half-made library stays."""
    asked, real = [], cpu._run
    monkeypatch.setattr(cpu, "why_not", lambda: "")
    monkeypatch.setattr(cpu, "FLAGS", ("--no-such-flag",))
    monkeypatch.setattr(cpu, "_run", lambda *a: asked.append(a) or real(*a))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    cpu._attempt.cache_clear()
    try:
        for _ in range(2):
            with pytest.raises(ModelError, match=r"compiled=True: .*false failed: no message"):
                engine(compiled=True)
        assert len(asked) == 1 and not list(tmp_path.rglob("*.so"))
    finally:
        cpu._attempt.cache_clear()


def test_a_model_that_it_is_not_made_for_is_named(caplog):
    model = decoder()
    model.model.layers[1].mlp.up_proj = NF4Linear.from_linear(model.model.layers[1].mlp.up_proj)
    made = Engine(model, window=WINDOW)
    made.decode(Batch.of(0, 0, [1]))
    assert cpu.why_not() or made.compiled_steps.off.startswith("model.layers.1.mlp.up_proj is a NF4Linear")
    assert Engine(decoder(), window=WINDOW, compiled=False).compiled_steps.off == "it is switched off"


@needs_compiler
def test_the_packed_model_of_the_quickstart():
    """SmolLM2 in the file's own blocks: the tokens of Python's decoding, and its logits."""
    model, tokenizer = load_model(smollm2_or_skip(), weights="packed")
    prompt, found = tokenizer.encode("The capital of France is a city that"), []
    for compiled in (True, False):
        made = Engine(model, window=64, cache_dtype="float32", compiled=compiled)
        logits = [made.decode(Batch.of(0, 0, prompt)).logits]
        for _ in range(10):
            logits.append(made.decode(Batch.of(0, len(made.slots[0].tokens), logits[-1].argmax(-1))).logits)
        found.append((torch.cat(logits), made.slots[0].tokens))
    (got, said), (want, wanted) = found
    assert said == wanted and float((got - want).norm() / want.norm()) < 2e-5
