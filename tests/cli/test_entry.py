"""The entry point sets up the process before torch is loaded, and names the extra that it needs."""

import os
import pathlib
import subprocess
import sys

from typer.testing import CliRunner

from riftco.cli.app import app

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


def completed(*words):
    """What bash is told for the last of these words."""
    asked = {"_RIFTCO_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = python("import sys; sys.argv = ['riftco']; from riftco.cli import main; main()", **asked)
    return done.stdout.split()


def test_the_shell_completes_commands_options_and_values():
    assert completed("riftco", "fine") == ["finetune"]
    assert completed("riftco", "finetune", "--met") == ["--method", "--metrics"]
    assert completed("riftco", "finetune", "--method", "q") == ["qlora"]
    assert completed("riftco", "serve", "--cache", "f") == ["float32", "float16"]


def test_values_that_are_completed_are_those_that_are_accepted():
    from riftco.cli import options
    from riftco.kernels.cached_attention.cache import STORED
    from riftco.models.decoder import ATTENTION
    from riftco.train import config

    assert {*options.METHODS()} == {*config.METHODS} and {*options.DTYPES()} == {*config.DTYPES}
    assert {*options.MOMENTS()} == {*config.OPTIMIZER_STATES} and {*options.ATTENTIONS()} == {*ATTENTION}
    assert all(config.pick_device(name) for name in ("auto", "cpu")) and {"cuda", "mps", "tpu"} < {*options.DEVICES()}
    assert {*options.CACHES()} == {*STORED}


def test_overviews_are_cut_nowhere():
    for words in ([], ["bench"], ["data"]):
        said = CliRunner().invoke(app, [*words, "--help"], terminal_width=80).stdout
        assert "Commands:" in said and "..." not in said.partition("Commands:")[2], said
