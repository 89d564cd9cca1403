"""What this machine has: versions, devices, and for each that is absent or of no use why, with the remedy."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass

import torch

from .. import __version__, cpu, metal, tpu
from ..bench.machine import machine_columns

PACKAGES = (
    "torch", "triton", "torch_xla", "numpy", "safetensors", "transformers", "tokenizers", "gguf", "peft",
    "bitsandbytes",
)  # fmt: skip
STEERING = re.compile(
    r"RIFTCO_|TRITON_|PYTORCH_|CUDA_VISIBLE_DEVICES$|HIP_VISIBLE_DEVICES$|PJRT_|XLA_|OMP_NUM_THREADS$"
)
AMPERE = (8, 0)


@dataclass(frozen=True)
class State:
    """Of a device: "works", "absent" (no such hardware or runtime) or "broken" (it is here and cannot be used)."""

    state: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.detail}" + (f"; {self.remedy}" if self.remedy else "")


def versions() -> dict[str, str]:
    found = {"riftco": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found | {"torch": torch.__version__}  # with its build: +cpu, +cu128


def machine() -> dict[str, str]:
    """System, processor, memory; the commit where riftco runs from a clone."""
    columns = machine_columns("cpu")
    return {
        "system": platform.platform(),
        "processor": _chip() or columns["machine"],
        "cores": str(os.cpu_count()),
        "threads": columns["threads"],
        "memory": f"{_memory() / 2**30:.1f} GiB",
        "commit": columns["commit"],
    }


def environment() -> dict[str, str]:
    """The variables that steer riftco, PyTorch and the compilers."""
    return {k: v for k, v in sorted(os.environ.items()) if STEERING.match(k)}


def device_state(device: str) -> State:
    """Of "cpu", "cuda", "mps" or "xla"."""
    return {"cpu": _cpu, "cuda": _cuda, "mps": _mps, "xla": _xla}[device]()


def _cpu() -> State:
    return State("works", f"{torch.backends.cpu.get_cpu_capability()}; {cpu.described(build=True)}")


def _cuda() -> State:
    if not torch.cuda.is_available():
        if platform.system() == "Darwin":
            return State("absent", "Macs have no CUDA devices", "use mps or cpu")
        if torch.version.cuda is None and torch.version.hip is None:
            return State(
                "absent", f"torch {torch.__version__} was built without CUDA",
                "on a machine with an NVIDIA GPU install a CUDA build of PyTorch",
            )  # fmt: skip
        return State(
            "absent", "PyTorch sees no GPU",
            f"nvidia-smi must show one, with a driver for CUDA {torch.version.cuda} or newer",
        )  # fmt: skip
    detail = ", ".join(
        f"{i}: {p.name}, compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
        for i, p in enumerate(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
    )
    if not importlib.util.find_spec("triton"):
        return State("broken", f"{detail}; Triton is not installed", "pip install triton")
    if torch.version.hip is None and torch.cuda.get_device_capability() < AMPERE:
        return State("broken", detail, "riftco's kernels need compute capability 8.0 (Ampere) or newer; use cpu")
    return State("works", detail)


def _mps() -> State:
    if not torch.backends.mps.is_available():
        if platform.system() != "Darwin":
            return State("absent", "Metal exists on Macs only", "use cuda or cpu")
        if not torch.backends.mps.is_built():
            return State(
                "absent", f"torch {torch.__version__} for {platform.machine()} was built without Metal",
                "on Apple silicon install an arm64 Python and PyTorch in it",
            )  # fmt: skip
        return State(
            "absent", "PyTorch sees no Metal device", "it needs macOS 14 or newer, outside of a virtual machine"
        )
    try:
        built = metal.ops().built_with()
    except RuntimeError as e:
        return State("broken", str(e).removeprefix("riftco: ").removesuffix(metal.REBUILD).strip(), metal.REBUILD)
    return State("works", f"Metal extension built with torch {built}")


def _xla() -> State:
    if reason := tpu.why_not():
        return State("absent", *reason.split("; ", 1))
    try:
        return State("works", f"{tpu.device()}, PJRT_DEVICE={os.environ.get('PJRT_DEVICE', 'not set')}")
    except RuntimeError as e:
        return State("broken", str(e).splitlines()[0], "set PJRT_DEVICE=TPU, or CPU to run XLA on the CPU")


def _chip() -> str:
    """A Mac's processor by its name; empty elsewhere."""
    if sys.platform != "darwin":
        return ""
    asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
    return asked.stdout.strip()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
