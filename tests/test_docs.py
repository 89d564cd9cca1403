"""docs/contracts.md lists every contract once, and each proof that it names exists."""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
COUNTS = {0: 10, 1: 25, 2: 12, 3: 8, 4: 11, 5: 11, 6: 5, 7: 15, 8: 8, 9: 16, 10: 5, 11: 5, 12: 5, 13: 20, 14: 4}
COUNTS |= {15: 6, 16: 2, 17: 5, 18: 4, 19: 12, 20: 6, 21: 5, 22: 8}


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "contracts.md").read_text()
    return [[c.strip() for c in line.strip("|").split("|")] for line in re.findall(r"^\|\s*A\d+\.\d+.*$", text, re.M)]


@functools.cache
def tests_in(file: pathlib.Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}


def test_every_contract_is_listed_once():
    ids = [r[0] for r in rows()]
    assert sorted(ids) == sorted(f"A{a}.{b}" for a, n in COUNTS.items() for b in range(1, n + 1))


def test_every_proof_exists():
    cited = 0
    for number, _, status in rows():
        for proof in re.findall(r"`(tests/[^`]+)`", status):
            file, _, name = proof.partition("::")
            assert (ROOT / file).is_file(), f"{number}: {file}"
            assert not name or name in tests_in(ROOT / file), f"{number}: {proof}"
            cited += 1
        assert status.startswith(("met", "partly", "open")), f"{number}: {status}"
        assert status.startswith("open") or "`tests/" in status, f"{number} names no test"
    assert cited


def blocks(language: str) -> list:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = []
    for page in pages:
        for i, code in enumerate(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)):
            found.append(pytest.param(code, id=f"{page.name}-{i}"))
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code):
    exec(compile(code, "documentation", "exec"), {})


@pytest.mark.parametrize("code", blocks("sh"))
def test_commands_exist(code):
    """Every `riftco COMMAND --flag` of the documentation is known to the command line."""
    for line in code.splitlines():
        words = line.partition("#")[0].split()
        if not words or words[0] != "riftco":
            continue
        command = [w for w in words[1:3] if re.fullmatch(r"[a-z-]+", w)][: 2 if words[1] == "data" else 1]
        done = subprocess.run(
            [sys.executable, "-m", "riftco.cli", *command, "--help"], capture_output=True, text=True, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        for flag in (w for w in words if w.startswith("--")):
            assert flag in done.stdout, f"{' '.join(command)} has no {flag}"
