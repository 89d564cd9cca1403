"""The bench of a load's peak, at its smallest: what it writes is a folder like any other."""

import csv
import json

import pytest
import torch

from riftco.bench import load_memory
from riftco.bench.engines import SHAPES
from riftco.models import load_model


def test_a_row(tmp_path):
    out = tmp_path / "rows.csv"
    (tmp_path / "models").mkdir()
    args = ["--device", "cpu", "--shard-mib", "1", "--folder", str(tmp_path / "models"), "--out", str(out)]
    assert load_memory.main(args) == 0
    with open(out) as f:
        (row,) = csv.DictReader(f)
    assert row["shards"] == "1" and row["within"] == "" and float(row["stored_gib"]) > 0
    assert float(row["host_peak_gib"]) >= float(row["host_anonymous_peak_gib"]) > float(row["host_before_gib"]) > 0
    assert not list((tmp_path / "models").iterdir())


def test_the_folder_is_a_models(tmp_path):
    stored, shards = load_memory.write(tmp_path, SHAPES["tiny"], "cpu", 50_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert shards == len(set(index["weight_map"].values())) == len(list(tmp_path.glob("*.safetensors"))) > 2
    model, _ = load_model(tmp_path, weights="bf16", with_tokenizer=False)
    assert stored == sum(2 * p.numel() for p in model.parameters()) == index["metadata"]["total_size"]
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


def test_shapes_have_the_sizes_that_they_are_called_by():
    from riftco.models import Decoder, DecoderConfig

    billions = {}
    for name in ("1b", "4b", "8b", "27b"):
        with torch.device("meta"):
            model = Decoder(DecoderConfig.from_hf(SHAPES[name]))
        billions[name] = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx({"1b": 1.24, "4b": 4.02, "8b": 8.03, "27b": 27.0}, rel=0.01)
