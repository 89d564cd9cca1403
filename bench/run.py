"""`python bench/run.py [op ...]`: riftco.bench.run with its results kept here."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]  # the Metal emulator lives among the tests

from riftco.bench.run import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(folder=HERE / "results"))
