"""kill -9 at random moments of a run: every one resumes, and ends with the same bits."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize(("kills", "seed"), [(3, 1), pytest.param(50, 2, marks=pytest.mark.slow)])
def test_a_run_killed_anywhere_ends_as_if_it_had_not_been(model, chat, tmp_path, kills, seed):
    done = subprocess.run(
        [sys.executable, TESTS / "train" / "killed.py", model, chat, tmp_path, str(kills), str(seed)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == kills
    assert all(r["equal"] for r in rows), rows
    assert sum(r["killed"] for r in rows) > kills // 2, "most kills must hit a run that is still going"
    if kills >= 50:
        reached = {max(r["steps"], default=0) for r in rows if r["killed"]}
        assert len(reached) >= 6, f"the kills must be spread over the run; they hit after {sorted(reached)}"
