"""riftco finetune in two processes: the files of one; one is killed, and any number goes on."""

import json
import pathlib
import signal
import time

import pytest
import torch
from processes import ended, start
from safetensors.torch import load_file

COMMON = (
    "--batch-tokens", 64, "--accumulate", 2, "--save-every", 2, "--rank", 4, "--lr", 1e-2, "--device", "cpu",
    "--schedule", "constant", "--warmup", 0,
)  # fmt: skip
STEPS = 8


def lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(path: pathlib.Path, count: int, processes) -> None:
    end = time.monotonic() + 100
    while len(lines(path)) < count and time.monotonic() < end:
        assert all(p.poll() is None for p in processes), ended(processes)
        time.sleep(0.02)


def by_step(path: pathlib.Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in lines(path) if "loss" in row}


@pytest.mark.parametrize(
    "method", ["full", pytest.param("qlora", marks=pytest.mark.slow), pytest.param("cut", marks=pytest.mark.slow)]
)
def test_a_killed_process_ends_all_and_any_number_goes_on(model, chat, tmp_path, riftco, method):
    how = ("--method", "qlora", "--parallel", "fsdp") if method == "cut" else ("--method", method)
    run = ("finetune", "--model", model, "--data", chat, *how, *COMMON, "--eval", chat)
    one, two = tmp_path / "one", tmp_path / "two"
    riftco(*run, "--steps", STEPS, "--output", one, "--metrics", tmp_path / "one.jsonl")

    metrics = tmp_path / "two.jsonl"
    slowly = ("--steps", STEPS, "--output", two, "--metrics", metrics, "--duty-cycle", 0.1)
    processes = start(2, "-m", "riftco", *run, *slowly)
    until(metrics, 3, processes)
    processes[1].kill()
    (status, said, why), (killed, nothing, _) = ended(processes, 60)
    assert (status, killed) == (1, -signal.SIGKILL) and len(by_step(metrics)) < STEPS
    assert "process 1 ended without a word" in why and "--resume goes on" in why and "Traceback" not in why
    assert "step 1/" in said and nothing == "", "only the first process prints"

    riftco("finetune", "--resume", "--output", two, "--steps", STEPS - 2, "--duty-cycle", 1.0)
    for status, _, errors in ended(start(2, "-m", "riftco", "finetune", "--resume", "--output", two, "--steps", STEPS)):
        assert status == 0, errors

    expected, ours = by_step(tmp_path / "one.jsonl"), by_step(metrics)
    assert sorted(ours) == sorted(expected) == list(range(1, STEPS + 1))
    assert [ours[s] for s in sorted(ours)] == pytest.approx([expected[s] for s in sorted(expected)], rel=2e-5)
    assert {p.relative_to(two) for p in two.rglob("*")} == {p.relative_to(one) for p in one.rglob("*")}
    for file in one.rglob("*.safetensors"):
        theirs = load_file(two / file.relative_to(one))
        for name, tensor in load_file(file).items():
            if not name.startswith("random."):
                torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_behind_a_checkpoint(model, chat, tmp_path):
    metrics, output = tmp_path / "metrics.jsonl", tmp_path / "run"
    run = ("finetune", "--model", model, "--data", chat, *COMMON, "--steps", 50, "--output", output)
    processes = start(2, "-m", "riftco", *run, "--metrics", metrics, "--duty-cycle", 0.2)
    until(metrics, 3, processes)
    processes[1].send_signal(signal.SIGTERM)
    (status, said, _), (other, _, _) = ended(processes, 60)
    assert status == other == 130 and "go on with: riftco finetune --resume" in said
    newest = max(p.name for p in (output / "checkpoints").iterdir())
    assert int(newest.removeprefix("step-")) == max(by_step(metrics))


@pytest.mark.slow
def test_a_refusal_is_printed_once(model, chat, tmp_path):
    run = ("finetune", "--model", model, "--data", chat, *COMMON, "--output", tmp_path / "run", "--accumulate", 1)
    found = ended(start(2, "-m", "riftco", *run), 60)
    assert [status for status, _, _ in found] == [2, 2]
    assert "--accumulate 1: a step of so many micro-batches" in found[0][2] and found[1][1:] == ("", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_other_commands_are_not_for_several_processes(monkeypatch, riftco, rank):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    said = riftco("quickstart", code=2).stderr
    assert ("only finetune and bench share work among" in said) == (rank == 0) and (rank == 0 or not said)
