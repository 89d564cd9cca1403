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
