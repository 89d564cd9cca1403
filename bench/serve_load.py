"""`python bench/serve_load.py`: riftco.bench.serve_load."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from riftco.bench.serve_load import main

if __name__ == "__main__":
    sys.exit(main())
