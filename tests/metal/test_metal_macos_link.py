"""The extension compiled and linked for macOS on arm64, against PyTorch's macOS wheel, from any system. Optional:

pip install ziglang
pip download --no-deps --only-binary=:all: --platform macosx_14_0_arm64 -d /tmp/wheel torch==2.13.0
unzip -q /tmp/wheel/torch-*.whl -d /tmp/macos
RIFTCO_MACOS_TORCH=/tmp/macos/torch python -m pytest -m slow tests/metal/test_metal_macos_link.py
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
import torch

CSRC = pathlib.Path(__file__).parents[2] / "csrc"
MACOS_TORCH = os.environ.get("RIFTCO_MACOS_TORCH", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MACOS_TORCH, reason="RIFTCO_MACOS_TORCH does not name an unpacked macOS wheel of torch"),
    pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="ziglang is not installed"),
]


def zig(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos.14.0", "-std=c++20", "-O2"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def test_the_extension_links_on_macos(tmp_path):
    """Every symbol is in libtorch; one that is not fails the link."""
    home = pathlib.Path(MACOS_TORCH)
    version = f'-DRIFTCO_TORCH_VERSION="{torch.__version__}"'
    flags = [f"-I{home / 'include'}", f"-I{CSRC}", version, "-c"]
    stray = tmp_path / "stray.cpp"
    stray.write_text(
        '#include "launch.h"\nvoid none();\nvoid stray(riftco::KernelFunction& f) { f.startEncoding(); none(); }\n'
    )
    objects = []
    for source in (*sorted(CSRC.glob("*.cpp")), stray):
        objects.append(str(tmp_path / f"{source.stem}.o"))
        compiled = zig(*flags, str(source), "-o", objects[-1])
        assert compiled.returncode == 0, compiled.stderr
    libraries = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"]
    linked = zig("-shared", *objects[:-1], *libraries, "-o", str(tmp_path / "_C.so"))
    assert linked.returncode == 0, linked.stderr
    assert (tmp_path / "_C.so").read_bytes()[:4] == b"\xcf\xfa\xed\xfe"  # Mach-O, 64 bit
    broken = zig("-shared", *objects, *libraries, "-o", str(tmp_path / "broken.so"))
    assert broken.returncode != 0 and "none" in broken.stderr
