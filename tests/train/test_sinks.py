"""Where metrics go."""

import io
import json
import sys
import types

import pytest
from train.tiny import parts

from riftco.train import Evaluation, Schedule, Trainer
from riftco.train.sinks import Jsonl, Stdout, TensorBoard, WandB


def run(sink):
    model, optimizer, loader = parts()
    metrics = Trainer(model, optimizer, loader, Schedule(0.1, 3), sinks=[sink]).run().metrics
    sink.evaluation(3, Evaluation(loss=1.5, perplexity=4.5, accuracy=0.25, tokens=8))
    sink.close()
    return metrics


def test_stdout():
    out = io.StringIO()
    metrics = run(Stdout(out))
    lines = out.getvalue().splitlines()
    assert lines[0] == f"step 1 loss {metrics[0].loss:.4f} lr {metrics[0].lr:.2e}"
    assert lines[3] == "step 3 held-out loss 1.5000"


def test_jsonl_appends_what_a_metric_holds(tmp_path):
    path = tmp_path / "logs" / "m.jsonl"
    metrics = [*run(Jsonl(path)), *run(Jsonl(path))]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r for r in rows if "evaluation" not in r] == [m.asdict() for m in metrics]
    assert rows[3] == {"step": 3, "evaluation": {"loss": 1.5, "perplexity": 4.5, "accuracy": 0.25, "tokens": 8}}


def test_tensorboard(monkeypatch, tmp_path):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    metrics = run(TensorBoard(tmp_path))
    assert written[0] == str(tmp_path)
    assert ("train/loss", metrics[1].loss, 2) in written
    assert ("eval/perplexity", 4.5, 3) in written
    assert written[-1] == "closed"


def test_wandb(monkeypatch):
    logged = []

    class Logged:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append("finished")

    def init(project, config):
        logged.append((project, config))
        return Logged()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    metrics = run(WandB("mine", {"rank": 4}))
    assert logged[0] == ("mine", {"rank": 4})
    assert logged[1][0] == 1
    assert logged[1][1]["train/loss"] == metrics[0].loss
    assert logged[-2] == (3, {"eval/loss": 1.5, "eval/perplexity": 4.5, "eval/accuracy": 0.25, "eval/tokens": 8})
    assert logged[-1] == "finished"


@pytest.mark.parametrize(("name", "make"), [("torch.utils.tensorboard", TensorBoard), ("wandb", WandB)])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, name, make):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"needs a package: pip install (tensorboard|wandb)"):
        make("x")
