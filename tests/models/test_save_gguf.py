"""GGUF files that riftco writes: what comes back is what went in, and what cannot be said is refused."""

import dataclasses

import llama_cpp_runs
import pytest
import torch
from tiny_models import hf_model

from riftco.models import DecoderConfig, ModelError, load_model, load_tokenizer, save_gguf, save_hf
from riftco.models.decoder import Decoder
from riftco.models.gguf_vocabulary import tokenizer_metadata
from riftco.models.load import open_source
from riftco.models.save_gguf import KINDS

gguf = pytest.importorskip("gguf")
IDS = torch.tensor([[5, 3, 5, 99, 7, 5, 2, 8, 100, 200]])
COME_BACK = (
    "llama", "llama-tied", "llama-3.1", "llama-linear-rope", "llama-biases", "mistral", "mistral-window", "qwen2",
    "qwen2-yarn", "qwen3", "smollm2", "gemma2", "gemma3", "phi3", "phi3-window", "phi3-longrope", "phi3-partial-rope",
)  # fmt: skip


def decoder(family, **changes):
    reference = hf_model(family, vocab_size=llama_cpp_runs.VOCABULARY, **changes)
    model = Decoder(DecoderConfig.from_hf(reference.config.to_dict())).eval()
    model.load_state_dict(reference.state_dict())
    return model


@pytest.mark.parametrize("family", COME_BACK)
def test_it_comes_back(family, tmp_path):
    scalar = {"query_pre_attn_scalar": 32} if family.startswith("gemma") else {}
    model = decoder(family, **scalar)
    save_gguf(model, tmp_path / "model.gguf", kind="F32", tokenizer=llama_cpp_runs.TOKENIZER)
    back, tokenizer = load_model(tmp_path / "model.gguf")
    for name, p in model.named_parameters():  # Gemma's norms are stored with 1 added to them
        torch.testing.assert_close(back.get_parameter(name), p, rtol=0, atol=1e-6 * model.config.norm_offset)
    assert back.config.tie_word_embeddings == model.config.tie_word_embeddings
    with torch.no_grad():
        want = model(IDS)
        assert (back(IDS) - want).abs().max() <= 1e-5 * want.abs().max()
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_packages_quantisation(kind, tmp_path):
    model = decoder("llama", intermediate_size=72)  # 72: no row of blocks of 32
    save_gguf(model, tmp_path / "model.gguf", kind=kind)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    wide = "F16" if kind.startswith("Q") else kind
    assert tensors["blk.0.attn_v.weight"].tensor_type.name == kind
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == wide
    assert tensors["output_norm.weight"].tensor_type.name == "F32"
    number = gguf.GGMLQuantizationType[kind]
    rows = model.model.layers[0].self_attn.v_proj.weight.detach()
    want = rows.numpy() if kind == "F32" else gguf.dequantize(gguf.quantize(rows.numpy(), number), number)
    back, _ = load_model(tmp_path / "model.gguf", with_tokenizer=False)
    assert torch.equal(back.model.layers[0].self_attn.v_proj.weight, torch.from_numpy(want))


def test_one_tensor_is_in_memory_at_a_time(tmp_path, monkeypatch):
    import weakref

    seen, most = [], []
    quantise = gguf.quantize

    def watched(values, kind):
        made = quantise(values, kind)
        seen.append(weakref.ref(made))
        most.append(sum(r() is not None for r in seen))
        return made

    monkeypatch.setattr(gguf, "quantize", watched)
    save_gguf(decoder("llama"), tmp_path / "model.gguf", kind="Q8_0")
    assert len(most) == 21 and max(most) <= 2  # the one that is written, and the one before while it is replaced


def test_packed_layers_are_decoded(tmp_path):
    save_hf(decoder("llama"), tmp_path / "plain")
    model, _ = load_model(tmp_path / "plain", weights="nf4", with_tokenizer=False)
    save_gguf(model, tmp_path / "model.gguf", kind="F32")
    back, _ = load_model(tmp_path / "model.gguf", with_tokenizer=False)
    with torch.no_grad():
        torch.testing.assert_close(back(IDS), model(IDS), rtol=1e-4, atol=1e-4)


