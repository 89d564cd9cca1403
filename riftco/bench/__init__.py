"""Microbenchmarks of every op against its peers, correctness first. Start with ``python bench/run.py``."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read as torch loads: its profiler counts bytes here, silently
