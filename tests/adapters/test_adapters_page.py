"""The code of docs/adapters.md runs as it stands, from top to bottom, and its table is the specification."""

import dataclasses
import pathlib
import re

import pytest

from riftco.adapters import LoraSpec

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "adapters.md").read_text()


def test_its_code_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 3
    exec("\n".join(blocks), {})
    assert "of the base's norm" in capsys.readouterr().out
    made = {p.name for p in tmp_path.iterdir()}
    assert made == {"base", "adapter", "merged", "adapter.gguf", "base.gguf"}


def test_its_table_names_every_field():
    named = {n for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for n in re.findall(r"`(\w+)`", row)}
    assert named - {"LoraSpec"} == {f.name for f in dataclasses.fields(LoraSpec)}
