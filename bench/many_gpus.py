"""`torchrun --nproc-per-node 2 bench/many_gpus.py`: riftco.bench.many_gpus with its results kept here."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from riftco.bench.many_gpus import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(folder=HERE / "results"))
