"""Exit codes over all commands: 0 done, 1 failed or answered by no, 2 bad input or something that is not here."""

import json
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest
from typer.main import get_command

from riftco.cli import errors
from riftco.cli.app import app

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ("--model", "MODEL")
TRAIN = ("finetune", *MODEL, "--data", "CHAT", "--steps", "1", "--device", "cpu", "--warmup", "0")
MEMORY = ("memory", *MODEL, "--device", "cpu", "--tokens", "64", "--activation-checkpointing", "block")
TABLE = [
    (("--version",), 0),
    (("--version", "--json"), 0),
    (("--json",), 2),
    ((), 2),
    (("--",), 2),
    (("nose",), 2),
    (("quickstart", "--device", "nose"), 2),
    ((*TRAIN, "--output", "run", "--method", "lora"), 0),
    ((*TRAIN, "--output", "other", "--lr", "-1"), 2),
    ((*TRAIN, "--output", "other", "--lr", "many"), 2),
    (("evaluate", *MODEL, "--adapter", "run/adapter", "--data", "CHAT"), 0),
    (("evaluate", *MODEL, "--data", "nowhere.jsonl"), 2),
    (("train-tiny", "--steps", "1"), 0),
    (("train-tiny", "--steps", "0"), 2),
    (("chat", *MODEL, "--cache", "float16"), 0),
    (("chat", "--model", "nowhere"), 2),
    (("serve", *MODEL, "--host", "0.0.0.0"), 2),
    (("generate", *MODEL, "--prompt", "a", "--max-new-tokens", "1"), 0),
    (("generate", *MODEL), 2),
    (("merge", *MODEL, "--adapter", "run/adapter", "--output", "merged"), 0),
    (("merge", *MODEL, "--adapter", "run/adapter", "--output", "merged"), 2),  # it is there already
    (("export", *MODEL, "--output", "out.gguf", "--dtype", "fp16"), 0),
    (("export", *MODEL, "--output", "more.gguf", "--format", "nose"), 2),
    (("quantize", *MODEL, "--type", "nf4", "--output", "small"), 0),
    (("quantize", *MODEL, "--type", "nose", "--output", "smaller"), 2),
    ((*MEMORY, "--budget", "4MiB"), 0),
    ((*MEMORY, "--budget", "1KiB"), 1),
    (("memory", *MODEL, "--budget", "much"), 2),
    (("explain", "--op", "rope"), 0),
    (("explain", "--op", "nose"), 2),
    (("doctor", "--device", "cpu", "--op", "rope"), 0),
    (("doctor", "--device", "nose"), 2),
    (("data", "inspect", "CHAT", *MODEL), 0),
    (("data", "inspect", "nowhere.jsonl", *MODEL), 2),
    (("bench", "ops", "--help"), 0),
    *[(("bench", name, "--nose"), 2) for name in get_command(app).commands["bench"].commands],
]


def test_over_all_commands(riftco, model, chat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": model, "CHAT": chat}
    for args, code in TABLE:
        done = riftco(*(names.get(a, a) for a in args), code=code)
        assert "Traceback" not in done.stderr, args
        assert code != 2 or (done.stderr + done.stdout).strip(), args


def test_no_command_is_left_out():
    for name, command in get_command(app).commands.items():
        rows = [code for args, code in TABLE if args[:1] == (name,)]
        assert 2 in rows, name
        assert 0 in rows or name in ("quickstart", "serve"), f"{name}: these two have tests of their own"
        for inner in getattr(command, "commands", ()):
            assert any(args[:2] == (name, inner) for args, _ in TABLE), f"{name} {inner}"


@pytest.mark.parametrize(
    ("missing", "command", "how"),
    [
        ("fastapi", ("serve", *MODEL), "pip install 'riftco[serve]'"),
        ("uvicorn", ("serve", *MODEL), "pip install 'riftco[serve]'"),
        ("httpx", ("bench", "serve-load"), "pip install 'riftco[bench]'"),
        ("tokenizers", ("evaluate", *MODEL, "--data", "CHAT"), "pip install 'riftco[finetune]'"),
        ("gguf", ("evaluate", *MODEL, "--data", "CHAT"), "pip install 'riftco[finetune]'"),
        ("tensorboard", (*TRAIN, "--output", "run", "--tensorboard", "tb"), "pip install tensorboard"),
        ("wandb", (*TRAIN, "--output", "run", "--wandb", "tb"), "pip install wandb"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    riftco, model, chat, tmp_path, monkeypatch, missing, command, how
):
    monkeypatch.chdir(tmp_path)
    for name in [n for n in sys.modules if n.startswith((f"{missing}.", "riftco.serve.http", "riftco.bench.serve"))]:
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:  # afterwards it has this one again, not what the command imports anew
            monkeypatch.setattr(sys.modules[parent], child, sys.modules[name], raising=False)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    done = riftco(*({"MODEL": model, "CHAT": chat}.get(a, a) for a in command), code=2)
    assert missing in done.stderr and done.stderr.rstrip().endswith(how), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_the_extras_are_pyprojects():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in errors.EXTRAS.items():
        packages = {p.replace("-", "_") for p in extras[extra] if not p.startswith("riftco[")}
        assert packages <= set(modules), extra
        assert set(modules) - packages <= {"starlette"}, extra  # FastAPI's own
    assert errors.install("peft.tuners") == "pip install peft"


FINETUNE = (*TRAIN[:-6], "--output", "run", "--device", "cpu", "--steps", "500", "--batch-tokens", "32")


@pytest.mark.parametrize(
    "args",
    [("train-tiny", "--steps", "5000"), pytest.param(FINETUNE, marks=pytest.mark.slow)],
    ids=lambda args: args[0],
)
def test_a_reader_that_goes_ends_a_run_quietly(model, chat, tmp_path, args):
    command = [sys.executable, "-m", "riftco", *({"MODEL": model, "CHAT": chat}.get(a, a) for a in args), "--log-json"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "event" in json.loads(run.stdout.readline())
    run.stdout.close()
    assert (run.wait(60), run.stderr.read()) == (errors.FAILED, "")
    run.stderr.close()


def test_a_pipe_that_breaks_elsewhere_is_said(capsys):
    @errors.command
    def breaks():
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(errors.typer.Exit) as ended:
        breaks()
    assert ended.value.exit_code == errors.FAILED and "Broken pipe" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_by_the_commands_name(shell):
    env = {k: v for k, v in os.environ.items() if not k.startswith("_RIFTCO")}
    env["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # the shell that is named, whoever started this process
    python = [sys.executable, "-m", "riftco"]
    script = subprocess.run([*python, "--show-completion", shell], cwd=ROOT, capture_output=True, text=True, env=env)
    assert script.returncode == 0 and "_RIFTCO_COMPLETE=" in script.stdout and "-m" not in script.stdout.split()
    if shell == "bash":
        asked = {**env, "_RIFTCO_COMPLETE": "complete_bash", "COMP_WORDS": "riftco memory --bud", "COMP_CWORD": "2"}
        done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, env=asked)
        assert done.stdout.split() == ["--budget"]
