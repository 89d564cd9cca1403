"""What the examples share: where a package is missing, one line that says how to get it, and exit code 2."""

import contextlib
import pathlib
import sys


@contextlib.contextmanager
def needed(command):
    """Around imports, and around `smollm2_path`, which names its own command."""
    try:
        yield
    except (ModuleNotFoundError, ValueError) as why:
        how = f"; run: {command}" if isinstance(why, ModuleNotFoundError) else ""
        print(f"{pathlib.Path(sys.argv[0]).name}: {why}{how}", file=sys.stderr)
        sys.exit(2)
