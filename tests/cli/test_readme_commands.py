"""README's commands for a model of one's own, one after the other as they stand there."""

import pathlib
import re
import shlex

from cli.conftest import METADATA, VOCABULARY
from tiny_models import hf_model, write_gguf

README = pathlib.Path(__file__).parents[2] / "README.md"


def commands():
    """All but `riftco serve`, which does not end by itself; tests/serve_http/test_readme.py has its conversation."""
    section = README.read_text().partition("## Fine-tune your own")[2]
    (block,) = re.findall(r"^```sh\n(.*?)^```", section.partition("\n## ")[0], re.M | re.S)
    words = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [command for command in words if command[1] != "serve"]


def test_they_run_as_they_stand(riftco, chat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "head_dim": 32}
    write_gguf(tmp_path / "model.gguf", hf_model("llama-tied", **shape), **METADATA)
    for name in ("chat.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(pathlib.Path(chat).read_text())
    assert len(commands()) == 8
    for program, *words in commands():
        assert program == "riftco"
        riftco(*("model.gguf" if word == "PATH" else word for word in words))
    made = ("run/adapter/adapter_model.safetensors", "merged/config.json", "adapter.gguf", "small/config.json", "mine")
    assert all((tmp_path / name).exists() for name in made)
