"""riftco chat reads its commands from a pipe, and says what a command that cannot be obeyed lacks."""

from typer.testing import CliRunner

from riftco.cli.app import app


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
