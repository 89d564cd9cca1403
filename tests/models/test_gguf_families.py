"""GGUF files of every architecture: converted and packed weights against transformers over the same numbers, and
against transformers' own reader."""

import pytest
import torch
import torch.nn.functional as F
from families import covers
from gguf_blocks import copied_with
from support import close
from tiny_models import gguf_model, rounded, write_gguf

from riftco.adapters import LoraSpec, apply_lora
from riftco.functional import dequantize_gguf
from riftco.kernels.gguf_linear.cases import random_blocks
from riftco.models import ModelError, generate_tokens, load_model
from riftco.models.gguf import PACKED, TYPES, GGUFFile
from riftco.nn import GGUFEmbedding, GGUFLinear, NF4Linear

gguf = pytest.importorskip("gguf")

IDS = torch.arange(80).view(2, 40) * 2 % 160


def load(path, **options):
    return load_model(path, with_tokenizer=False, **options)[0]


def written(tmp_path, family, kind, everywhere=False):
    model = gguf_model(family)
    write_gguf(tmp_path / "m.gguf", model, matrix_type=kind, everywhere=everywhere)
    return tmp_path / "m.gguf", rounded(model, kind, everywhere)


@pytest.mark.parametrize("kind", ["F16", "Q5_1"])
@covers("GGUF", without=("qwen2-window",))
def test_converted_weights(tmp_path, family, kind):
    path, reference = written(tmp_path, family, kind)
    model = load(path)
    close(model(IDS), reference(IDS).logits)
    assert model.config.architecture == reference.config.model_type or "mistral" in family


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@covers("GGUF", without=("qwen2-window",))
def test_packed_weights(tmp_path, family, kind):
    """Embedding and head too: logits, loss and greedy text are those of the dequantised model."""
    path, reference = written(tmp_path, family, kind, everywhere=True)
    model = load(path, weights="packed")
    layers = {n: type(m) for n, m in model.named_modules() if n.endswith(("_proj", "lm_head", "embed_tokens"))}
    assert set(layers.values()) == {GGUFLinear, GGUFEmbedding}
    want = reference(IDS).logits
    close(model(IDS), want)
    target = IDS.roll(-1, 1)
    close(model.loss(IDS, target), F.cross_entropy(want.flatten(0, 1), target.flatten()))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = reference.generate(IDS[:1, 1:10], max_new_tokens=12, **options)[0, 9:].tolist()
    assert list(generate_tokens(model, IDS[0, 1:10].tolist(), max_new_tokens=12)) == text


READ_BY_TRANSFORMERS = ("llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm2")


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_weights(tmp_path, family):
    from transformers import AutoModelForCausalLM

    _, reference = written(tmp_path, family, "Q8_0", everywhere=True)
    # its own reading of the metadata leaves out what these configs differ in from the published models
    options = {"gguf_file": "m.gguf", "config": reference.config, "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options).state_dict()
    ours = load(tmp_path / "m.gguf").state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


@pytest.mark.parametrize("family", ["llama-biases", "gemma2", "phi3"])
def test_an_adapter_over_packed_weights_trains_as_over_the_dequantised_ones(tmp_path, family):
    path, _ = written(tmp_path, family, "Q8_0", everywhere=True)
    grads = []
    for weights in ("packed", "fp32"):
        model = load(path, weights=weights)
        apply_lora(model, LoraSpec(rank=4, target_modules=r".*(_proj|lm_head)"), seed=1)
        with torch.no_grad():
            for name, p in sorted(model.named_parameters()):
                if "lora_B" in name:
                    p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view_as(p))
        model.activation_checkpointing = "block"
        model.loss(IDS, IDS.roll(-1, 1)).backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys() and any("lm_head" in n for n in grads[0])
    for name, grad in grads[0].items():
        close(grad, grads[1][name])


