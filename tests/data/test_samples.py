"""The sample data that ships in the package."""

import importlib.util
import json
import pathlib

import riftco.data

SAMPLES = pathlib.Path(riftco.data.__file__).parent / "samples"
TOOL = pathlib.Path(__file__).parents[2] / "tools" / "make_sample_data.py"


def prompts(name):
    return [json.loads(line)["messages"][0]["content"] for line in (SAMPLES / name).read_text().splitlines()]


def test_held_out_differs_from_training():
    train, held_out = prompts("pantry_train.jsonl"), prompts("pantry_heldout.jsonl")
    assert (len(set(train)), len(set(held_out))) == (320, 40)
    assert not set(train) & set(held_out)


def test_the_script_makes_what_is_committed(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("make_sample_data", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "SAMPLES", tmp_path)
    tool.main()
    for file in tmp_path.iterdir():
        assert file.read_text() == (SAMPLES / file.name).read_text()
    assert len(list(tmp_path.iterdir())) == 2
