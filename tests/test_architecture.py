"""The import rules of DESIGN.md, proved on the source and in fresh processes."""

import ast
import pathlib
import subprocess
import sys

import pytest

from riftco.kernels import ROOMS

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "riftco"
KERNELS = PACKAGE / "kernels"
ROOM_FILES = ("__init__.py", "spec.py", "op.py", "cuda.py", "module.py", "cases.py")  # cuda.py may be a folder


def imports(file: pathlib.Path, top_level_only: bool = False) -> set[str]:
    """Absolute names of the modules that `file` imports."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    tree = ast.parse(file.read_text())
    found = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            name = ".".join(p for p in (base, node.module or "") if p)
            found |= {name} | {f"{name}.{a.name}" for a in node.names}
    return found


def top(names: set[str]) -> set[str]:
    return {n.partition(".")[0] for n in names}


def test_rooms_are_the_folders():
    folders = {p.parent.name for p in KERNELS.glob("*/op.py")}
    assert folders == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_its_files_and_tests(room):
    missing = [f for f in ROOM_FILES if not any((KERNELS / room / n).exists() for n in (f, f.removesuffix(".py")))]
    assert not missing
    assert (ROOT / "tests" / "kernels" / f"test_{room}.py").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_spec_and_op_import_torch_only(room):
    here = KERNELS / room
    assert top(imports(here / "spec.py")) <= {
        "torch",
        "einops",
        "math",
        "riftco",
        "__future__",
        "typing",
        "collections",
    }
    inner = {n for n in imports(here / "spec.py") if n.startswith("riftco")}
    shared = ("riftco.kernels._sinks",)  # what the specs of several rooms say alike
    assert all(n.startswith((f"riftco.kernels.{room}", *shared)) or ".spec" in n for n in inner), inner
    assert all(top(imports(ROOT / f"{n.replace('.', '/')}.py")) <= {"torch"} for n in shared)
    forbidden = {"triton", "torch_xla", "numpy", "transformers"}
    assert not top(imports(here / "op.py")) & forbidden


@pytest.mark.parametrize("room", ROOMS)
def test_launchers_import_no_other_op(room):
    for file in (KERNELS / room).rglob("*.py"):
        public = ("op.py", "decode.py", "forms.py", "topk.py", "module.py", "multihead.py", "cases.py", "__init__.py")
        if file.parent == KERNELS / room and (file.name in public or file.name.endswith("twins.py")):
            continue
        others = {f"riftco.kernels.{r}.op" for r in ROOMS}
        assert not imports(file) & others, file


PUBLIC = {"functional", "nn", "optim"}
ALLOWED = {
    "metal": {"kernels"},
    "tpu": {"kernels"},
    "cpu": set(),
    "kernels": {"metal", "tpu"},
    "nn": {"kernels"},
    "models": {"functional", "nn", "tpu", "cpu"},  # tpu: what the device is called, and how it is read
    "adapters": {"functional", "nn", "models"},
    "data": set(),
    "train": {*PUBLIC, "models", "adapters", "data", "tpu", "cpu"},
    "integrations": {"functional", "nn"},
    "serve": {*PUBLIC, "models", "adapters", "data", "train"},
    # the next three look inside
    "memory": {*PUBLIC, "kernels", "models", "adapters", "train"},
    "bench": {*PUBLIC, "kernels", "models", "adapters", "data", "train", "serve"},
    "doctor": {"kernels", "metal", "tpu", "cpu", "train", "bench"},
    "cli": {"models", "train", "serve", "memory", "doctor"},  # bench by name, as each command of it is asked for
}


def test_layers_point_one_way():
    """What stands over the ops uses their public functions; nothing below imports what is above."""
    assert {p.parent.name for p in PACKAGE.glob("*/__init__.py")} == set(ALLOWED)
    for layer, others in ALLOWED.items():
        for file in (PACKAGE / layer).rglob("*.py"):
            used = {n.split(".")[1] for n in imports(file) if n.startswith("riftco.")}
            more = used - others - {layer, "__version__", "explain"}
            assert not more, f"{file.relative_to(ROOT)} imports {sorted(more)}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy has no repository to ask for its files")
def test_the_design_names_every_part():
    """Each folder, room and shared module of git's stands in DESIGN.md."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    parts = {f.partition("/")[0] for f in tracked if "/" in f} - {"riftco"}
    parts |= {f.split("/")[1].removesuffix(".py") for f in tracked if f.startswith("riftco/") and f.endswith(".py")}
    parts |= {f.split("/")[2] for f in tracked if f.startswith("riftco/kernels/") and f.endswith(".py")}
    text = (ROOT / "DESIGN.md").read_text()
    missing = {p for p in parts if not p.startswith("__") and f"`{p}" not in text and f"/{p}`" not in text}
    assert not missing


def test_who_starts_a_backward():
    """The training step, and the one walk that chunks, replies and labelled batches share: no other loop trains."""
    found = set()
    for file in [*(PACKAGE / "train").rglob("*.py"), *(PACKAGE / "serve").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("backward", "grad"):
                found.add((str(file.relative_to(PACKAGE)), ast.unparse(node.func)))
    assert found == {("train/loop.py", "loss.backward"), ("train/chunked.py", "torch.autograd.backward")}


def test_test_modules_have_names_of_their_own():
    """pytest imports them by their stems: of two with one name the second is not collected."""
    stems = [f.stem for f in (ROOT / "tests").rglob("*.py") if f.stem not in ("__init__", "conftest")]
    assert sorted(set(stems)) == sorted(stems)


def test_files_stay_readable():
    long = {
        str(f.relative_to(ROOT)): n
        for f in [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
        if f.suffix in (".py", ".cpp", ".h", ".metal") and (n := len(f.read_text().splitlines())) > 500
    }
    assert not long


def test_import_riftco_is_only_torch():
    code = (
        "import sys, riftco; bad = {'triton', 'transformers', 'fastapi', 'peft', 'rich'} & set(sys.modules);"
        "assert not bad, bad; import torch; assert not torch.cuda.is_initialized();"
        "assert 'riftco.functional' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_ops_need_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None; import torch, riftco.functional as f, riftco.nn;"
        "f.cross_entropy(torch.randn(2, 3), torch.tensor([0, 2]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_missing_device_is_refused_by_name():
    code = (
        "from riftco.kernels._contract import define, choose\n"
        "schema = '(Tensor x) -> Tensor'\n"
        "op = define('probe', schema, fake=lambda x: x, spec='torch:clone', launchers={'cuda': 'torch:neg'})\n"
        "import torch; assert torch.equal(op(torch.ones(2)), torch.ones(2))\n"
        "try: choose('probe', 'mps')\n"
        "except NotImplementedError as e: assert str(e) == 'no mps kernel for riftco::probe; it has: cpu, cuda', e\n"
        "else: raise AssertionError('not refused')\n"
        "try: define('probe', schema, fake=None, spec='torch:clone', launchers={})\n"
        "except RuntimeError as e: assert 'already defined' in str(e)\n"
        "else: raise AssertionError('defined twice')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
