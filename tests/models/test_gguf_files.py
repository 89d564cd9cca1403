"""GGUF files: every accepted type against gguf.dequantize, row order, and files that are broken or not supported."""

import struct

import numpy as np
import pytest
import torch
from gguf_blocks import copy_without, finish
from tiny_models import hf_model, write_gguf

from riftco.models.digest import base_digest
from riftco.models.errors import ModelError
from riftco.models.gguf import TYPES, GGUFFile, hf_name

gguf = pytest.importorskip("gguf")

WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.mark.parametrize("kind", WRITABLE)
def test_tensors_of_every_type_come_back_in_hugging_face_order(tmp_path, kind):
    model = hf_model("llama", intermediate_size=96)
    write_gguf(tmp_path / "m.gguf", model, matrix_type=kind)
    file = GGUFFile(tmp_path / "m.gguf")
    stored = gguf.GGMLQuantizationType[kind]
    state = model.state_dict()
    assert set(file.shapes) == set(state)
    for name, value in state.items():
        want = value
        if value.dim() == 2 and name.startswith("model.layers."):  # quantising works along a row: order does not matter
            want = torch.from_numpy(gguf.dequantize(gguf.quantize(value.numpy(), stored), stored).copy())
        got = file.tensor(name)
        assert got.dtype == torch.float32 and torch.equal(got, want), name


@pytest.mark.parametrize("kind", [t for t in TYPES if t not in WRITABLE])
def test_k_quants_equal_the_reference(tmp_path, kind):
    stored = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[stored]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (96, 2 * size), dtype=np.uint8)
    raw &= 0xBF  # no float16 scale of any layout may be inf or NaN
    model = hf_model("qwen2", hidden_size=2 * block, num_hidden_layers=1)
    path = tmp_path / "m.gguf"
    write_gguf(path, model)
    writer = copy_without(path, "blk.0.ffn_up.weight", tmp_path / "k.gguf")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=stored)
    finish(writer)
    got = GGUFFile(tmp_path / "k.gguf").tensor("model.layers.0.mlp.up_proj.weight")
    want = torch.from_numpy(gguf.dequantize(raw, stored))
    assert got.shape == (96, 2 * block) and want.isfinite().all() and want.std() > 0
    assert torch.equal(got, want)


def test_rows_are_reordered_only_where_the_file_permutes_them(tmp_path):
    for family in ("llama-biases", "mistral", "qwen2", "qwen3"):
        model = hf_model(family)
        path = tmp_path / f"{family}.gguf"
        write_gguf(path, model)
        file = GGUFFile(path)
        for name, value in model.state_dict().items():
            if name != "lm_head.weight" or not model.config.tie_word_embeddings:
                assert torch.equal(file.tensor(name), value), name
        assert file.config.attention_bias == (family in ("llama-biases", "qwen2"))
        assert file.config.mlp_bias == file.config.output_bias == (family == "llama-biases")


def test_rope_freqs_go_into_the_config(tmp_path):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", hf_model("llama"), rope_freqs=divisors)
    file = GGUFFile(tmp_path / "m.gguf")
    assert np.allclose(file.config.rope.scaling["short_factor"], divisors)
    assert not any("rope" in name for name in file.shapes)


def test_an_unsupported_type_names_the_tensor_and_what_is_accepted(tmp_path):
    model = hf_model("qwen2", hidden_size=256, num_hidden_layers=1)
    write_gguf(tmp_path / "m.gguf", model)
    writer = copy_without(tmp_path / "m.gguf", "blk.0.ffn_up.weight", tmp_path / "bad.gguf")
    kind = gguf.GGMLQuantizationType.IQ2_XS
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((96, 74), dtype=np.uint8), raw_dtype=kind)
    finish(writer)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight has type IQ2_XS.*accepted: F32, F16") as refused:
        GGUFFile(tmp_path / "bad.gguf")
    assert "\n" not in str(refused.value)


def test_every_cut_and_many_flips_give_one_line(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, hf_model("llama", num_hidden_layers=1), tokenizer__ggml__tokens=["a", "b"], general__name="x")
    whole = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    for length in [0, 3, 4, 8, 23, 24, *range(25, 2200, 37), len(whole) // 2, len(whole) - 40]:
        broken.write_bytes(whole[:length])
        with pytest.raises(ModelError) as refused:
            GGUFFile(broken)
        assert "\n" not in str(refused.value), length
        assert str(broken) in str(refused.value), length
    rng = np.random.default_rng(1)
    for _ in range(150):
        spoiled = bytearray(whole)
        for place in rng.integers(0, 2200, 3):
            spoiled[place] = rng.integers(0, 256)
        broken.write_bytes(spoiled)
        try:
            GGUFFile(broken)  # a flip inside a name or a value may leave a readable file
        except ModelError as refused:
            assert "\n" not in str(refused)


def test_other_versions_and_impossible_counts_are_refused_before_reading(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 2, 0, 0) + bytes(64))
    with pytest.raises(ModelError, match="GGUF version 2 is not supported; accepted: 3"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + bytes(64))
    with pytest.raises(ModelError, match="promises more"):
        GGUFFile(path)
    path.write_bytes(b"GGML" + bytes(64))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GGUFFile(path)


def test_an_array_that_promises_more_than_the_file_holds_ends(tmp_path):
    path = tmp_path / "m.gguf"
    key = b"tokenizer.ggml.token_type"
    array = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 5, 2**40)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(64))
    with pytest.raises(ModelError, match="not a readable GGUF file"):
        GGUFFile(path)


def test_unknown_names_stay_for_the_loader_to_refuse():
    assert hf_name("blk.12.attn_q_norm.weight") == "model.layers.12.self_attn.q_norm.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    for name in ("blk.0.ffn_gate_exps.weight", "blk.x.attn_q.weight", "v.patch_embd.weight", "plain"):
        assert hf_name(name) == name


def test_the_digest_sees_a_change_of_weights_and_not_of_place(tmp_path):
    a, b = tmp_path / "a.gguf", tmp_path / "sub" / "b.gguf"
    b.parent.mkdir()
    content = np.random.default_rng(0).integers(0, 256, 9 << 20, dtype=np.uint8)
    a.write_bytes(content.tobytes())
    b.write_bytes(content.tobytes())
    assert base_digest(a) == base_digest(b) and len(base_digest(a)) == 64
    content ^= 1
    b.write_bytes(content.tobytes())
    assert base_digest(a) != base_digest(b)
    b.write_bytes((content ^ 1).tobytes() + b"\0")
    assert base_digest(a) != base_digest(b)
    with pytest.raises(ModelError, match="missing"):
        base_digest(tmp_path / "missing.gguf")
