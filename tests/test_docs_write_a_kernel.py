"""docs/write_a_kernel.md, followed: its room passes tests, conformance check and bench; its second kernel, too."""

import csv
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
# What step 5 does by hand: the room lies beside the others and is listed. Then its tests, and the bench.
FOLLOW = """
import pathlib, sys

import pytest
import riftco.kernels

here = pathlib.Path(sys.argv[1])
riftco.kernels.__path__.append(str(here / "riftco" / "kernels"))
riftco.kernels.ROOMS = (*riftco.kernels.ROOMS, "squared_relu")
tests = ["tests/test_conformance.py", str(here / "tests" / "kernels" / "test_squared_relu.py")]
if status := pytest.main(["-p", "no:cacheprovider", "-k", "squared_relu", *tests]):
    sys.exit(status)
from riftco.bench.run import main

how = ["--device", "cpu", "--cases", "tests", "--peers", "torch eager", "--seconds", "0.05"]
sys.exit(main(["squared_relu", *how, "--out", str(here / "rows.csv")]))
"""
EXPLAINED = """
import pathlib, sys

import riftco.kernels

riftco.kernels.__path__.append(str(pathlib.Path(sys.argv[1]) / "riftco" / "kernels"))
import riftco.kernels.squared_relu

for row in riftco.explain("cuda"):
    if row["op"].startswith("squared_relu_fwd,"):
        print(row["op"], row["implementation"])
"""


def followed(folder: pathlib.Path, files: dict[str, str]) -> tuple[int, list[dict[str, str]]]:
    """Lint, tests, conformance check and bench of these files: how many tests passed, and riftco's rows."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    ours = 'lint.isort.known-first-party=["riftco"]'  # a room that is not in the tree would count as another's
    for name, text in files.items():
        for check in (["check", "--config", ours], ["format", "--check"]):
            done = python("-m", "ruff", *check, "--stdin-filename", name, "-", input=text)
            assert done.returncode == 0, done.stdout + done.stderr
    (folder / "follow.py").write_text(FOLLOW)
    done = python(folder / "follow.py", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    with (folder / "rows.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["peer"] == "riftco"]
    assert all(r["status"] == "ok" and float(r["median_ms"]) > 0 for r in rows)
    return int(re.search(r"(\d+) passed", done.stdout)[1]), rows


def python(*args, **options):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    run = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": paths}, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *args], **run, **options)


def test_the_page_makes_a_room_and_a_second_kernel(tmp_path):
    page = (ROOT / "docs" / "write_a_kernel.md").read_text()
    files = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```', page, re.M | re.S))
    later = {name: files.pop(name) for name in list(files) if name.endswith("/route.py")}
    room = {"__init__", "spec", "op", "cuda", "module", "cases"}
    assert {pathlib.Path(f).stem for f in files} == room | {"test_squared_relu"} and len(later) == 1
    first, rows = followed(tmp_path / "first", files)
    assert first >= 20 and len(rows) == 4

    changed = tmp_path / "changed"
    shutil.copytree(tmp_path / "first", changed, ignore=shutil.ignore_patterns("*.csv", "__pycache__"))
    (change,) = re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    done = subprocess.run(["git", "apply", "-"], input=change, cwd=changed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    second, rows = followed(changed, later | {name: (changed / name).read_text() for name in files})
    assert second >= first + 8 and len(rows) == 6
    said = python("-c", EXPLAINED, changed).stdout
    assert said == "squared_relu_fwd, 128 features short\nsquared_relu_fwd, 4096 features stretches\n"
