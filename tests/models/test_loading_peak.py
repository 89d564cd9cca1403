"""Loading holds the model as it will be and one layer of the file beside it, whatever the number of layers."""

import gc

import pytest
import torch
from tiny_models import hf_model, write_gguf

import riftco.kernels.nf4.quantize as quantising
from riftco.memory import MemoryTrace
from riftco.models import load_model
from riftco.models.gguf import GGUFFile
from riftco.models.safetensors_folder import SafetensorsFolder

SHAPE = {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 64, "num_attention_heads": 4}


def layer_bytes(model) -> int:
    return sum(p.numel() * 2 for p in model.model.layers[0].parameters())


def traced_load(monkeypatch, path, **options):
    """(the most bytes alive while loading, bytes alive afterwards, the model): what the file gives counts, too."""
    for source in (SafetensorsFolder, GGUFFile):
        read = source.tensor
        monkeypatch.setattr(source, "tensor", lambda self, name, read=read: read(self, name).clone())
    # quantising takes so many elements to float32 at once: few, beside a layer, as they are in a model of real size
    monkeypatch.setattr(quantising, "CHUNK", 1 << 12)
    load_model(path, with_tokenizer=False, **options)  # tables that live on are made once
    gc.collect()
    trace = MemoryTrace()
    with trace:
        model, _ = load_model(path, with_tokenizer=False, **options)
        gc.collect()
    monkeypatch.undo()
    return trace.peaks["step"][0], trace.bytes, model


@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("options", [{"weights": "nf4", "dtype": torch.bfloat16}, {"weights": "bf16"}], ids=str)
def test_shards(tmp_path, monkeypatch, layers, options):
    source = hf_model("llama", num_hidden_layers=layers, **SHAPE).bfloat16()
    source.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > layers
    peak, after, model = traced_load(monkeypatch, tmp_path, **options)
    one, whole = layer_bytes(source), sum(p.numel() * 2 for p in source.parameters())
    assert peak <= after + one
    if options["weights"] == "nf4":
        held = sum(m.weight.nbytes() for n, m in model.named_modules() if n.endswith("_proj"))
        assert held < after < 0.45 * whole  # scales, norms, embedding and head are the rest
        assert peak < whole


def test_a_packed_gguf_file(tmp_path, monkeypatch):
    source = hf_model("llama", num_hidden_layers=8, **SHAPE)
    write_gguf(tmp_path / "m.gguf", source, matrix_type="Q4_0", everywhere=True)
    peak, after, _ = traced_load(monkeypatch, tmp_path / "m.gguf", weights="packed", dtype=torch.bfloat16)
    assert after < 0.3 * sum(p.numel() * 2 for p in source.parameters())
    assert peak <= after + layer_bytes(source)
