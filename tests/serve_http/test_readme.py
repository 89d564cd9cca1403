"""README's first conversation with a server, on the model that it names."""

import pathlib
import re
import shutil

import pytest
from real_model import smollm2_or_skip
from server import served

from riftco.adapters import LoraSpec
from riftco.models import load_model
from riftco.serve import Engine, Store
from riftco.serve.http import Service

README = pathlib.Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """What `riftco serve --model PATH --train-dir taught` starts, on a port of its own."""
    model, tokenizer = load_model(smollm2_or_skip(), weights="fp32")
    folder = tmp_path_factory.mktemp("taught")
    engine = Engine(model, slots=4, window=256, cache_dtype="q8_0", store=Store(folder, "digest"))
    engine.create("live", LoraSpec(rank=8, alpha=16))
    with served(Service(engine, tokenizer, name="smollm2", learns=True), train_dir=folder) as address:
        yield address
    shutil.rmtree(folder)


def test_a_stranger_can_follow_it(url, capsys):
    (code,) = re.findall(r'^```python title="against the server"\n(.*?)^```', README.read_text(), re.M | re.S)
    assert "http://127.0.0.1:8080" in code
    exec(compile(code.replace("http://127.0.0.1:8080", url), "README.md", "exec"), {})
    losses = [float(line.removeprefix("loss ")) for line in capsys.readouterr().out.splitlines()]
    said = re.search(r"falls: ([\d., ]+) with", code)
    assert losses == sorted(losses, reverse=True) and len(losses) == 4
    assert [float(x) for x in said[1].split(",")] == pytest.approx(losses, abs=0.05)
