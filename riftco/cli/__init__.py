"""The `riftco` command. Each file here is one command; what they do lives in the packages below."""

import os
import sys


def main() -> None:
    """Entry point of the console script."""
    # Read when torch loads its thread pool. A waiting thread that spins takes the core from the one it waits for as
    # soon as another process is busy: measured on two shared cores, a training step took four times its CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError:
        print("riftco: the command line needs more packages: pip install 'riftco[finetune]'", file=sys.stderr)
        sys.exit(2)
    from .app import app

    app(prog_name="riftco")  # by this name completion is installed, from `python -m riftco` too
