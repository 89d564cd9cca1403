"""What the suite promises of itself: what is skipped says why and is run where it can be; no build warns."""

import ast
import pathlib
import re
import shutil
import subprocess

import pytest
import support
import torch
from metal_emulator import toolchain

from riftco import cpu

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
GPU_IS_HERE = re.compile(r"not torch\.cuda\.is_available\(\)|not HOPPER|device_count\(\) < |needs_gpu")


def decorated(file: pathlib.Path):
    """(function or class, the text of its marks and of the module's)."""
    tree = ast.parse(file.read_text())
    named = {t.id: ast.unparse(n.value) for n in tree.body if isinstance(n, ast.Assign) for t in n.targets
             if isinstance(t, ast.Name)}  # fmt: skip
    whole = named.get("pytestmark", "")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            marks = [ast.unparse(d) for d in node.decorator_list]
            yield node, " ".join([whole, *marks, *(named.get(m, "") for m in marks)])


def test_what_a_machine_without_a_gpu_skips_is_marked_gpu():
    """Else neither `make test` there nor `make test-gpu` on a GPU would ever run it."""
    unmarked = [
        f"{file.name}::{node.name}"
        for file in FILES
        for node, marks in decorated(file)
        if node.name.lower().startswith("test") and GPU_IS_HERE.search(marks) and "mark.gpu" not in marks
    ]
    assert not unmarked


@pytest.mark.parametrize("there", [False, True])
def test_a_gpu_test_is_skipped_by_its_mark_alone(there, monkeypatch):
    """With the reason, and only where there is no GPU: a wrong condition of its own cannot hide it."""

    class Item:
        def __init__(self, *marks):
            self.marks = marks

        def get_closest_marker(self, name):
            return name if name in self.marks else None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    support.skip_without_a_gpu(Item("slow"))
    if there:
        support.skip_without_a_gpu(Item("gpu"))
        return
    with pytest.raises(pytest.skip.Exception, match="no CUDA device"):
        support.skip_without_a_gpu(Item("gpu"))


def test_no_refusal_of_a_budget_is_skipped():
    """riftco's budgets are counted in bytes before anything is made, so that they are refused on a CPU too."""
    tests = [(f"{file.name}::{n.name}", marks) for file in FILES for n, marks in decorated(file) if "budget" in n.name]
    tests = [(name, marks) for name, marks in tests if name.partition("::")[2].startswith("test_")]
    assert {name.partition("::")[0] for name, _ in tests} >= {"test_bytes.py", "test_batch.py"}
    assert not [name for name, marks in tests if "skip" in marks or "mark.gpu" in marks]


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_compiled_decoding_has_no_warnings(compiler):
    found = shutil.which(compiler)
    if found is None:
        pytest.skip(f"{compiler} is not installed")
    flags = [f for f in cpu.FLAGS if f != "-w"]
    done = subprocess.run(
        [found, *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(cpu.CHECKOUT / "step.cpp")],
        capture_output=True, text=True,
    )  # fmt: skip
    if "omp.h" in done.stderr and "not found" in done.stderr:
        pytest.skip(f"{compiler} has no OpenMP")
    assert not done.returncode, done.stderr


def test_shaders_and_their_launches_are_compiled_with_warnings_as_errors():
    assert {"-Wall", "-Werror"} <= set(toolchain.KERNEL_FLAGS)
    assert '"-Wall", "-Werror"' in (ROOT / "tests" / "metal_emulator" / "extension.py").read_text()
