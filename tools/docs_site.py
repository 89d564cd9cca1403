"""mkdocs' hook: which files of the repository are pages of the site, and the pages of the API reference."""

import ast
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).parent.parent
# Every module whose __all__ is public, in the order of the navigation.
API = (
    "riftco",
    "riftco.functional",
    "riftco.nn",
    "riftco.optim",
    "riftco.models",
    "riftco.adapters",
    "riftco.data",
    "riftco.train",
    "riftco.serve",
    "riftco.memory",
    "riftco.doctor",
)
ROOMS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "riftco" / "kernels").glob("*/README.md"))
INSIDE = [*ROOMS, "riftco/cpu/README.md", "csrc/README.md"]
PAGES = ["README.md", "DESIGN.md", "CHANGELOG.md", *INSIDE]
LINKED = ("docs/*.md", "docs/*.png", "docs/*.svg", "bench/results/*.csv", "examples/*.py")  # as they are


def exported(module: str) -> tuple[str, list[str]]:
    """A module's docstring and the names in its __all__, without importing it; submodules have pages of their own."""
    where = ROOT / module.replace(".", "/")
    tree = ast.parse((where / "__init__.py" if where.is_dir() else where.with_suffix(".py")).read_text())
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            assert isinstance(node.value, ast.List)
            names = [e.value for e in node.value.elts if isinstance(e, ast.Constant)]
    return ast.get_docstring(tree) or "", names


def lazy(module: str) -> dict[str, str]:
    """What `riftco` loads on first use: name -> the module that has it, from its table."""
    tree = ast.parse((ROOT / module.replace(".", "/") / "__init__.py").read_text())
    tables = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_NAMES"]
    return ast.literal_eval(tables[0])


def api_page(module: str) -> str:
    doc, names = exported(module)
    paths = [f"{module}.{n}" for n in names]
    if module == "riftco":
        paths = [f"{where}.{name}" for name, where in lazy(module).items()]
    return "\n\n".join([f"# {module}", doc, *(f"::: {p}" for p in paths)]) + "\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for part in config.nav or []:
        for title, items in part.items():
            if items == "api":
                part[title] = [{m: f"api/{m}.md"} for m in API]
            elif title == "Inside":
                rooms = [{p.split("/")[-2]: p} for p in INSIDE]
                part[title] = [{"Rooms": rooms} if i == {"Rooms": "rooms"} else i for i in items]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, and the repository's at the paths that they have there."""
    kept = [f for f in files if pathlib.Path(f.src_dir or "/") != ROOT / "docs"]
    found = PAGES + sorted(p.relative_to(ROOT).as_posix() for pattern in LINKED for p in ROOT.glob(pattern))
    kept += [File.generated(config, p, abs_src_path=str(ROOT / p)) for p in found]
    kept += [File.generated(config, f"api/{m}.md", content=api_page(m)) for m in API]
    return Files(kept)


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    """A link to a folder of the repository, which is no page, becomes its text."""
    here = (ROOT / page.file.src_uri).parent

    def text_of(link: re.Match) -> str:
        target = link[2].partition("#")[0]
        return link[1] if target and (here / target).is_dir() else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s:]+)\)", text_of, markdown)
