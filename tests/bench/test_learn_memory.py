"""The bench of a learn's memory and time, at its smallest."""

import csv

import pytest

from riftco.bench import learn_memory
from riftco.serve import Engine

ARGS = ["--device", "cpu", "--windows", "40", "64", "--reply", "20", "--chunk", "8", "--slots", "2", "--repeats", "1"]


def rows(tmp_path, *more, status=0):
    out = tmp_path / "rows.csv"
    assert learn_memory.main([*ARGS, *more, "--out", str(out)]) == status
    with open(out) as f:
        return list(csv.DictReader(f))


@pytest.mark.parametrize("method", ["dense", "nf4"])
def test_a_row_for_each_window(tmp_path, method):
    small, large = rows(tmp_path, "--method", method, "--recompute")
    assert (small["window"], large["window"], small["slots"], small["method"]) == ("40", "64", "2", method)
    assert int(large["prefix"]) == 64 - 20 - 1
    assert float(large["cache_gib"]) > float(small["cache_gib"]) and small["adjoint_mib"] == large["adjoint_mib"]
    for row in (small, large):
        assert float(row["cosine"]) > 0.9999 and float(row["norm_ratio"]) == pytest.approx(1, abs=1e-3)
        assert float(row["last_loss"]) < float(row["first_loss"])
        assert float(row["ratio"]) == pytest.approx(float(row["learn_ms"]) / float(row["plain_ms"]))
        assert all(row[name] for name in learn_memory.COLUMNS if name != "why") and row["status"] == "ok"


def test_a_learn_that_is_wrong_is_not_timed(monkeypatch, tmp_path):
    real = learn_memory.Lesson.gradients

    def other(self):
        loss = real(self)
        for p in self.engine.bank.shadow(learn_memory.ADAPTER).values():
            p.grad.mul_(1.1)
        return loss

    monkeypatch.setattr(learn_memory.Lesson, "gradients", other)
    small, large = rows(tmp_path, status=1)
    assert small["status"] == large["status"] == "wrong" and "differ from one graph's" in small["why"]
    assert small["learn_ms"] == "" == small["learn_peak_mib"]


def test_a_refused_learn_is_said(monkeypatch, tmp_path):
    real = Engine.learn
    monkeypatch.setattr(Engine, "learn", lambda self, *a, **k: real(self, *a, **{**k, "lr": 9.0}))
    assert all("lr must be" in row["why"] for row in rows(tmp_path, status=1))
