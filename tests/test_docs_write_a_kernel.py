"""docs/write_a_kernel.md, followed: its files make a room that passes tests, conformance check and bench."""

import csv
import os
import pathlib
import re
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


def test_the_page_makes_a_room(tmp_path):
    page = (ROOT / "docs" / "write_a_kernel.md").read_text()
    files = dict(re.findall(r'^```python title="([^"]+)"\n(.*?)^```', page, re.M | re.S))
    room = {"__init__", "spec", "op", "cuda", "module", "cases"}
    assert {pathlib.Path(f).stem for f in files} == room | {"test_squared_relu"}
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "follow.py").write_text(FOLLOW)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    run = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": paths}, "capture_output": True, "text": True}

    ours = 'lint.isort.known-first-party=["riftco"]'  # a room that is not in the tree would count as another's
    for name, text in files.items():
        for check in (["check", "--config", ours], ["format", "--check"]):
            how = [sys.executable, "-m", "ruff", *check, "--stdin-filename", name, "-"]
            done = subprocess.run(how, input=text, **run)
            assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([sys.executable, tmp_path / "follow.py", tmp_path], **run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 20, done.stdout
    with (tmp_path / "rows.csv").open() as file:
        ours = [r for r in csv.DictReader(file) if r["peer"] == "riftco"]
    assert len(ours) == 4 and all(r["status"] == "ok" and float(r["median_ms"]) > 0 for r in ours)
