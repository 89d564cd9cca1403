"""The `riftco` command. Each file here is one command; what they do lives in the packages below."""

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("riftco: the command line needs more packages: pip install 'riftco[finetune]'")
    from .app import app

    app()
