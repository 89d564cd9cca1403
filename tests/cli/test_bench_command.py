"""riftco bench hands its options on."""

import csv
import importlib

import pytest

from riftco.cli.bench import BENCHES

LIVE = [
    "--seconds",
    "0.1",
    "--periods",
    "1",
    "--slots",
    "2",
    "--prompt",
    "6",
    "--reply",
    "3",
    "--tokens",
    "5",
    "--device",
    "cpu",
]


def test_learn_live_writes_its_rows(riftco, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = riftco("bench", "learn-live", *LIVE).stdout
    assert "learning off" in said and "learning on" in said
    (file,) = (tmp_path / "bench-results").iterdir()
    with open(file) as f:
        assert [row["learning"] for row in csv.DictReader(f)] == ["off", "on"]


def test_the_overview_names_all(riftco):
    said = riftco("bench", "--help").stdout
    assert all(name in said for name in BENCHES)


@pytest.mark.parametrize("name", BENCHES)
def test_each_explains_its_own_options(riftco, capfd, name):
    riftco("bench", name, "--help")


def test_a_bad_option_is_refused(riftco):
    riftco("bench", "decode", "--nose", code=2)


@pytest.mark.parametrize("name", BENCHES)
def test_usage_is_what_one_types(name, capsys):
    main = importlib.import_module(f"riftco.bench.{BENCHES[name][0]}").main
    with pytest.raises(SystemExit):
        main(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: riftco bench {name} ")