@pytest.mark.parametrize("kind", [t for t in TYPES if t not in ("F32", "F16", "BF16")])
def test_every_type_of_block(tmp_path, kind):
    """Rows of q come back in the decoder's order, packed or not; what cannot stay packed says so."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    model = gguf_model("llama", hidden_size=256, head_dim=32, num_hidden_layers=1)
    write_gguf(tmp_path / "m.gguf", model)
    if kind in PACKED:
        raw = random_blocks(kind, 128 * 256 // block, torch.Generator().manual_seed(0)).view(128, -1).numpy()
    else:
        raw = torch.randint(0, 0x3C, (128, 256 // block * size), dtype=torch.uint8).numpy()
    copied_with(tmp_path / "m.gguf", tmp_path / "k.gguf", "blk.0.attn_q.weight", raw, kind)
    name = "model.layers.0.self_attn.q_proj"
    want = GGUFFile(tmp_path / "k.gguf").tensor(f"{name}.weight")
    assert want.isfinite().all() and want.std() > 0
    if kind not in PACKED:
        says = f"tensor {name}.weight of .* has type {kind}, which cannot stay packed; accepted to stay packed: Q8_0"
        with pytest.raises(ModelError, match=says):
            load(tmp_path / "k.gguf", weights="packed")
        assert load(tmp_path / "k.gguf").get_submodule(name).weight.shape == (128, 256)
        return
    layer = load(tmp_path / "k.gguf", weights="packed").get_submodule(name)
    assert layer.weight.format == kind
    assert torch.equal(dequantize_gguf(layer.weight, torch.float32), want)


def test_weights_of_every_kind_from_one_file(tmp_path):
    path, _ = written(tmp_path, "llama", "Q8_0")
    small = load(path, weights="nf4", dtype=torch.bfloat16)
    assert type(small.model.layers[0].mlp.up_proj) is NF4Linear and small.dtype == torch.bfloat16
    packed = load(path, weights="packed", dtype=torch.bfloat16)
    assert type(packed.lm_head) is torch.nn.Linear  # stored in F32
    assert packed.dtype == packed.lm_head.weight.dtype == torch.bfloat16
    assert packed(IDS).dtype == torch.bfloat16
    assert load(path, weights="bf16").dtype == torch.bfloat16
    gguf_model("llama").save_pretrained(tmp_path / "hf")
    with pytest.raises(ModelError, match="weights='packed' is for GGUF files"):
        load(tmp_path / "hf", weights="packed")


def test_packed_modules_move_cast_and_save(tmp_path):
    path, _ = written(tmp_path, "llama-tied", "Q8_0", everywhere=True)
    model = load(path, weights="packed")
    embedding = model.model.embed_tokens
    assert model.lm_head.weight is embedding.weight  # one copy of the bytes
    ids = torch.tensor([[3, 3, 159]])
    want = dequantize_gguf(embedding.weight, torch.float32)[ids]
    assert torch.equal(embedding(ids), want) and embedding(ids).dtype == torch.float32
    state = model.state_dict()
    model.to(torch.bfloat16)
    assert torch.equal(embedding(ids), want.bfloat16()) and model.dtype == torch.bfloat16
    other = load(path, weights="packed")
    other.model.embed_tokens.weight = other.model.embed_tokens.weight.map(torch.zeros_like)
    other.load_state_dict(state)
    assert torch.equal(other.model.embed_tokens(ids), want)
    short = GGUFEmbedding(embedding.weight.rows(torch.arange(5)))
    missing = short.load_state_dict({}, strict=False).missing_keys
    assert missing == ["weight", "weight.ggml_type"]
    with pytest.raises(RuntimeError, match="weight: GGUFWeight: a Q8_0 weight"):
        short.load_state_dict(embedding.state_dict())


@pytest.mark.gpu
def test_a_gpu_holds_packed_weights(tmp_path):
    path, _ = written(tmp_path, "gemma3", "Q4_0", everywhere=True)
    there = load(path, weights="packed", dtype=torch.float32, device="cuda")
    assert there.model.embed_tokens.weight.device.type == there.lm_head.weight.device.type == "cuda"
    close(there(IDS.cuda()).cpu(), load(path, weights="packed")(IDS))
