"""Makes PyPI's Linux wheel of torch, a CUDA build, importable without 4 GB of NVIDIA wheels: for CPU and XLA only.

Usage: python tools/cuda_stubs.py <site-packages>        needs gcc and pyelftools

The wheel's libraries name libcudart, libcudnn, ... as needed, so the loader refuses torch without them. One stub for
each missing name is compiled into torch/lib. It exports, under the versions that torch asks for, exactly the symbols
that torch imports. Every function returns 100, which is cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE: torch reports that
CUDA is not available.
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

from elftools.elf.elffile import ELFFile

LIBRARY = re.compile(r"lib(cu|nv|nccl)")
FUNCTION = re.compile(r"(cu|nccl)[a-z]*[A-Z]")
NO_DEVICE = 100


class Imports:
    """What a folder of shared libraries needs from NVIDIA libraries that are not in it."""

    def __init__(self, folder: pathlib.Path):
        self.present = {p.name for p in folder.iterdir()}
        self.libraries: set[str] = set()
        self.versioned: dict[str, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
        undefined: set[str] = set()
        defined: set[str] = set()
        for path in sorted(folder.glob("*.so*")):
            with path.open("rb") as file:
                self._read(ELFFile(file), undefined, defined)
        # asked for by name only, so that any loaded library may hold them
        self.unversioned = {s for s in undefined - defined if FUNCTION.match(s)}

    def _read(self, elf: ELFFile, undefined: set[str], defined: set[str]) -> None:
        for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED"):
            if LIBRARY.match(tag.needed) and tag.needed not in self.present:
                self.libraries.add(tag.needed)
        origin = {}  # version index -> (library, version)
        needed = elf.get_section_by_name(".gnu.version_r")
        for library, versions in needed.iter_versions() if needed else ():
            for version in versions:
                origin[version["vna_other"]] = (library.name, version.name)
        index_of = elf.get_section_by_name(".gnu.version")
        for i, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            index = index_of.get_symbol(i)["ndx"] if index_of else None
            if symbol["st_shndx"] != "SHN_UNDEF":
                defined.add(symbol.name)
            elif index in origin:
                library, version = origin[index]
                self.versioned[library][version].add(symbol.name)
            elif symbol.name and symbol["st_info"]["bind"] != "STB_WEAK":
                undefined.add(symbol.name)


def build(library: pathlib.Path, versions: dict[str, set[str]], unversioned: set[str]) -> None:
    """Compile a stub called `library` that exports the given symbols."""
    symbols = sorted(set().union(unversioned, *versions.values()))
    with tempfile.TemporaryDirectory() as folder:
        source, script = pathlib.Path(folder) / "stub.c", pathlib.Path(folder) / "stub.map"
        source.write_text("".join(f"long {s}(void) {{ return {NO_DEVICE}; }}\n" for s in symbols))
        script.write_text("".join(f"{v} {{ global: {' '.join(s + ';' for s in sorted(names))} }};\n"
                                  for v, names in sorted(versions.items())))  # fmt: skip
        command = ["gcc", "-O1", "-w", "-fno-builtin", "-shared", "-fPIC", str(source), "-o", str(library)]
        command += [f"-Wl,-soname,{library.name}"] + ([f"-Wl,--version-script={script}"] if versions else [])
        subprocess.run(command, check=True)


def main(site_packages: str) -> None:
    folder = pathlib.Path(site_packages) / "torch" / "lib"
    imports = Imports(folder)
    loose = imports.unversioned
    for name in sorted(imports.libraries):
        build(folder / name, imports.versioned.get(name, {}), loose)
        loose = set()  # once is enough: the first stub holds them all
    print(f"{len(imports.libraries)} CUDA stubs in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
