"""Whole runs through Metal's launchers: pretraining, full, LoRA and QLoRA fine-tuning, evaluation; step for step what
the CPU gives.
"""

import json

import metal_emulator
import pytest
import support
from cli.conftest import METADATA, VOCABULARY
from tiny_models import hf_model, write_gguf
from typer.testing import CliRunner

import riftco.metal
from riftco.cli.app import app
from riftco.train.tiny import TinyRun, train_tiny

DEVICE = next(d for d in support.DEVICES if d.name == "mps-emulated")
pytestmark = pytest.mark.skipif(not DEVICE.available, reason=f"mps-emulated: {DEVICE.why_not}")
LOSS, NORM = 2e-5, 2e-4  # of themselves; what float32 leaves open in a few steps is a tenth of it
EVERY_RUN = {"attention_forward", "attention_backward", "rms_norm", "rope", "swiglu", "cross_entropy", "adam"}


@pytest.fixture
def launched(monkeypatch):
    """The shaders whose kernels were launched."""
    ops, names = riftco.metal.ops(), set()

    class Counting:
        def launch(self, source, *rest):
            names.add(of_source[source])
            return ops.launch(source, *rest)

    of_source = {riftco.metal.source(f.stem): f.stem for f in riftco.metal.CHECKOUT.glob("*.metal")}
    monkeypatch.setattr(riftco.metal, "ops", Counting)
    return names


def same(got, want):
    assert [g[0] for g in got] == pytest.approx([w[0] for w in want], rel=LOSS)
    assert [g[1] for g in got] == pytest.approx([w[1] for w in want], rel=NORM)
    assert got[-1][0] < got[0][0]


@pytest.mark.parametrize("attention,checkpointing", [
    ("flash", "disabled"), pytest.param("materialized", "block", marks=pytest.mark.slow),
])  # fmt: skip
def test_pretraining(launched, attention, checkpointing):
    run = TinyRun(3, attention=attention, activation_checkpointing=checkpointing)
    want = train_tiny(run)
    assert not launched
    with DEVICE.use(), support.poisoned():
        got = train_tiny(run)
    same(*([(m.loss, m.gradient_norm) for m in r.metrics] for r in (got, want)))
    for a, b in ((got.before, want.before), (got.after, want.after)):
        assert a.loss == pytest.approx(b.loss, rel=LOSS) and a.tokens == b.tokens
    flash = {"attention_forward", "attention_backward"}
    assert launched >= EVERY_RUN - (flash if attention == "materialized" else set()) | {"embedding"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model and a chat file."""
    folder = tmp_path_factory.mktemp("files")
    model = hf_model("llama-tied", vocab_size=VOCABULARY, max_position_embeddings=256)
    write_gguf(folder / "tiny.gguf", model, **METADATA)
    lines = [{"messages": [{"role": "user", "content": c}, {"role": "assistant", "content": c * 4}]} for c in "abcdef"]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder / "tiny.gguf", folder / "chat.jsonl"


def events(*words):
    done = CliRunner().invoke(app, [*map(str, words), "--device", "cpu", "--log-json"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_fine_tuning_and_evaluation(files, tmp_path, launched, method):
    model, chat = files
    words = ("finetune", "--model", model, "--data", chat, "--eval", chat, "--method", method, "--steps", 3)
    words = (*words, "--batch-tokens", 64, "--rank", 4, "--lr", 0.01, "--seed", 1)
    runs = []
    want = events(*words, "--output", tmp_path / "cpu")
    with DEVICE.use():
        got = events(*words, "--output", tmp_path / "metal")
        if method == "full":
            used = ("--model", tmp_path / "metal" / "model")
        else:
            used = ("--model", model, "--adapter", tmp_path / "metal" / "adapter")
        (evaluated,) = events("evaluate", *used, "--data", chat)
    for run in (got, want):
        steps = [(e["loss"], e["gradient_norm"]) for e in run if e["event"] == "step"]
        runs.append((steps, [e["loss"] for e in run if e["event"] == "evaluation"]))
    same(runs[0][0], runs[1][0])
    assert runs[0][1] == pytest.approx(runs[1][1], rel=LOSS)
    assert evaluated["loss"] == pytest.approx(runs[0][1][-1], rel=1e-4)
    more = {"full": set(), "lora": {"lora_linear"}, "qlora": {"lora_linear", "nf4"}}[method]
    assert launched >= EVERY_RUN | more


def test_a_wrong_kernel_shows_in_the_run(monkeypatch):
    """The comparison above can fail: a bug in the backward of the norm, which the loss of step 2 already shows."""
    real = riftco.metal.source
    broken = real("rms_norm").replace("(g - z * product -", "(g + z * product -")
    assert broken != real("rms_norm")
    monkeypatch.setattr(riftco.metal, "source", lambda name: broken if name == "rms_norm" else real(name))
    run = TinyRun(2)
    want = train_tiny(run)
    with DEVICE.use(), metal_emulator.schedule(1):
        got = train_tiny(run)
    with pytest.raises(AssertionError):
        same(*([(m.loss, m.gradient_norm) for m in r.metrics] for r in (got, want)))
