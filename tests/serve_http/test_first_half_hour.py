"""docs/first_half_hour.md: its curl commands, as they stand, against a server of the model that it names."""

import json
import pathlib
import re
import subprocess

import pytest
from server import served

from riftco.adapters import LoraSpec
from riftco.models import ModelError, load_model, smollm2_path
from riftco.serve import Engine, Store
from riftco.serve.http import Service

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "first_half_hour.md"


@pytest.fixture
def url(tmp_path):
    """`riftco serve --adapter run/adapter --train-dir pantry`, but for what the adapter learned before."""
    try:
        model, tokenizer = load_model(smollm2_path(), weights="fp32")
    except ModelError as absent:
        if "not installed" not in str(absent):
            raise
        pytest.skip(str(absent))
    engine = Engine(model, slots=4, window=256, cache_dtype="q8_0", store=Store(tmp_path, "digest"))
    engine.create("live", LoraSpec(rank=16, alpha=32))
    service = Service(engine, tokenizer, name="smollm2", learns=True)
    service.scales = {"live": 1.0}
    with served(service, train_dir=tmp_path) as address:
        yield address


def test_what_it_says_with_curl(url):
    (code,) = re.findall(r'^```sh title="in another terminal"\n(.*?)^```', PAGE.read_text(), re.M | re.S)
    assert "http://127.0.0.1:8080" in code
    code = code.replace("http://127.0.0.1:8080", url).replace("1e-3", "4e-3")  # its adapter knows the form already
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = [line.strip().rstrip(",") for line in done.stdout.splitlines()]
    answers = [json.loads("{" + line + "}")["content"] for line in said if line.startswith('"content"')]
    losses = [json.loads("{" + line + "}")["loss_before"] for line in said if line.startswith('"loss_before"')]
    promoted, undone, back = (json.loads(line) for line in said if line.startswith("{"))
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
    first, taught, last = answers
    assert taught != first and last == first
    assert (promoted["version"], undone["step"], back["version"]) == (2, 2, 3)
