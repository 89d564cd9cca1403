"""bitsandbytes 4-bit checkpoints both ways with transformers: the same bits, and the same logits."""

import json

import pytest
import torch
from families import covers
from tiny_models import hf_model

from riftco.models import ModelError, load_model, save_hf
from riftco.nn import NF4Linear

bnb = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")
# bitsandbytes 0.50's AVX-512 dequantiser reads wrong absmax where rows are no multiple of the block of 64
FITTING = {"smollm2": {"hidden_size": 192}, "mistral": {"head_dim": 32}}
IDS = torch.tensor([[5, 3, 5, 99, 7, 5, 2, 8], [11, 7, 7, 0, 1, 42, 5, 9]])


def their_model(folder, double_quant=True, **more):
    options = {}
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_compute_dtype=torch.float32, **more,
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu", attn_implementation="eager", **options
    ).eval()
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):  # or a forward on some CPUs repacks the weight and rounds its absmax
            module.support_avx512bf16_for_cpu = False
    return model


def same_bits(mine, theirs):
    """Codes, absmax, nested absmax and map, offset, block sizes of every quantised layer; all other weights."""
    ours = {n: m for n, m in mine.named_modules() if isinstance(m, NF4Linear)}
    packed = {n: m for n, m in theirs.named_modules() if isinstance(m, bnb.nn.Linear4bit)}
    assert ours.keys() == packed.keys() and ours
    for name, layer in ours.items():
        state, w = packed[name].weight.quant_state, layer.weight
        assert torch.equal(w.codes.view(-1), packed[name].weight.data.view(-1)), name
        assert torch.equal(w.absmax, state.absmax) and w.block_size == state.blocksize and w.shape == state.shape
        assert (w.nested is None) == (not state.nested)
        if w.nested is not None:
            assert torch.equal(w.nested.absmax, state.state2.absmax) and torch.equal(
                w.nested.quant_map, state.state2.code
            )
            assert w.nested.offset == float(state.offset) and w.nested.block_size == state.state2.blocksize
    rest = {n: p for n, p in mine.named_parameters()}
    theirs_rest = dict(theirs.named_parameters())
    assert all(torch.equal(p, theirs_rest[n]) for n, p in rest.items())


@covers("bitsandbytes")
def test_both_ways(family, tmp_path):
    hf_model(family, intermediate_size=128, **FITTING.get(family, {})).save_pretrained(tmp_path / "plain")
    theirs = their_model(tmp_path / "plain")
    theirs.save_pretrained(tmp_path / "theirs")
    mine, _ = load_model(tmp_path / "theirs", with_tokenizer=False)
    same_bits(mine, theirs)
    with torch.no_grad():
        want = theirs(IDS).logits
        assert (mine(IDS) - want).abs().max() <= 1e-4 * want.abs().max()

    save_hf(mine, tmp_path / "mine", quantised=True)
    back = their_model(tmp_path / "mine")
    same_bits(mine, back)
    with torch.no_grad():
        assert torch.equal(back(IDS).logits, want)


def test_what_riftco_quantised_is_what_transformers_quantises(tmp_path):
    hf_model("llama-tied").save_pretrained(tmp_path / "plain")
    mine, _ = load_model(tmp_path / "plain", weights="nf4", with_tokenizer=False)
    same_bits(mine, their_model(tmp_path / "plain"))


def test_single_quantisation_in_shards(tmp_path):
    hf_model("qwen2").save_pretrained(tmp_path / "plain")
    theirs = their_model(tmp_path / "plain", double_quant=False)
    theirs.save_pretrained(tmp_path / "theirs")
    mine, _ = load_model(tmp_path / "theirs", with_tokenizer=False)
    same_bits(mine, theirs)
    save_hf(mine, tmp_path / "mine", quantised=True, shard_bytes=20_000)
    files = sorted(p.name for p in (tmp_path / "mine").iterdir())
    assert len(files) == 5 and "model.safetensors.index.json" in files
    same_bits(mine, their_model(tmp_path / "mine"))
    again, _ = load_model(tmp_path / "mine", with_tokenizer=False)
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), again.state_dict().values(), strict=True))


def test_layers_that_a_checkpoint_leaves_dense_stay_so(tmp_path):
    hf_model("llama").save_pretrained(tmp_path / "plain")
    theirs = their_model(tmp_path / "plain", llm_int8_skip_modules=["v_proj", "lm_head"])
    theirs.save_pretrained(tmp_path / "theirs")
    mine, _ = load_model(tmp_path / "theirs", with_tokenizer=False)
    assert type(mine.model.layers[1].self_attn.v_proj) is torch.nn.Linear
    same_bits(mine, theirs)
    save_hf(mine, tmp_path / "mine", quantised=True)
    same_bits(mine, their_model(tmp_path / "mine"))


def test_codes_stored_as_another_dtype(tmp_path):
    """What FSDP wants: the same bytes under the name of bfloat16."""
    hf_model("llama").save_pretrained(tmp_path / "plain")
    their_model(tmp_path / "plain", bnb_4bit_quant_storage=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    mine, _ = load_model(tmp_path / "theirs", with_tokenizer=False)
    same_bits(mine, their_model(tmp_path / "plain"))


def test_modules_both_ways(tmp_path):
    hf_model("llama-biases").save_pretrained(tmp_path / "plain")
    layer = their_model(tmp_path / "plain").model.layers[0].self_attn.q_proj
    ours = NF4Linear.from_bnb(layer)
    back = ours.to_bnb()
    a, b = layer.state_dict(), back.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert back.bias is layer.bias and isinstance(back, bnb.nn.Linear4bit)
    back.support_avx512bf16_for_cpu = False
    x = torch.randn(3, 64)
    assert torch.equal(back(x), layer(x))
    torch.testing.assert_close(ours(x), layer(x))


def test_nothing_to_keep_packed_is_refused(tmp_path):
    hf_model("llama").save_pretrained(tmp_path / "plain")
    model, _ = load_model(tmp_path / "plain", with_tokenizer=False)
    with pytest.raises(ModelError, match="no layer of the model is NF4; load it with weights='nf4'"):
        save_hf(model, tmp_path / "mine", quantised=True)
    assert not (tmp_path / "mine").exists()
