"""docs/contracts.md lists every contract once, and each proof that it names exists."""

import ast
import functools
import pathlib
import re

import pytest
from typer.testing import CliRunner

import riftco.functional
from riftco.cli.app import app

ROOT = pathlib.Path(__file__).parent.parent
COUNTS = {0: 10, 1: 25, 2: 12, 3: 8, 4: 11, 5: 11, 6: 5, 7: 15, 8: 8, 9: 16, 10: 5, 11: 5, 12: 5, 13: 20, 14: 4}
COUNTS |= {15: 6, 16: 2, 17: 5, 18: 4, 19: 12, 20: 6, 21: 5, 22: 8}


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "contracts.md").read_text()
    return [[c.strip() for c in line.strip("|").split("|")] for line in re.findall(r"^\|\s*A\d+\.\d+.*$", text, re.M)]


@functools.cache
def functions_of(file: pathlib.Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}


def test_every_contract_is_listed_once():
    ids = [r[0] for r in rows()]
    assert sorted(ids) == sorted(f"A{a}.{b}" for a, n in COUNTS.items() for b in range(1, n + 1))


def test_the_counts_of_contracts_are_those_of_the_rows():
    text = (ROOT / "docs" / "contracts.md").read_text()
    said = re.search(r"Met: (\d+); partly: (\d+); open: (\d+)\.", text)
    kinds = [re.split(r"\W", r[2], maxsplit=1)[0] for r in rows()]
    assert said and [int(n) for n in said.groups()] == [kinds.count(k) for k in ("met", "partly", "open")]


def test_every_proof_exists():
    cited = 0
    for number, _, status in rows():
        for proof in re.findall(r"`(tests/[^`]+)`", status):
            file, _, name = proof.partition("::")
            assert (ROOT / file).is_file(), f"{number}: {file}"
            assert not name or name in functions_of(ROOT / file), f"{number}: {proof}"
            cited += 1
        assert status.startswith(("met", "partly", "open")), f"{number}: {status}"
        assert status.startswith("open") or "`tests/" in status, f"{number} names no test"
    assert cited


def test_every_public_function_is_on_the_map():
    """docs/ops.md calls itself that; what attention has is on the page that it leads to."""
    pages = [(ROOT / "docs" / page).read_text() for page in ("ops.md", "attention.md")]
    named = set(re.findall(r"\w+", " ".join(pages)))
    assert not [name for name in riftco.functional.__all__ if name not in named]


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        *(
            ROOT / "docs" / f"{n}.md"
            for n in (
                "ops",
                "attention",
                "finetune",
                "many_gpus",
                "long_context",
                "packed_data",
                "distillation",
                "apple_tpu",
                "transformers",
            )
        ),
    ],
    ids=lambda p: p.name,
)
def test_python_blocks_run(page):
    """docs/models.md has a test of its own, as its blocks need files, and so has docs/write_a_kernel.md."""
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_exist(page):
    """Every `riftco COMMAND --flag` of the documentation is known to the command line."""
    for code in blocks(page, "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            words = line.partition("#")[0].split()
            if not words or words[0] != "riftco":
                continue
            command = [w for w in words[1:3] if not w.startswith("-")][: 2 if words[1] in ("data", "bench") else 1]
            done = CliRunner().invoke(app, [*command, "--help"], terminal_width=200)
            assert done.exit_code == 0, done.output
            for flag in (w for w in words if w.startswith("--")):
                assert flag in done.output, f"{' '.join(command)} has no {flag}"
