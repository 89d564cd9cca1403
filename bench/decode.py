"""`python bench/decode.py`: riftco.bench.decode with its results kept here."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from riftco.bench.decode import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(folder=HERE / "results"))
