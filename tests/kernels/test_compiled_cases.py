"""Conformance cases of the elementwise rooms, compiled for a GPU: what the interpreter accepts Triton may refuse."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("room", ["embedding", "rope", "swiglu"])
def test_every_case_compiles_and_none_spills(room):
    script = pathlib.Path(__file__).parent.parent / "compile_kernels.py"
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "RIFTCO_IMPL")}
    root = str(script.parent.parent)
    done = subprocess.run(
        [sys.executable, str(script), "80", "cases", room, "bfloat16"],
        env=environment | {"PYTHONPATH": root}, cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len(kernels) >= 6
    for name, shared, spilled in kernels:
        assert int(shared) <= 99 * 1024 and int(spilled) == 0, (name, shared, spilled)
