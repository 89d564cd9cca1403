"""Links of the documentation lead somewhere; every page is in the navigation, every public name has a docstring."""

import ast
import importlib
import pathlib
import re
import sys
import types

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
MARKDOWN = sorted(
    p for p in (*ROOT.glob("*.md"), *(q for d in ("docs", "riftco", "csrc", "tests") for q in (ROOT / d).rglob("*.md")))
)
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(page: pathlib.Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+?)\s*$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", t)).lower().replace(" ", "-") for t in titles}


def broken(page: pathlib.Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of one."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert not broken(page, page.read_text())


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_fences_are_those_that_the_site_knows(page):
    """Any other opens no block there, and all up to the next fence is set as text."""
    for fence in re.findall(r"^```(.*)$", page.read_text(), re.M):
        assert re.fullmatch(r"|\w+( title=\"[^\"]+\")?", fence), fence


def test_the_check_of_links_can_fail():
    page = ROOT / "README.md"
    text = "[a](docs/ops.md) [b](docs/none.md) [c](#tests) [d](#nowhere) [e](docs/ops.md#losses) [f](docs/ops.md#no)"
    assert broken(page, text) == ["docs/none.md", "#nowhere", "docs/ops.md#no"]


@pytest.fixture
def site(monkeypatch):
    """tools/docs_site.py, with names in the place of mkdocs where that is not installed."""
    files = types.ModuleType("mkdocs.structure.files")
    config = types.ModuleType("mkdocs.config.defaults")
    files.File = files.Files = config.MkDocsConfig = object
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.config"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, files.__name__, files)
    monkeypatch.setitem(sys.modules, config.__name__, config)
    monkeypatch.syspath_prepend(ROOT / "tools")
    yield importlib.import_module("docs_site")
    sys.modules.pop("docs_site")


def test_every_page_is_in_the_navigation(site):
    def leaves(node):
        if isinstance(node, str):
            return [node]
        return [leaf for part in (node.values() if isinstance(node, dict) else node) for leaf in leaves(part)]

    config = types.SimpleNamespace(nav=yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    listed = [p for p in leaves(site.on_config(config).nav) if not p.startswith("api/")]
    pages = [p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md")]
    assert sorted(listed) == sorted([*pages, *site.PAGES])


def test_public_modules_have_pages_and_public_names_docstrings(site):
    """A module that `riftco` names is in the reference; what a page shows is there and says what it is."""
    riftco = importlib.import_module("riftco")
    outside = {"riftco.integrations", "riftco.bench"}  # modules of one other library each; commands
    assert {f"riftco.{n}" for n in riftco._SUBMODULES} - outside <= set(site.API)
    for module in site.API:
        doc, names = site.exported(module)
        shown = re.findall(r"^::: (\S+)$", site.api_page(module), re.M)
        if module == "riftco":  # the page shows what no submodule has
            names, real = list(riftco._NAMES), list(riftco._NAMES)
        else:
            real = list(importlib.import_module(module).__all__)
        assert doc and names == real and [p.rpartition(".")[2] for p in shown] == names, module
        for path in shown:
            where, _, name = path.rpartition(".")
            value = getattr(importlib.import_module(where), name)
            assert not callable(value) or value.__doc__, path


def test_sections_become_paragraphs():
    source = (ROOT / "tools" / "docs_docstrings.py").read_text()
    tree = ast.parse(source)
    kept = [n for n in tree.body if isinstance(n, (ast.Assign, ast.FunctionDef))]
    space: dict = {"re": re}
    exec(compile(ast.Module(kept, []), "docs_docstrings.py", "exec"), space)
    text = "It adds.\n\nArgs:\n    x: one.\n\nNumerics: float32,\n    rounded once.\nSource: a paper."
    told = "It adds.\n\nArgs:\n    x: one.\n\n\n**Numerics**: float32,\nrounded once.\n\n**Source**: a paper."
    assert space["paragraphs"](text) == told
