"""docs/benchmarks.md is what tools/benchmarks_page.py makes of bench/results."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
spec = importlib.util.spec_from_file_location("benchmarks_page", ROOT / "tools" / "benchmarks_page.py")
assert spec and spec.loader
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def test_the_page_shows_the_files():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == tool.page(), "run python tools/benchmarks_page.py"


@pytest.mark.parametrize("text, shown", [("0.23456", "0.2346"), ("53292.7", "53,293"), ("16", "16"), ("ok", "ok")])
def test_numbers(text, shown):
    assert tool.number(text) == shown


def test_who_has_no_number_says_why():
    row = {"status": "missing", "why": "runs on cuda only; ask again", "median_ms": ""}
    assert tool.cell(row) == "runs on cuda only" and tool.cell(None) == ""
