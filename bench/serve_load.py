"""`python bench/serve_load.py`: riftco.bench.serve_load with its results kept here."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from riftco.bench.serve_load import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(folder=HERE / "results"))
