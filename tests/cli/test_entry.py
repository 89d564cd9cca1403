"""The entry point sets up the process before torch is loaded, and names the extra that it needs."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def python(code, **more):
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**env, "PYTHONPATH": str(ROOT), **more}
    )


def test_waiting_threads_sleep_unless_the_user_says_otherwise():
    code = (
        "import sys, os, riftco.cli; assert 'torch' not in sys.modules; sys.argv = ['riftco', '--version']\n"
        "try: riftco.cli.main()\n"
        "finally: print(os.environ['OMP_WAIT_POLICY'])"
    )
    assert python(code).stdout.splitlines()[1] == "PASSIVE"
    assert python(code, OMP_WAIT_POLICY="ACTIVE").stdout.splitlines()[1] == "ACTIVE"


def test_a_missing_extra_is_named():
    done = python("import sys; sys.modules['typer'] = None; from riftco.cli import main; main()")
    assert done.returncode == 2
    assert "pip install 'riftco[finetune]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_package_of_the_server_is_named_with_its_extra():
    code = "import sys; sys.modules['fastapi'] = None; from riftco.cli import main\n"
    code += "sys.argv = ['riftco', 'serve', '--model', 'x']; main()"
    done = python(code)
    assert done.returncode == 2
    assert "pip install 'riftco[serve]'" in done.stderr, done.stderr


def test_the_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "riftco", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[0]) == (0, "riftco")
