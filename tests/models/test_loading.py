"""Loading and saving: folders, shards, GGUF files and 4-bit weights against transformers; what is refused."""

import json
import shutil
import sys
import types
import weakref

import pytest
import torch
from families import FAMILIES, SIZES
from safetensors.torch import load_file, save_file
from support import close
from tiny_models import byte_level_vocabulary, hf_model, write_gguf

from riftco.functional import dequantize_nf4
from riftco.models import DecoderConfig, load_model, load_tokenizer, save_hf
from riftco.models.digest import base_digest
from riftco.models.errors import ModelError
from riftco.models.load import build
from riftco.nn import NF4Linear

IDS = torch.arange(40).view(2, 20) * 3
VOCABULARY = byte_level_vocabulary([], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
TOKENIZER = {**VOCABULARY, "tokenizer__ggml__pre": "smollm", "tokenizer__ggml__eos_token_id": 2}


def load(path, **options):
    return load_model(path, with_tokenizer=False, **options)[0]


def refuses(path, **options) -> str:
    with pytest.raises(ModelError) as refused:
        load(path, **options)
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.fixture
def folder(tmp_path):
    hf_model("llama-3.1").save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def rewrite(folder, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def reconfigure(folder, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_of_every_family(tmp_path, family):
    reference = hf_model(family)
    reference.save_pretrained(tmp_path / "m")
    model = load(tmp_path / "m")
    assert model.dtype == torch.float32 and all(p.requires_grad for p in model.parameters())
    close(model(IDS), reference(IDS).logits)


def test_shards_equal_the_whole(folder, tmp_path):
    hf_model("llama-3.1").save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    for a, b in zip(load(tmp_path / "shards").parameters(), load(folder).parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf_logits_equal_transformers_over_the_same_weights(tmp_path, family, kind):
    import gguf

    reference = hf_model(family, **({"head_dim": 32} if family == "mistral" else {}))
    write_gguf(tmp_path / "m.gguf", reference, matrix_type=kind)
    stored = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for name, p in reference.named_parameters():
            if p.dim() == 2 and name.startswith("model.layers."):
                p.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(p.detach().numpy(), stored), stored).copy()))
    model = load(tmp_path / "m.gguf")
    close(model(IDS), reference(IDS).logits)


def test_llama3_frequencies_in_a_gguf_file(tmp_path):
    reference = hf_model("llama-3.1")
    plain = 500000.0 ** (-torch.arange(0, 32, 2) / 32)
    write_gguf(tmp_path / "m.gguf", reference, rope_freqs=plain / reference.model.rotary_emb.inv_freq)
    model = load(tmp_path / "m.gguf")
    close(model(IDS), reference(IDS).logits)
    save_hf(model, tmp_path / "hf")
    close(load(tmp_path / "hf")(IDS), reference(IDS).logits)


def test_weights_of_every_kind(folder):
    plain = load(folder, weights="fp32")
    for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = load(folder, weights=kind)
        for a, b in zip(model.parameters(), plain.parameters()):
            assert a.dtype == dtype and torch.equal(a, b.to(dtype))
    small = load(folder, weights="nf4")
    kinds = {type(m) for n, m in small.named_modules() if n.endswith("_proj")}
    assert kinds == {NF4Linear}
    assert type(small.lm_head) is torch.nn.Linear
    assert torch.equal(small.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    with torch.no_grad():
        for name, module in plain.named_modules():
            if name.endswith("_proj"):
                module.weight.copy_(dequantize_nf4(small.get_submodule(name).weight, torch.float32))
    close(small(IDS), plain(IDS))
    assert load(folder, weights="nf4", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert "weights must be one of auto, fp32, bf16, fp16, nf4, packed; got 'int8'" in refuses(folder, weights="int8")
    assert "dtype belongs to weights='nf4'" in refuses(folder, dtype=torch.float16)


def test_nf4_holds_one_unquantised_layer_at_a_time(folder, monkeypatch):
    from riftco.models.safetensors_folder import SafetensorsFolder

    weights = []
    real, original = NF4Linear.from_linear.__func__, SafetensorsFolder.tensor

    def spy(cls, linear, *args, **kwargs):
        weights.append(weakref.ref(linear.weight))
        return real(cls, linear, *args, **kwargs)

    def tensor(self, name):
        assert not [w for w in weights if w() is not None], "a layer outlives its quantisation"
        return original(self, name)

    monkeypatch.setattr(NF4Linear, "from_linear", classmethod(spy))
    monkeypatch.setattr(SafetensorsFolder, "tensor", tensor)
    load(folder, weights="nf4")
    assert len(weights) == 14


@pytest.fixture(scope="module")
def bnb_folder(tmp_path_factory):
    """A 4-bit checkpoint as transformers and bitsandbytes write it, and a plain model with its dequantised weights:
    bitsandbytes' own forward on a CPU rounds to bfloat16, and its dequantisation wants rows of whole blocks."""
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    place = tmp_path_factory.mktemp("bnb")
    plain = hf_model("llama-biases", intermediate_size=128)
    plain.save_pretrained(place / "whole")
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        place / "whole", quantization_config=quantisation, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(place / "nf4")
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
                plain.get_submodule(name).weight.copy_(weight)
    return place / "nf4", plain


def test_bitsandbytes_checkpoints_are_taken_as_they_are(bnb_folder, tmp_path):
    folder, reference = bnb_folder
    for weights in ("auto", "nf4"):
        model = load(folder, weights=weights)
        assert {type(m) for n, m in model.named_modules() if n.endswith("_proj")} == {NF4Linear}
        close(model(IDS), reference(IDS).logits)
    stored = load_file(folder / "model.safetensors")
    layer = model.model.layers[1].mlp.up_proj
    assert torch.equal(layer.weight.codes, stored["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(layer.weight.absmax, stored["model.layers.1.mlp.up_proj.weight.absmax"])
    assert layer.bias.requires_grad
    assert "holds 4-bit weights; accepted for it: auto, nf4; got 'bf16'" in refuses(folder, weights="bf16")
    save_hf(model, tmp_path / "out")
    close(load(tmp_path / "out")(IDS), reference(IDS).logits)


def test_bitsandbytes_checkpoints_that_are_broken(bnb_folder, tmp_path):
    place = tmp_path / "m"
    shutil.copytree(bnb_folder[0], place)
    name = "model.layers.0.mlp.up_proj.weight"
    whole = load_file(place / "model.safetensors")
    for change, says in (
        ({f"{name}.absmax": None}, f"tensor {name}: "),
        ({name: None}, f"tensor {name} is missing"),
        ({name: torch.zeros(5, 1, dtype=torch.uint8)}, f"tensor {name}: "),
        (
            {name: whole["model.layers.0.mlp.down_proj.weight"].clone()} | _parts(whole, "up_proj", "down_proj"),
            "size mismatch",
        ),
        ({f"{name}.other": torch.zeros(1)}, f"tensor {name}.other is in"),
    ):
        save_file({k: v for k, v in (whole | change).items() if v is not None}, place / "model.safetensors")
        assert says in refuses(place), says
    for quantisation, says in (
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit weights are not supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes fp4"),
        ("gptq", "quantised by 'gptq'"),
    ):
        reconfigure(place, quantization_config=quantisation)
        assert says in refuses(place)


def _parts(tensors, to: str, of: str) -> dict:
    """The parts of layer `of`'s weight under the names of layer `to`."""
    start = f"model.layers.0.mlp.{of}.weight."
    return {k.replace(of, to): v.clone() for k, v in tensors.items() if k.startswith(start)}


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_folders_load_in_transformers(tmp_path, family):
    from transformers import AutoModelForCausalLM

    hf_model(family).save_pretrained(tmp_path / "in")
    model = load(tmp_path / "in")
    save_hf(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    close(again(IDS).logits, model(IDS), 1e-5)
    for a, b in zip(load(tmp_path / "out").parameters(), model.parameters()):
        assert torch.equal(a, b)


def test_saving_dequantises_shards_and_casts(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    model = load(folder, weights="nf4")
    save_hf(model, tmp_path / "out", shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    close(again(IDS).logits, model(IDS))
    close(load(tmp_path / "out")(IDS), model(IDS))
    save_hf(model, tmp_path / "half", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}


def test_saving_is_all_or_nothing(folder, tmp_path, monkeypatch):
    model = load(folder)
    with pytest.raises(ModelError, match="not empty"):
        save_hf(model, folder)

    def full_disk(*a, **k):
        raise OSError("disk full")

    (tmp_path / "place").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full_disk)
        with pytest.raises(OSError, match="disk full"):
            save_hf(model, tmp_path / "place" / "out")
    assert not list((tmp_path / "place").iterdir())
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    with pytest.raises(ModelError, match="up_proj is a Sequential; merge the adapter first"):
        save_hf(model, tmp_path / "place" / "out")
    assert not list((tmp_path / "place").iterdir())


def test_every_tensor_is_used_or_named(folder):
    def rename(tensors):
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)

    rewrite(folder, rename)
    assert "tensor model.layers.0.mlp.extra.weight is in" in refuses(folder)
    rewrite(folder, lambda t: (t.pop("model.layers.0.mlp.extra.weight"), t.pop("model.norm.weight")))
    assert "tensor model.norm.weight is missing from" in refuses(folder)
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    assert "tensors model.norm.weight and 1 more are missing" in refuses(folder)


def test_shapes_and_dtypes_name_the_tensor(folder):
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(folder, lambda t: t.update({name: t[name][:-1].contiguous()}))
    assert f"tensor {name} of {folder} has shape [63, 64]; its config makes it [64, 64]" in refuses(folder)
    rewrite(folder, lambda t: t.update({name: torch.zeros(64, 64, dtype=torch.int8)}))
    assert f"tensor {name} has dtype torch.int8; accepted" in refuses(folder)


def test_a_tied_copy_must_be_equal(tmp_path):
    hf_model("llama-tied").save_pretrained(tmp_path / "m")
    embedding = load_file(tmp_path / "m" / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path / "m", lambda t: t.update({"lm_head.weight": embedding.clone()}))
    model = load(tmp_path / "m")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rewrite(tmp_path / "m", lambda t: t.update({"lm_head.weight": embedding + 1}))
    assert "lm_head.weight differs" in refuses(tmp_path / "m")


def test_old_checkpoints_may_store_their_frequencies(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)}))
    load(folder)


def test_paths_that_hold_no_model(folder, tmp_path, monkeypatch):
    assert "no such file or folder" in refuses(tmp_path / "nowhere")
    fetched = "(riftco downloads nothing: hf download meta-llama/Llama-3.2-1B --local-dir FOLDER)"
    assert fetched in refuses("meta-llama/Llama-3.2-1B")
    assert all("(riftco downloads nothing)" in refuses(path) for path in ("models/tiny.gguf", "/a/b"))
    monkeypatch.chdir(tmp_path.parent)
    assert "(riftco downloads nothing)" in refuses(f"{tmp_path.name}/nowhere")  # beside what is here
    (tmp_path / "x.gguf").write_bytes(b"hello")
    assert "not a GGUF file; accepted" in refuses(tmp_path / "x.gguf")
    assert f"name the file itself: {tmp_path / 'x.gguf'}" in refuses(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle" in refuses(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "no weights" in refuses(folder)
    (folder / "config.json").write_text("[1]")
    assert "must hold a JSON object; got list" in refuses(folder)
    (folder / "config.json").write_text("{")
    assert "not a readable JSON file" in refuses(folder)


def test_folders_that_are_broken(folder, tmp_path):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 7, 200, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert "not a readable safetensors file" in refuses(folder), length
    file.write_bytes(whole)
    reconfigure(folder, quantization_config={"quant_method": "gptq"})
    assert "quantised by 'gptq'" in refuses(folder)
    reconfigure(folder, quantization_config=None, model_type="gpt_neox")
    assert "architecture 'gpt_neox' is not supported; accepted: llama" in refuses(folder)
    hf_model("llama").save_pretrained(tmp_path / "s", max_shard_size="20KB")
    index = tmp_path / "s" / "model.safetensors.index.json"
    first = sorted((tmp_path / "s").glob("model-*"))[0]
    first.rename(tmp_path / "elsewhere")
    assert f"names '{first.name}', which is not a file of this folder" in refuses(tmp_path / "s")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere"}}))
    assert "names '../elsewhere'" in refuses(tmp_path / "s")
    index.write_text("{}")
    assert "weight_map" in refuses(tmp_path / "s")


def test_a_model_and_its_tokenizer(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, hf_model("llama", vocab_size=300), **TOKENIZER)
    model, tokenizer = load_model(path, cache_dir=tmp_path / "cache")
    assert tokenizer.stop_ids == {0, 2} and model.config.vocab_size == 300
    assert (tmp_path / "cache" / "tokenizer.json").exists()
    save_hf(model, tmp_path / "hf")
    tokenizer.save(tmp_path / "hf")
    _, again = load_model(tmp_path / "hf")
    assert again.encode("hello 12") == tokenizer.encode("hello 12")
    assert load_tokenizer(tmp_path / "hf").stop_ids == {0, 2}
    write_gguf(path, hf_model("llama", vocab_size=200), **TOKENIZER)
    with pytest.raises(ModelError, match="its tokenizer has 259 tokens, its embedding 200"):
        load_model(path)


def test_the_digest_of_a_folder(folder, tmp_path):
    before = base_digest(folder)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "README.md").write_text("x")
    assert base_digest(tmp_path / "copy") == before
    rewrite(folder, lambda t: t["model.norm.weight"].add_(1e-3))
    assert base_digest(folder) != before
    reconfigure(tmp_path / "copy", rms_norm_eps=1e-4)
    assert base_digest(tmp_path / "copy") != before


def test_meta_parameters_never_survive(folder):
    model = load(folder, weights="nf4")
    tensors = [*model.parameters(), *model.buffers()]
    assert tensors and not any(t.is_meta for t in tensors)
    assert SIZES["num_hidden_layers"] == len(model.model.layers)


def test_build_takes_any_source():
    """A source is config, shapes and tensors by name: nothing else is asked of it."""
    reference = hf_model("qwen2")

    source = types.SimpleNamespace(
        path="memory",
        config=DecoderConfig.from_hf(reference.config.to_dict()),
        shapes={n: tuple(p.shape) for n, p in reference.named_parameters()},
        tensor=lambda name: reference.get_parameter(name).detach().clone(),
    )
    close(build(source, torch.float32)(IDS), reference(IDS).logits)


@pytest.mark.gpu
def test_a_gpu_holds_what_the_file_holds(folder):
    plain = load(folder)
    model = load(folder, device="cuda")
    assert model.dtype == torch.bfloat16 and model.device.type == "cuda"
    for a, b in zip(model.parameters(), plain.parameters()):
        assert torch.equal(a.cpu(), b.to(torch.bfloat16))
    packed = load(folder, weights="nf4", dtype=torch.float32, device="cuda")
    assert not [t for t in packed.parameters() if t.device.type != "cuda"]
    assert packed.model.layers[0].mlp.up_proj.weight.device.type == "cuda"
    logits = packed(IDS.cuda()).cpu()
    close(logits, packed.cpu()(IDS))  # quantised there: a few absmax codes differ from the CPU's


def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    write_gguf(tmp_path / "m.gguf", hf_model("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "needs the package gguf; run: pip install 'riftco[finetune]'" in refuses(tmp_path / "m.gguf")
