"""Processes as torchrun starts them, but each with its own output, and without the launcher's own start."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def start(count: int, *argv) -> list[subprocess.Popen]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "train"))),
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]


def ended(processes: list[subprocess.Popen], seconds: float = 120) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of each; none is left behind."""
    try:
        texts = [p.communicate(timeout=seconds) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [(p.returncode, *text) for p, text in zip(processes, texts)]