def test_what_a_file_cannot_say_is_refused(tmp_path):
    model = decoder("gemma2", query_pre_attn_scalar=24)
    with pytest.raises(ModelError, match=r"query_pre_attn_scalar 24.* cannot be said in a GGUF file of gemma2"):
        save_gguf(model, tmp_path / "model.gguf")
    model = decoder("qwen2-window")
    with pytest.raises(ModelError, match=r"sliding_layers \(1,\) cannot be said"):
        save_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"no_rope_layers \(1,\) cannot be said in a GGUF file of smollm3"):
        save_gguf(decoder("smollm3"), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"kind must be one of F32, .*; got 'Q4_K'"):
        save_gguf(decoder("llama"), tmp_path / "model.gguf", kind="Q4_K")
    assert not any(tmp_path.iterdir())
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(ModelError, match="already there"):
        save_gguf(decoder("llama"), tmp_path / "model.gguf")


def folder(tmp_path, backend, vocabulary, **options):
    """A Hugging Face folder with this tokenizer."""
    from transformers import PreTrainedTokenizerFast

    ends = {f"{k}_id": backend.token_to_id(v) for k, v in options.items() if k in ("bos_token", "eos_token")}
    reference = hf_model("llama", vocab_size=vocabulary, **ends)
    reference.save_pretrained(tmp_path / "folder")
    PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


def byte_level(pre):
    from tokenizers import Tokenizer, decoders, models, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    from tokenizers.pre_tokenizers import ByteLevel

    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|bos|>", "<|im_end|>"], initial_alphabet=sorted(ByteLevel.alphabet())
    )
    backend.train_from_iterator(["the cat sat on the mat, 1234 times; ünïcödé too"] * 4, trainer)
    return backend


def sentencepiece():
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    letters = ["▁", *"theca", "th", "he", "the", "▁the", "▁t"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *letters]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "t"), ("h", "e")]
    vocabulary = {p: i for i, p in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return backend


def tokenizers_to_write():
    from tokenizers import Regex, pre_tokenizers

    from riftco.models.gguf_tokenizer import CUTS

    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt-2": whole,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]),
        **{
            name: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CUTS[name]), "isolated"), bare])
            for name in ("llama-bpe", "qwen2", "tekken")
        },
    }


TEXTS = ("the cat sat", " on  the mat\n\n, 1234 times;", "ünïcödé 🦊<|im_end|>", "HE'S 12 the")


NAMES = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "sentencepiece")


def named_folder(name, tmp_path):
    if name == "sentencepiece":
        backend, special = sentencepiece(), dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    else:
        backend = byte_level(tokenizers_to_write()[name])
        special = dict(bos_token="<|bos|>", eos_token="<|im_end|>")
    return folder(tmp_path, backend, 320, chat_template="{{ messages[0].content }}", **special)


@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_reads_the_same_tokens(name, tmp_path):
    where = named_folder(name, tmp_path)
    mine, (model, _) = load_tokenizer(where), load_model(where, with_tokenizer=False)
    save_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer_metadata(open_source(where), mine))
    theirs = llama_cpp_runs.opened(tmp_path / "model.gguf")
    for text in TEXTS:
        assert theirs.tokenize(text.encode(), add_bos=False, special=True) == mine.encode(text), text


@pytest.mark.parametrize("name", NAMES)
def test_a_folders_tokenizer_goes_with_the_model(name, tmp_path):
    where = named_folder(name, tmp_path)
    source = open_source(where)
    mine = load_tokenizer(where)
    made = tokenizer_metadata(source, mine)
    assert made["tokenizer.ggml.model"] == ("llama" if name == "sentencepiece" else "gpt2")
    assert made.get("tokenizer.ggml.pre") == (None if name == "sentencepiece" else name)
    model, _ = load_model(where, with_tokenizer=False)
    save_gguf(model, tmp_path / "model.gguf", kind="F16", tokenizer=made)
    back = load_tokenizer(tmp_path / "model.gguf")
    assert (back.bos_id, back.eos_id, back.stop_ids) == (mine.bos_id, mine.eos_id, mine.stop_ids)
    assert back.render_chat([{"role": "user", "content": "hi"}]) == "hi"
    for text in TEXTS:
        assert back.encode(text) == mine.encode(text), text
        assert back.encode(text, add_special_tokens=True) == mine.encode(text, add_special_tokens=True)


def test_a_cut_that_has_no_name_is_refused(tmp_path):
    from tokenizers import pre_tokenizers

    where = folder(tmp_path, byte_level(pre_tokenizers.Whitespace()), 320)
    with pytest.raises(ModelError, match=r"llama\.cpp's name for how its tokenizer cuts text is not known here"):
        tokenizer_metadata(open_source(where), load_tokenizer(where))


def test_every_field_of_the_config_is_checked():
    """A field that a later config gains is compared, too."""
    from riftco.models.save_gguf import FREE

    names = {f.name for f in dataclasses.fields(DecoderConfig)}
    assert set(FREE) < names
