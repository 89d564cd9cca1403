"""The bench of decoding, at its smallest: replies are compared before anything is timed."""

import csv

import pytest

from riftco.bench import decode

ARGS = ["--device", "cpu", "--slots", "1", "3", "--contexts", "20", "--tokens", "6", "--cache", "float32"]


@pytest.mark.parametrize("method", ["dense", "nf4"])
def test_rows(tmp_path, method):
    out = tmp_path / "rows.csv"
    assert decode.main([*ARGS, "--method", method, "--out", str(out)]) == 0
    with open(out) as f:
        rows = list(csv.DictReader(f))
    assert [(r["slots"], r["graphs"]) for r in rows] == [(slots, "off: no GPU") for slots in "1133"]
    for row in rows:
        assert int(row["tokens"]) == 6 * int(row["slots"]) and float(row["tokens_s"]) > 0
        assert float(row["of_bound"]) == pytest.approx(float(row["tokens_s"]) / float(row["bound_tokens_s"]))
        assert float(row["read_gib"]) > 0 and row["commit"] and row["method"] == method
    assert float(rows[2]["read_gib"]) > float(rows[0]["read_gib"])


def test_replies_that_differ_are_not_timed(tmp_path, monkeypatch):
    real = decode.decode

    def other(scheduler, *rest):
        replies, times = real(scheduler, *rest)
        made.append(1)
        return ([[*replies[0], 1], *replies[1:]] if len(made) % 2 == 0 else replies), times

    made = []
    monkeypatch.setattr(decode, "decode", other)
    out = tmp_path / "rows.csv"
    assert decode.main([*ARGS, "--out", str(out)]) == 1
    with open(out) as f:
        rows = list(csv.DictReader(f))
    assert rows[0]["status"] == "ok" and {row["status"] for row in rows[1:]} == {"wrong", "ok"}
    assert (rows[1]["status"], rows[1]["why"], rows[1]["tokens_s"]) == (
        "wrong",
        "1 of 1 replies differ from the steps before",
        "",
    )


def test_kernels_of_a_step_come_slowest_first(tmp_path, monkeypatch):
    real = decode.measure

    def profiled(*args):
        return real(*args) | {"profile": {"norm": (2.0, 3), "product": (9.0, 4)}}

    monkeypatch.setattr(decode, "measure", profiled)
    profile = tmp_path / "kernels.csv"
    assert decode.main([*ARGS, "--graphs", "off", "--out", str(tmp_path / "rows.csv"), "--profile", str(profile)]) == 0
    with open(profile) as f:
        rows = list(csv.DictReader(f))
    assert [(r["slots"], r["kernel"], r["us"], r["launches"]) for r in rows] == [
        (slots, *kernel) for slots in "13" for kernel in (("product", "9.0", "4"), ("norm", "2.0", "3"))
    ]
    assert all(row["commit"] and row["context"] == "20" for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_kernels_on_a_gpu(tmp_path, graphs):
    out, profile = tmp_path / "rows.csv", tmp_path / "kernels.csv"
    args = ["--slots", "2", "--contexts", "20", "--tokens", "6", "--graphs", graphs]
    assert decode.main([*args, "--out", str(out), "--profile", str(profile)]) == 0
    with open(out) as f, open(profile) as g:
        (row,), kernels = csv.DictReader(f), list(csv.DictReader(g))
    assert int(row["kernels"]) == sum(int(k["launches"]) for k in kernels) > 16, "8 of each of 2 layers, and the rest"
    assert any("_cached_decode" in k["kernel"] for k in kernels) and row["graphs"].startswith(graphs)
