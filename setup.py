"""The Metal extension on macOS; the text of shaders and of the CPU's decoding, which are compiled where they run, in
every wheel. Everything else is in pyproject.toml."""

import pathlib
import platform
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).parent


class BuildPy(build_py):
    """Put the texts beside their loaders; riftco run from a clone reads them in csrc."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = pathlib.Path(self.build_lib) / "riftco"
            shutil.copytree(HERE / "csrc" / "metal", package / "metal" / "shaders", dirs_exist_ok=True)
            shutil.copytree(HERE / "csrc" / "cpu", package / "cpu" / "source", dirs_exist_ok=True)


def extension() -> dict:
    """setup()'s arguments for the compiled part; none where there is no Metal."""
    if platform.system() != "Darwin":
        return {}
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    built = CppExtension(
        "riftco._C",
        sorted(str(f.relative_to(HERE)) for f in (HERE / "csrc").glob("*.cpp")),
        depends=sorted(str(f.relative_to(HERE)) for f in (HERE / "csrc").glob("*.h")),
        define_macros=[("RIFTCO_TORCH_VERSION", f'"{torch.__version__}"')],
        extra_compile_args=["-std=c++20", "-O2"],
    )
    return {"ext_modules": [built], "cmdclass": {"build_py": BuildPy, "build_ext": BuildExtension}}


setup(**{"cmdclass": {"build_py": BuildPy}, **extension()})
