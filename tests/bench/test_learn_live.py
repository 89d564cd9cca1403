"""The bench of learning beside serving, at its smallest."""

import csv

import pytest

from riftco.bench import learn_live


def test_a_run_writes_off_and_on(tmp_path):
    sizes = {"seconds": "0.05", "periods": "1", "slots": "3", "prompt": "20", "reply": "5", "tokens": "450"}
    options = [part for name, value in sizes.items() for part in (f"--{name}", value)]
    assert learn_live.main([*options, "--back-to-back", "--device", "cpu"], tmp_path) == 0
    (file,) = tmp_path.iterdir()
    with open(file) as f:
        off, on, at_once = csv.DictReader(f)
    assert (off["learning"], on["learning"], at_once["learning"]) == ("off", "on", "back to back")
    assert (off["learns"], on["learns"]) == ("0", "1") and int(at_once["learns"]) > 1
    assert float(on["first_loss"]) == pytest.approx(6.24, abs=0.4)  # ln 512
    assert float(on["longest_ms"]) >= float(on["learn_ms"]), "a neighbour waited while the reply was learned"
    for row in (off, on, at_once):
        assert int(row["tokens"]) > 0 and float(row["p50_ms"]) <= float(row["p95_ms"]) <= float(row["longest_ms"])
        assert row["commit"] and row["machine"]


def test_no_period_reads_a_neighbours_prompt(tmp_path, monkeypatch):
    """Answers that end within a period begin again over the rows that are there; so do all between two periods."""
    real, tickets = learn_live.Live._ask, []
    monkeypatch.setattr(learn_live.Live, "_ask", lambda live, slot: tickets.append(real(live, slot)) or tickets[-1])
    args = ["--seconds", "0.1", "--periods", "1", "--slots", "3", "--prompt", "20", "--reply", "5", "--tokens", "7"]
    assert learn_live.main([*args, "--device", "cpu"], tmp_path) == 0
    first, again = tickets[:2], [ticket.cached for ticket in tickets[2:] if ticket.tokens]
    assert [ticket.cached for ticket in first] == [0, 0] and len(again) >= 8 and set(again) == {19}


def test_a_learn_that_writes_a_neighbours_row_is_seen(monkeypatch):
    args = ["--seconds", "0.1", "--slots", "2", "--prompt", "6", "--device", "cpu"]
    real = learn_live.learn_once

    def careless(live):
        real(live)
        cache, place = live.engine.cache.layer(0)
        cache.layers[place].v[1, 2] += 1

    monkeypatch.setattr(learn_live, "learn_once", careless)
    with pytest.raises(RuntimeError, match="a learn changed rows of slot 1"):
        learn_live.main(args)
