"""The extension compiled and linked for macOS on arm64 against PyTorch's macOS wheels, from any system. Optional, as it
downloads them and a compiler: `make metal-link-check`, which names the unpacked wheels in RIFTCO_MACOS_TORCH.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

CSRC = pathlib.Path(__file__).parents[2] / "csrc"
WHEELS = [pathlib.Path(p) for p in os.environ.get("RIFTCO_MACOS_TORCH", "").split()]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHEELS, reason="RIFTCO_MACOS_TORCH names no unpacked macOS wheels (make metal-link-check)"),
    pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="ziglang is not installed"),
]


def zig(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-macos.14.0", "-std=c++20", "-O2"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda p: p.name)
def test_the_extension_links_on_macos(wheel, tmp_path, record_property):
    """Every symbol is in libtorch; one that is not fails the link."""
    home = wheel / "torch"
    (version,) = re.findall(r"^__version__ = '(.+)'", (home / "version.py").read_text(), re.M)
    assert version.startswith(wheel.name)
    flags = [f"-I{home / 'include'}", f"-I{CSRC}", f'-DRIFTCO_TORCH_VERSION="{version}"', "-c"]
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
    built = (tmp_path / "_C.so").read_bytes()
    assert built[:4] == b"\xcf\xfa\xed\xfe"  # Mach-O, 64 bit
    assert version.encode() in built and b"DynamicMetalShaderLibrary" in built
    broken = zig("-shared", *objects, *libraries, "-o", str(tmp_path / "broken.so"))
    assert broken.returncode != 0 and "none" in broken.stderr
