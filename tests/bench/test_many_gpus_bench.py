"""The bench of many GPUs on the tiny shape: one process here, two with gloo in the slow set."""

import os
import pathlib
import subprocess
import sys

import pytest

from riftco.bench import many_gpus, plot

ROOT = pathlib.Path(__file__).parents[2]
TINY = ("--size", "tiny", "--batch", "2", "--seq", "32", "--steps", "2", "--device", "cpu")


@pytest.mark.parametrize(("case", "named"), [("speed", "qlora"), ("full", "full")])
def test_one_process(case, named, tmp_path, capsys):
    out = tmp_path / "rows.csv"
    assert many_gpus.main([case, *TINY, "--out", str(out)]) == 0
    (row,) = plot.read(out)
    assert tuple(row) == many_gpus.COLUMNS and row["case"] == named and row["status"] == "ok"
    assert row["processes"] == "1" and float(row["last_loss"]) < float(row["first_loss"])
    assert float(row["tokens_s"]) == pytest.approx(64e3 / float(row["median_ms"]))
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes(tmp_path):
    out = tmp_path / "rows.csv"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, ROOT / "bench" / "many_gpus.py", "speed", *TINY, "--out", out],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [(r["case"], r["processes"], r["status"]) for r in plot.read(out)] == [
        ("qlora", "1", "ok"), ("qlora ddp", "2", "ok"), ("qlora fsdp", "2", "ok"),
    ]  # fmt: skip


def test_a_loss_that_cannot_be_right_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(many_gpus, "LEARNING_RATE", 10.0)
    assert many_gpus.main(["full", *TINY, "--out", str(tmp_path / "rows.csv")]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_running_out_of_memory_is_a_row(tmp_path, capsys, monkeypatch):
    def no_room(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr(many_gpus, "train", no_room)
    out = tmp_path / "rows.csv"
    assert many_gpus.main(["full", *TINY, "--out", str(out)]) == 0
    (row,) = plot.read(out)
    assert row["status"] == "out of memory" and "no room" in row["why"]
