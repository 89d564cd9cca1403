"""The code of docs/models.md runs as it stands, from top to bottom."""

import pathlib
import re

from riftco.models.config import ARCHITECTURES
from riftco.models.config_gguf import GGUF_ARCHITECTURES
from riftco.models.gguf import TYPES

PAGE = (pathlib.Path(__file__).parent.parent.parent / "docs" / "models.md").read_text()


def test_its_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 4
    exec("\n".join(blocks), {})


def test_it_names_what_is_accepted():
    assert f"tensors of {', '.join(TYPES)}." in PAGE.replace("\n  ", " ")
    assert all(arch in PAGE for arch in GGUF_ARCHITECTURES)
    assert all(arch in PAGE.lower() for arch in ARCHITECTURES)
