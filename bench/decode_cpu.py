"""`python bench/decode_cpu.py`: riftco.bench.decode_cpu with its results kept here."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from riftco.bench.decode_cpu import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(folder=HERE / "results"))
