"""Where the extension and the shaders come from: the loader's errors, setup.py, the cache of libraries."""

import importlib
import pathlib
import platform
import re
import runpy
import subprocess
import sys
import types

import pytest
import setuptools
import support
import torch
import torch.utils.cpp_extension  # before platform.system() is changed below

import riftco.metal
from riftco.functional import cross_entropy
from riftco.kernels import _contract

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The loader as in a new process, in a package without an extension."""
    monkeypatch.setattr(riftco.metal, "_find_extension", None)
    monkeypatch.setattr(riftco.metal, "PACKAGE", tmp_path / "riftco" / "metal")
    monkeypatch.setattr(riftco.metal, "ops", riftco.metal.ops.__wrapped__)
    (tmp_path / "riftco").mkdir()
    return tmp_path / "riftco"


def test_an_extension_that_is_not_built(fresh):
    with pytest.raises(RuntimeError, match=r"Metal extension is not built .*other systems have no Metal"):
        riftco.metal.ops()


def test_an_extension_that_does_not_load(fresh):
    (fresh / "_C.cpython-311-darwin.so").write_bytes(b"of another system")
    with pytest.raises(
        RuntimeError, match=r"cannot load the Metal extension _C.cpython-311-darwin.so(.|\n)*no-build-iso"
    ):
        riftco.metal.ops()


def test_an_extension_for_another_torch(fresh, monkeypatch):
    (fresh / "_C.so").touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "riftco_mps", types.SimpleNamespace(built_with=lambda: "2.1.0"), raising=False)
    with pytest.raises(RuntimeError, match=r"built with torch 2\.1\.0; this is"):
        riftco.metal.ops()


def test_source_holds_each_include_once():
    text = riftco.metal.source("cross_entropy")
    assert text.count("struct Rows {") == 1 and '#include "' not in text and "#pragma once" not in text


def test_setup_ships_the_sources_and_no_extension_here(tmp_path):
    subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", "build_py", "-d", tmp_path], cwd=ROOT, check=True,
        capture_output=True,
    )  # fmt: skip
    for place, folder in (("metal/shaders", "metal"), ("cpu/source", "cpu")):
        shipped = {p.name: p.read_text() for p in (tmp_path / "riftco" / place).iterdir()}
        assert shipped == {p.name: p.read_text() for p in (ROOT / "csrc" / folder).iterdir()}
    if platform.system() != "Darwin":
        assert not list(tmp_path.rglob("*.so"))


def test_setup_builds_the_extension_on_a_mac(monkeypatch):
    asked = {}
    monkeypatch.setattr(setuptools, "setup", asked.update)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    (extension,) = asked["ext_modules"]
    assert extension.name == "riftco._C" and "-std=c++20" in extension.extra_compile_args
    assert extension.sources == ["csrc/bindings.cpp", "csrc/launch.cpp"] and "csrc/launch.h" in extension.depends
    assert ("RIFTCO_TORCH_VERSION", f'"{torch.__version__}"') in extension.define_macros


@pytest.mark.slow
def test_setup_compiles_the_extension(tmp_path):
    """The macOS branch of setup.py with this system's compiler: flags and quoting; Metal's symbols stay unresolved."""
    code = (
        "import platform, runpy, sys, torch.utils.cpp_extension; platform.system = lambda: 'Darwin';"
        f"sys.argv = ['setup.py', '-q', 'build_ext', '-b', {str(tmp_path / 'b')!r}, '-t', {str(tmp_path / 't')!r}];"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True, capture_output=True)
    (built,) = (tmp_path / "b" / "riftco").glob("_C*.so")
    assert f"{torch.__version__}".encode() in built.read_bytes()


@pytest.mark.parametrize("device", support.device_params(("mps-emulated",)))
def test_libraries_and_functions_are_cached(device, monkeypatch):
    """A second launch compiles nothing."""
    import metal_emulator.extension as extension

    x, y = torch.randn(2, 5), torch.tensor([1, 2])
    with device.use():
        first = cross_entropy(x, y)
        monkeypatch.setattr(extension.shaders, "library", None)
        assert torch.equal(cross_entropy(x, y), first)


def test_what_has_no_shader_is_listed_with_its_reason():
    importlib.import_module("riftco.functional")  # defines every op
    plain = {n for n, op in _contract.TABLE.items() if not op.launchers["mps"].startswith("riftco.metal.")}
    assert plain == set(riftco.metal.PLAIN)
    for name, reason in riftco.metal.PLAIN.items():
        assert reason in _contract.own(name, "mps").why


def test_the_table_of_the_readme_names_every_shader():
    """Its columns: what, shaders, launchers, tests."""
    text = (ROOT / "csrc" / "README.md").read_text()
    lines = text[text.index("| what | shader |") :].partition("\n\n")[0].splitlines()[2:]
    table = [[set(re.findall(r"`([\w./]+)`", cell)) for cell in line.split("|")[2:5]] for line in lines]
    assert set().union(*(r[0] for r in table)) == {f.stem for f in (ROOT / "csrc" / "metal").glob("*.metal")}
    for _, launchers, tests in table:
        assert launchers and all((ROOT / "riftco" / "metal" / n).exists() for n in launchers)
        assert all((ROOT / "tests" / n).exists() for n in tests)
