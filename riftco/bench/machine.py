"""What a row of results says about where it was measured, and why something was not."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import torch


def machine_columns(device: str) -> dict[str, str]:
    """Who measured: machine, date, commit, versions."""
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "threads": str(torch.get_num_threads()),
    }


def _cpu_name() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """RIFTCO_COMMIT names it where the tree was copied without its repository."""
    if named := os.environ.get("RIFTCO_COMMIT"):
        return named
    folder = pathlib.Path(__file__).parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    return f"riftco {_version('riftco')}"


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "missing"


def reason_of(failed: BaseException) -> str:
    """An exception in one line."""
    lines = str(failed).strip().splitlines()
    return f"{type(failed).__name__}: {lines[0][:200] if lines else ''}"
