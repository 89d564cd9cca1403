"""Cancellation from the command line, early stopping, and the best weights."""

import json
import signal

import pytest
import torch
from cli.test_finetune import SMALL, events, losses
from safetensors.torch import load_file


@pytest.mark.parametrize("at", [(3, 1), (3, 2), (3, 3)])
def test_a_signal_stops_after_the_micro_batch_and_the_period_is_whole_or_gone(
    riftco, model, chat, tmp_path, monkeypatch, at
):
    """Micro-batch 1 or 2 of 3: the step is as if it had not begun; 3 of 3: it stays. No evaluation follows."""
    from riftco.models import Decoder

    options = (
        "--model", model, "--data", chat, *SMALL, "--accumulate", 3, "--dropout", 0.2, "--log-json", "--eval", chat,
        "--eval-every", 3,
    )  # fmt: skip
    whole = losses(riftco("finetune", *options, "--output", tmp_path / "whole"))
    real, calls = Decoder.loss, []

    def loss(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == (at[0] - 1) * 3 + at[1]:
            signal.raise_signal(signal.SIGINT)
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "loss", loss)
        stopped = riftco("finetune", *options, "--output", tmp_path / "run", code=130)
    done = 3 if at[1] == 3 else 2
    assert losses(stopped) == whole[:done]
    assert len(calls) == 6 + at[1], "remaining micro-batches are skipped"
    assert [e["name"] for e in events(stopped) if e["event"] == "evaluation"] == ["before training"]
    assert f"stopped at step {done} of 6" in stopped.stdout
    rest = riftco("finetune", "--resume", "--output", tmp_path / "run", "--log-json")
    assert losses(rest) == whole[done:]
    named = [e["name"] for e in events(rest) if e["event"] == "evaluation"]
    assert named == ["step 3", "step 6", "after training"], "the evaluation that the signal left out comes first"
    a, b = (load_file(tmp_path / f / "adapter" / "adapter_model.safetensors") for f in ("whole", "run"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def scripted(monkeypatch, values):
    """The evaluations on the way return these losses."""
    from riftco.train.metrics import Evaluation

    left = list(values)
    monkeypatch.setattr(
        "riftco.train.run.evaluate", lambda *args: Evaluation(loss=left.pop(0), perplexity=1.0, accuracy=0.0, tokens=1)
    )


@pytest.mark.parametrize("method", ["lora", "full"])
def test_early_stopping_and_the_best_weights(riftco, model, chat, tmp_path, monkeypatch, method):
    run, held = tmp_path / "run", ("--eval", chat, "--eval-every", 1, "--method", method)
    options = ("--model", model, "--data", chat, *SMALL, "--steps", 20, "--log-json")
    scripted(monkeypatch, [9.0, 5.0, 3.0, 4.0, 3.5, 3.0, 3.0])  # before; steps 1 to 5; after
    done = riftco(
        "finetune", *options, *held, "--output", run, "--early-stopping", 3, "--keep-best", "--keep", 1,
        "--metrics", tmp_path / "m.jsonl",
    )  # fmt: skip
    assert [s for s, _, _ in losses(done)] == [1, 2, 3, 4, 5]
    assert "stopped early at step 5: held-out loss 3.0000 of step 2 was not reached in 3 evaluations" in done.stdout
    assert "the result is that of step 2" in done.stdout
    assert {f.name for f in (run / "checkpoints").iterdir()} == {"step-00000002", "step-00000005"}
    if method == "lora":
        best = load_file(run / "checkpoints" / "step-00000002" / "adapter_model.safetensors")
        got = load_file(run / "adapter" / "adapter_model.safetensors")
    else:
        best = load_file(run / "checkpoints" / "step-00000002" / "trainable.safetensors")
        got = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(got[k], best[k]) for k in got)
    rows = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4, 5]
    assert [r["evaluation"]["loss"] for r in rows if "evaluation" in r] == [9.0, 5.0, 3.0, 4.0, 3.5, 3.0, 3.0]
    again = riftco("finetune", "--resume", "--output", run, code=2)
    assert "this run stopped early at step 5" in again.stderr


def test_what_was_judged_survives_a_resume(riftco, model, chat, tmp_path, monkeypatch):
    run = tmp_path / "run"
    options = ("--model", model, "--data", chat, *SMALL, "--steps", 3, "--schedule", "constant", "--log-json")
    scripted(monkeypatch, [9.0, 3.0, 4.0, 4.0, 4.0])
    riftco(
        "finetune", *options, "--output", run, "--eval", chat, "--eval-every", 1, "--early-stopping", 3, "--keep-best"
    )
    scripted(monkeypatch, [4.0, 4.0])
    rest = riftco("finetune", "--resume", "--output", run, "--steps", 20, "--log-json")
    assert [s for s, _, _ in losses(rest)] == [4], "two of three were counted before"
    assert "of step 1 was not reached in 3 evaluations" in rest.stdout


def test_options_that_need_evaluations(riftco, model, chat, tmp_path):
    for flag in (("--early-stopping", 2), ("--keep-best",)):
        text = riftco("finetune", "--model", model, "--data", chat, "--output", tmp_path / "r", *flag, code=2).stderr
        assert f"{flag[0]} needs evaluations: give --eval-every" in text
