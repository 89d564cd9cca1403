"""The registry of families and the table of docs/models.md that is made of it."""

import families
import pytest
from tiny_models import hf_config


def test_the_page_has_the_table():
    assert families.PAGE.read_text() == families.written(), "run: python tests/families.py"


def test_every_config_is_one_of_transformers_and_in_one_row():
    rows = [name for configs in families.ROWS.values() for name in configs]
    assert sorted(rows) == sorted(families.FAMILIES)
    for name, (kind, _) in families.FAMILIES.items():
        assert hf_config(name).model_type == kind


def test_names_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="'speed' is no column; accepted: forward"):
        families.covers("speed")
    with pytest.raises(ValueError, match="no config is named 'bert'"):
        families.covers("forward", without=("bert",))


def test_cells_are_read_from_decorators():
    assert "llama" in families.covered()["forward"]
    assert families.chosen("patch", only=("qwen3", "llama")) == ["llama", "qwen3"]
