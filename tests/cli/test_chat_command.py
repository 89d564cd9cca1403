"""riftco chat reads its commands from a pipe, and says what a command that cannot be obeyed lacks."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from riftco.adapters.peft_files import read_adapter
from riftco.cli import chat as chat_command
from riftco.cli import serve
from riftco.cli.app import app
from riftco.models import load_model
from riftco.serve import LearnOutcome


def test_commands_are_read_whole(model):
    asked = "hi\n/learn\n/undone\n/undo x\n/learn aaaa\n/promote\n/undo\n/quit\n"
    given = ["chat", "--model", model, "--cache", "float32", "--max-new-tokens", "2", "--steps", "2"]
    said = CliRunner().invoke(app, given, input=asked)
    assert said.exit_code == 0, said.output
    assert "/learn TEXT" in said.stderr  # without TEXT it is no unknown command
    assert "/undone: no such command" in said.stderr  # and is no /undo
    assert "/undo takes a number; got 'x'" in said.stderr
    assert said.stdout.count("loss ") == 2
    assert "version 2 serves" in said.stdout and "back at step 1" in said.stdout


def test_a_fine_tuned_adapter_is_talked_with_and_learns_on(model, chat, tmp_path):
    run = tmp_path / "run"
    how = ["--steps", "1", "--warmup", "0", "--lr", "0.1", "--rank", "4", "--batch-tokens", "128", "--device", "cpu"]
    made = CliRunner().invoke(app, ["finetune", "--model", model, "--data", chat, "--output", str(run), *how])
    assert made.exit_code == 0, made.output
    folder, mine = run / "adapter", tmp_path / "mine"
    talk = ["chat", "--model", model, "--max-new-tokens", "2", "--cache", "float32", "--train-dir", str(mine)]
    said = CliRunner().invoke(app, [*talk, "--adapter", str(folder), "--steps", "1"], input="say a\n/learn bbbb\n")
    assert said.exit_code == 0 and said.stdout.count("loss ") == 1, said.output
    base, _ = load_model(model, with_tokenizer=False)
    _, wanted = read_adapter(folder, base)
    _, first = read_adapter(mine / "adapters" / "live" / "versions" / "1", base)
    assert any(t.any() for n, t in wanted.items() if "lora_B" in n)
    assert wanted.keys() == first.keys() and all(torch.equal(wanted[n], t) for n, t in first.items())
    said = CliRunner().invoke(app, [*talk, "--adapter", str(run)], input="")
    assert said.exit_code == 2 and f"did you mean {folder}?" in said.stderr


def test_what_a_chat_taught_is_where_a_server_looks(model, tmp_path):
    """Both go on with the same adapter of a folder, the server's default; another one is asked for by its id."""
    served = inspect.signature(serve.serve).parameters["adapter"].default
    talk = ["chat", "--model", model, "--max-new-tokens", "2", "--cache", "float32", "--train-dir", str(tmp_path)]
    for more, name in ([], served), (["--adapter-id", "other"], "other"):
        said = CliRunner().invoke(app, [*talk, *more, "--steps", "1"], input="say a\n/learn bbbb\n/promote\n")
        assert said.exit_code == 0 and "version 2 serves" in said.stdout, said.output
        assert (tmp_path / "adapters" / name / "versions" / "2").is_dir()
    assert {p.name for p in (tmp_path / "adapters").iterdir()} == {served, "other"}


@pytest.mark.parametrize("losses,told", [((0.03, 0.15, 1.5), True), ((3.0, 1.0, 0.2), False), ((0.03,), False)])
def test_steps_that_make_it_worse_are_told(losses, told, capsys):
    outcomes = [LearnOutcome(True, loss_before=loss, n_labelled=5, ms=1.0) for loss in losses]
    talk = SimpleNamespace(chat=SimpleNamespace(correct=lambda reply, lr, steps: outcomes))
    chat_command._do(talk, "/learn aaaa", 2e-3, len(losses))
    said = capsys.readouterr()
    assert said.out.count("loss ") == len(losses)
    assert ("the loss rose; /undo 3 takes that back, a smaller --lr may teach it" in said.err) == told
