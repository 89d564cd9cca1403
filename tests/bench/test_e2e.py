"""The training-step bench on the tiny shape: checks come before times, rows are complete."""

import warnings

import pytest
import torch
from train.test_step_graph import StandIn

from riftco.bench import e2e, plot


@pytest.fixture
def bench(tmp_path, capsys):
    def go(*argv):
        out = tmp_path / "e2e.csv"
        argv = ["--size", "tiny", "--seq", "32", "--steps", "3", "--device", "cpu", "--out", str(out), *argv]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="transformers|peft|bitsandbytes")  # theirs, about themselves
            status = e2e.main(argv)
        return status, plot.read(out), capsys.readouterr().out

    return go


@pytest.mark.parametrize("options", [("--method", "qlora"), ("--method", "lora", "--checkpointing")])
def test_a_step_is_measured(bench, options):
    status, (row,), text = bench(*options, "--peers")
    assert status == 0 and row["status"] == "ok" and row["competitor"] == "riftco"
    assert float(row["tokens_s"]) == pytest.approx(32e3 / float(row["median_ms"]))
    assert 0 < float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"]) and row["steps"] == "3"
    assert float(row["peak_gib"]) > float(row["weights_gib"]) > 0
    assert float(row["last_loss"]) < float(row["first_loss"])
    assert all(row[c] for c in ("machine", "date", "commit", "torch", "dtype", "method", "checkpointing", "layers"))
    assert tuple(row) == e2e.COLUMNS and "tokens/s" in text


def test_peers_are_named_with_the_reason(bench):
    _, rows, text = bench("--method", "lora")
    by = {r["competitor"]: r for r in rows}
    assert set(by) == set(e2e.COMPETITORS)
    assert by["riftco graph"]["status"] == "missing" and "need a CUDA device" in by["riftco graph"]["why"]
    liger = by["transformers+Liger"]
    assert liger["status"] == "missing" and liger["why"] in text and liger["tokens_s"] == ""
    assert by["transformers"]["status"] == "ok" or by["transformers"]["why"].endswith("not installed")


@pytest.fixture
def recorded(monkeypatch):
    """A stand-in for a CUDA graph; the trainers that were made with it."""
    real, made = e2e.graph_trainer, []

    def graph_trainer(model, *rest):
        monkeypatch.setattr(e2e, "_capture", lambda: StandIn(model))
        made.append(real(model, *rest))
        return made[-1]

    monkeypatch.setattr(e2e, "graph_trainer", graph_trainer)
    monkeypatch.setattr(e2e, "_capture", lambda: StandIn(None))
    return made


@pytest.mark.parametrize("options", [("--method", "qlora"), ("--method", "lora", "--checkpointing")])
def test_a_graphs_step_is_the_trainers(bench, recorded, options):
    status, rows, text = bench(*options, "--peers", "riftco graph", "--batch", "2")
    eager, graph = rows
    assert status == 0 and (eager["competitor"], graph["competitor"]) == e2e.OURS and graph["status"] == "ok", text
    assert float(graph["first_loss"]) == pytest.approx(float(eager["first_loss"]), rel=1e-5)
    assert float(graph["last_loss"]) == pytest.approx(float(eager["last_loss"]), rel=1e-3)
    (trainer,) = recorded
    counts = trainer.step_graph.eager, trainer.step_graph.captured, trainer.step_graph.replayed
    assert counts == (1, 1, trainer.step - 1) and trainer.step == e2e.WARM_UP + 1 + 3
    assert trainer.optimizer.gradient_clip == 1.0 and trainer.optimizer.form in ("paged", "contiguous")
    adapters = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    assert float(graph["peak_gib"]) * 2**30 >= float(graph["weights_gib"]) * 2**30 + 2**20 + adapters
    assert float(graph["tokens_s"]) == pytest.approx(64e3 / float(graph["median_ms"]))


def test_a_graph_that_learns_otherwise_is_not_timed(bench, recorded, monkeypatch):
    real = e2e.graph_trainer

    def half_as_fast(*rest):
        made = real(*rest)
        made.schedule = type(made.schedule)(e2e.LEARNING_RATE / 2, e2e.MOST_STEPS, "constant")
        return made

    monkeypatch.setattr(e2e, "graph_trainer", half_as_fast)
    status, (_, row), _ = bench("--peers", "riftco graph")
    assert status == 1 and row["status"] == "wrong" and "the eager one" in row["why"] and row["tokens_s"] == ""


def test_a_step_that_is_not_replayed_is_not_timed(bench, monkeypatch):
    monkeypatch.setattr("riftco.train.capture.CudaCapture.why_not", lambda self, device: "")
    monkeypatch.setattr(e2e.torch.cuda, "device", no_capture)
    status, (_, row), _ = bench("--peers", "riftco graph")
    assert status == 1 and row["status"] == "wrong" and "steps are eager: nothing here records" in row["why"]


def no_capture(device):
    from riftco.train.capture import CannotCapture

    raise CannotCapture("nothing here records")


def test_no_speed_while_the_model_is_red(bench, monkeypatch):
    from riftco import models

    real = models.Decoder.loss
    monkeypatch.setattr(models.Decoder, "loss", lambda self, *a, **k: 1.001 * real(self, *a, **k))
    status, (row,), text = bench("--peers")
    assert status == 1 and row["status"] == "red" and row["tokens_s"] == ""
    assert "RED" in text and "loss is off by 1.0e-03" in row["why"]


def test_a_wrong_loss_is_not_timed(bench, monkeypatch):
    def make(shape, *rest):
        model = torch.nn.Linear(2, 2)
        return model, lambda ids: model.weight.square().sum()

    monkeypatch.setattr(e2e, "disagreement", lambda: "")
    monkeypatch.setitem(e2e.COMPETITORS, "riftco", (make, ()))
    status, (row,), _ = bench("--peers")
    assert status == 1 and row["status"] == "wrong" and "ln V = 6.238" in row["why"]


def test_a_failure_is_reported(bench, monkeypatch):
    def make(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setitem(e2e.COMPETITORS, "riftco", (make, ()))
    status, (row,), text = bench("--peers")
    assert status == 1 and row["status"] == "failed" and "no room" in row["why"] and "no room" in text
