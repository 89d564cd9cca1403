"""riftco quantize, merge and export: what comes out is right, whole or not at all, and refusals change nothing."""

import json

import pytest
import torch
from safetensors.torch import load_file

from riftco.adapters import load_adapter
from riftco.models import load_model, save_hf
from riftco.nn import NF4Linear

IDS = torch.arange(3, 23)[None]
RUN = ("--batch-tokens", 64, "--rank", 3, "--lr", 0.02, "--seed", 1, "--device", "cpu", "--steps", 4)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The tiny model as a Hugging Face folder in bfloat16, with its tokenizer."""
    loaded, tokenizer = load_model(model)
    path = tmp_path_factory.mktemp("hf") / "folder"
    save_hf(loaded, path, dtype=torch.bfloat16)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def adapter(model, chat, tmp_path_factory):
    return trained(model, chat, tmp_path_factory, "lora")


@pytest.fixture(scope="module")
def qlora(model, chat, tmp_path_factory):
    return trained(model, chat, tmp_path_factory, "qlora", "--dora", "--rslora")


def trained(model, chat, tmp_path_factory, method, *flags):
    from typer.testing import CliRunner

    from riftco.cli.app import app

    run = tmp_path_factory.mktemp(method) / "run"
    words = ("finetune", "--model", model, "--data", chat, "--output", run, "--method", method, *RUN, *flags)
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert done.exit_code == 0, done.output
    return run / "adapter"


def logits(path, **options):
    loaded, _ = load_model(path, with_tokenizer=False, **options)
    with torch.no_grad():
        return loaded.eval()(IDS)


def near(a, b, part=1e-4):
    return bool((a - b).abs().max() <= part * b.abs().max())


def test_quantize_to_a_bitsandbytes_folder(riftco, folder, tmp_path):
    out = tmp_path / "nf4"
    done = riftco("quantize", "--model", folder, "--type", "nf4", "--output", out)
    assert done.stdout == f"written to {out}\n"
    mine, tokenizer = load_model(out)
    assert any(isinstance(m, NF4Linear) for m in mine.modules())
    assert torch.equal(logits(out), logits(folder, weights="nf4"))
    assert tokenizer.encode("hello") == load_model(folder)[1].encode("hello")
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4" and config["dtype"] == "bfloat16"
    assert (
        sum(f.stat().st_size for f in out.glob("*.safetensors")) < 0.7 * (folder / "model.safetensors").stat().st_size
    )


def test_what_a_packed_file_leaves_dense_is_bfloat16(riftco, folder, tmp_path):
    riftco("quantize", "--model", folder, "--type", "q8_0", "--output", tmp_path / "model.gguf")
    riftco("quantize", "--model", tmp_path / "model.gguf", "--output", tmp_path / "nf4")
    stored = load_file(tmp_path / "nf4" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    assert all(p.stat().st_mode & 0o777 == 0o644 for p in (tmp_path / "nf4").iterdir())


@pytest.mark.parametrize("kind", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_quantize_to_gguf(riftco, folder, tmp_path, kind):
    riftco("quantize", "--model", folder, "--type", kind, "--output", tmp_path / "model.gguf")
    said = riftco("generate", "--model", tmp_path / "model.gguf", "--prompt", "hello", "--max-new-tokens", 4).stdout
    assert said.endswith("\n")
    mine, _ = load_model(tmp_path / "model.gguf", with_tokenizer=False)
    theirs, _ = load_model(folder, weights="fp32", with_tokenizer=False)
    for name, p in theirs.state_dict().items():
        error = ((mine.get_parameter(name).detach() - p).norm() / p.norm()).item()
        assert error < {"q8": 0.01, "q5": 0.06, "q4": 0.12}[kind[:2]], name
        assert (error > 1e-4) == (p.dim() == 2), name


def test_merge_is_the_adapted_model(riftco, model, adapter, tmp_path):
    out = tmp_path / "merged"
    done = riftco("merge", "--model", model, "--adapter", adapter, "--output", out, "--dtype", "fp32")
    assert done.stdout.startswith("merged 14 layers; the delta is ") and done.stdout.endswith(f"written to {out}\n")
    base, _ = load_model(model, with_tokenizer=False)
    load_adapter(base, adapter)
    with torch.no_grad():
        want = base.eval()(IDS)
    assert near(logits(out), want) and not near(logits(model), want)
    assert riftco("generate", "--model", out, "--prompt", "hello", "--max-new-tokens", 4).stdout


def test_merge_onto_a_dequantised_base(riftco, model, qlora, tmp_path):
    riftco("merge", "--model", model, "--adapter", qlora, "--output", tmp_path / "merged", "--dtype", "fp32")
    base, _ = load_model(model, weights="nf4", with_tokenizer=False)
    load_adapter(base, qlora)
    with torch.no_grad():
        assert near(logits(tmp_path / "merged"), base.eval()(IDS))
    riftco("merge", "--model", model, "--adapter", qlora, "--output", tmp_path / "other", "--weights", "fp32")
    assert not near(logits(tmp_path / "other"), logits(tmp_path / "merged"), 1e-3)


def test_a_merge_is_stored_as_the_base_is(riftco, folder, adapter, tmp_path):
    riftco("merge", "--model", folder, "--adapter", adapter, "--output", tmp_path / "merged")
    assert {t.dtype for t in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.bfloat16}
    riftco("merge", "--model", folder, "--adapter", adapter, "--output", tmp_path / "half", "--dtype", "fp16")
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.float16}


def test_export_of_an_adapter(riftco, model, adapter, tmp_path):
    gguf = pytest.importorskip("gguf")
    out = tmp_path / "lora.gguf"
    done = riftco("export", "--model", model, "--adapter", adapter, "--format", "gguf-lora", "--output", out)
    assert f"--lora {out}" in done.stdout
    assert len(gguf.GGUFReader(out).tensors) == 28


def test_export_of_a_model(riftco, model, folder, adapter, tmp_path):
    riftco("export", "--model", folder, "--format", "gguf", "--output", tmp_path / "a.gguf")
    assert torch.equal(logits(tmp_path / "a.gguf"), logits(folder, weights="fp32"))
    riftco("export", "--model", tmp_path / "a.gguf", "--format", "hf", "--output", tmp_path / "b")
    mine, theirs = load_file(tmp_path / "b" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    words = ("export", "--model", model, "--adapter", adapter, "--dtype", "fp32")
    out = riftco(*words, "--format", "gguf", "--output", tmp_path / "c.gguf").stdout
    assert out.startswith("merged 14 layers")
    riftco(*words, "--format", "hf", "--no-tokenizer", "--output", tmp_path / "d")
    assert near(logits(tmp_path / "c.gguf"), logits(tmp_path / "d"))
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("quantize", "--type", "q4_k"), "--type must be one of nf4, q8_0, "),
        (("export", "--format", "onnx"), "--format must be one of hf, gguf, gguf-lora; got 'onnx'"),
        (("export", "--format", "gguf-lora"), "--format gguf-lora needs --adapter"),
        (("export", "--format", "hf", "--dtype", "int3"), "--dtype must be one of auto, fp32, bf16, fp16; got 'int3'"),
        (("merge", "--adapter", "nowhere"), "nowhere is no adapter folder"),
        (("merge", "--adapter", "nowhere", "--weights", "int7"), "weights must be one of auto"),
    ],
)
def test_refusals_write_nothing(riftco, model, tmp_path, words, says):
    done = riftco(words[0], "--model", model, "--output", tmp_path / "out", *words[1:], code=2)
    assert says in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", [("quantize", "--type", "nf4"), ("quantize", "--type", "q8_0"), ("export", "--format", "hf")], ids=str
)
def test_a_used_output_is_refused_before_the_model_is_read(riftco, tmp_path, words):
    used = tmp_path / "used"
    if "q8_0" in words:
        used.write_text("mine")
    else:
        used.mkdir()
        (used / "file").write_text("mine")
    done = riftco(words[0], "--model", tmp_path / "no_model", "--output", used, *words[1:], code=2)
    assert f"--output {used} is already there" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["used"]


def test_a_failure_leaves_nothing(riftco, folder, tmp_path, monkeypatch):
    import errno

    import safetensors.torch

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    for words in (("quantize", "--type", "nf4"), ("export", "--format", "hf")):
        riftco(words[0], "--model", folder, "--output", tmp_path / "out", *words[1:], code=1)
        assert not any(tmp_path.iterdir())
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    riftco("quantize", "--model", folder, "--type", "q8_0", "--output", tmp_path / "out.gguf", code=1)
    assert not any(tmp_path.iterdir())
