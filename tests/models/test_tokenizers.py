"""Tokenizers and chat templates from folders and from GGUF metadata, against transformers' own readers."""

import json

import pytest
from real_model import smollm2_or_skip
from tiny_models import byte_level_vocabulary, hf_model, write_gguf

from riftco.models import tokenizer as tokenizers
from riftco.models.errors import ModelError
from riftco.models.gguf import GGUFFile
from riftco.models.gguf_tokenizer import CUTS, convert
from riftco.models.tokenizer import SOURCE, Tokenizer, from_folder, from_gguf

CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġ Ġ", "1 2", "12 3", "' s", "Ċ Ċ", "ĠĠ ĠĠ", "l d"]
TEXTS = [
    "hello world",
    "  two  hell   12345 6",
    "it's  hers\n\n\tx",
    "naïve 日本 🙂",
    "<|im_start|>user\nhello<|im_end|>\n",
    "",
    " ",
    "1  23",
    "HELLO'S don't",
]
SPECIAL = {
    "tokenizer__ggml__bos_token_id": 1,
    "tokenizer__ggml__eos_token_id": 2,
    "tokenizer__ggml__unknown_token_id": 0,
    "tokenizer__ggml__padding_token_id": 2,
    "tokenizer__chat_template": CHATML,
}


def metadata_of(**written) -> dict:
    return {k.replace("__", "."): v for k, v in written.items()}


@pytest.fixture
def gguf_tokenizer(tmp_path):
    """A function: write a model with these tokenizer keys; return its path and what GGUFFile read."""
    model = hf_model("qwen2", vocab_size=300)

    def make(**keys):
        path = tmp_path / "m.gguf"
        write_gguf(path, model, **keys)
        return path, GGUFFile(path).metadata

    return make


def reference(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("cut", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_conversion_equals_transformers(gguf_tokenizer, cut):
    path, metadata = gguf_tokenizer(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre=cut)
    made, want = Tokenizer(convert(path, metadata)), reference(path)
    differs = 0
    for text in TEXTS:
        ids = made.encode(text)
        assert ids == want(text)["input_ids"], text
        assert made.decode(ids) == text
        differs += ids != Tokenizer(convert(path, {**metadata, "tokenizer.ggml.pre": "smollm"})).encode(text)
    assert differs  # the texts tell one cut from another


def test_smollm_cuts_every_digit_off_before_the_words(gguf_tokenizer):
    path, metadata = gguf_tokenizer(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre="smollm")
    made = Tokenizer(convert(path, metadata))
    pieces = made.hf.convert_ids_to_tokens(made.encode("hello  1234"))
    assert pieces == ["hello", "ĠĠ", "1", "2", "3", "4"]


def test_llama3_vocabularies_keep_words_that_no_merge_reaches(gguf_tokenizer):
    words = byte_level_vocabulary(MERGES, CONTROL)
    words["tokenizer__ggml__tokens"].append("zebra")
    words["tokenizer__ggml__token_type"].append(1)
    path, metadata = gguf_tokenizer(**words, **SPECIAL, tokenizer__ggml__pre="llama-bpe")
    assert Tokenizer(convert(path, metadata)).encode("zebra") == [len(words["tokenizer__ggml__tokens"]) - 1]


@pytest.mark.parametrize("bos", [True, False])
def test_sentencepiece_conversion_equals_transformers(gguf_tokenizer, bos):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    words = ["▁", *"helowrd", "he", "ll", "hell", "hello", "▁w", "or", "▁wor", "ld", "▁hello", "1"]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(words))]
    path, metadata = gguf_tokenizer(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens + words,
        tokenizer__ggml__scores=scores,
        tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * len(words),
        tokenizer__ggml__add_bos_token=bos,
        **SPECIAL,
    )
    made, want = Tokenizer(convert(path, metadata)), reference(path)
    for text in ("hello world", "hello  world 日本", "1 hold", "a\nb"):
        ids = made.encode(text, add_special_tokens=True)
        assert (ids[0] == 1) == bos
        assert ids == want(text)["input_ids"], text
        assert ids[bos:] == made.encode(text)
    assert made.decode(made.encode("hello world 日")) == "hello world 日"
    # as llama.cpp has it, a space is added in front of the text and behind special tokens, whatever is there
    assert made.hf.convert_ids_to_tokens(made.encode("</s>hello")) == ["</s>", "▁hello"]
    assert made.hf.convert_ids_to_tokens(made.encode(" he")) == ["▁", "▁", "he"]


def test_bos_and_eos_around_plain_text_only(gguf_tokenizer):
    keys = {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}
    path, metadata = gguf_tokenizer(
        **byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, **keys, tokenizer__ggml__pre="qwen2"
    )
    made = Tokenizer(convert(path, metadata))
    inner = made.encode("hello")
    assert made.encode("hello", add_special_tokens=True) == [1, *inner, 2]


def test_stop_ids_hold_every_end_of_turn(gguf_tokenizer):
    path, metadata = gguf_tokenizer(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre="qwen2")
    assert from_gguf(path, metadata, "d").stop_ids == {0, 2}
    assert from_gguf(path, {**metadata, "tokenizer.ggml.eot_token_id": 1}, "d").stop_ids == {0, 1, 2}
    made = from_gguf(path, metadata, "d")
    assert (made.bos_id, made.eos_id, made.pad_id, made.vocabulary_size) == (1, 2, 2, 3 + 256 + len(MERGES))


def test_half_a_surrogate_pair_is_no_text(gguf_tokenizer):
    path, metadata = gguf_tokenizer(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre="qwen2")
    made = Tokenizer(convert(path, metadata))
    for call in (made.encode, made.encode_with_offsets):
        with pytest.raises(ModelError, match=r"character 2 of the text is '\\ud83d'"):
            call("ab\ud83d")


def test_chat_rendering_and_its_refusals(gguf_tokenizer):
    path, metadata = gguf_tokenizer(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre="qwen2")
    made = Tokenizer(convert(path, metadata))
    text = made.render_chat([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids, spans = made.encode_with_offsets(text)
    assert ids[0] == 1 and spans[0] == (0, len("<|im_start|>"))
    assert "".join(text[a:b] for a, b in spans) == text
    with pytest.raises(ModelError, match="no tools here"):
        made.render_chat([{"role": "tool", "content": "x"}])
    with pytest.raises(ModelError, match="chat template refuses"):
        made.render_chat([{"role": "user", "content": None}])
    del metadata["tokenizer.chat_template"]
    with pytest.raises(ModelError, match="no chat template"):
        Tokenizer(convert(path, metadata)).render_chat([])


@pytest.mark.parametrize(
    "change, says",
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported; accepted: gpt2, llama"),
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre 'klingon' is not supported; accepted: gpt-2"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer in its metadata"),
        ({"tokenizer.ggml.merges": ["a"]}, "pairs of tokens"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "merges"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores"),
    ],
)
def test_metadata_that_is_refused(tmp_path, change, says):
    metadata = metadata_of(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre="qwen2")
    with pytest.raises(ModelError) as refused:
        convert(tmp_path / "m.gguf", {**metadata, **change})
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_the_conversion_is_cached_for_its_own_file_only(gguf_tokenizer, tmp_path, monkeypatch):
    path, metadata = gguf_tokenizer(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre="smollm")
    cache = tmp_path / "run" / "tokenizer"
    made = from_gguf(path, metadata, "digest-1", cache)
    assert sorted(p.name for p in cache.parent.iterdir()) == ["tokenizer"]  # nothing half-written beside it
    with monkeypatch.context() as patch:
        patch.setattr("riftco.models.gguf_tokenizer.convert", lambda *a: pytest.fail("converted again"))
        again = from_gguf(path, metadata, "digest-1", cache)
    for text in TEXTS:
        assert again.encode(text) == made.encode(text)
    assert again.stop_ids == made.stop_ids and again.pad_id == made.pad_id
    chat = [{"role": "user", "content": "hello"}]
    assert again.render_chat(chat) == made.render_chat(chat)
    from_gguf(path, metadata, "digest-2", cache)
    assert json.loads((cache / SOURCE).read_text()) == {"digest": "digest-2"}
    (cache / SOURCE).write_text("{")  # a cache that cannot be trusted is made again
    from_gguf(path, metadata, "digest-3", cache)
    assert json.loads((cache / SOURCE).read_text()) == {"digest": "digest-3"}


def test_a_failed_conversion_leaves_the_old_cache(gguf_tokenizer, tmp_path, monkeypatch):
    path, metadata = gguf_tokenizer(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre="smollm")
    cache = tmp_path / "run" / "tokenizer"
    from_gguf(path, metadata, "digest-1", cache)

    def full_disk(self, folder):
        raise OSError("disk full")

    monkeypatch.setattr(tokenizers.Tokenizer, "save", full_disk)
    with pytest.raises(OSError, match="disk full"):
        from_gguf(path, metadata, "digest-2", cache)
    assert json.loads((cache / SOURCE).read_text()) == {"digest": "digest-1"}
    assert sorted(p.name for p in cache.parent.iterdir()) == ["tokenizer"]


def test_folders(gguf_tokenizer, tmp_path):
    path, metadata = gguf_tokenizer(**byte_level_vocabulary(MERGES, CONTROL), **SPECIAL, tokenizer__ggml__pre="smollm")
    made = Tokenizer(convert(path, metadata))
    folder = tmp_path / "hf"
    folder.mkdir()
    with pytest.raises(ModelError, match="no tokenizer; accepted: tokenizer"):
        from_folder(folder)
    made.save(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    found = from_folder(folder, [9])
    assert found.stop_ids == {0, 2, 7, 9}
    assert [found.encode(t) for t in TEXTS] == [made.encode(t) for t in TEXTS]
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(ModelError, match="generation_config"):
        from_folder(folder)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(ModelError) as refused:
        from_folder(folder)
    assert "cannot be read" in str(refused.value) and "\n" not in str(refused.value)


def test_every_cut_is_a_regular_expression_that_compiles():
    from tokenizers import Regex

    assert all(Regex(cut) for cut in CUTS.values() if cut not in (None, "digits:"))


def test_smollm2():
    path = smollm2_or_skip()
    file = GGUFFile(path)
    made = from_gguf(path, file.metadata, "d")
    assert made.encode("Hello world 12  3") == [19556, 905, 216, 33, 34, 256, 35]
    assert made.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]
    assert made.stop_ids == {0, 2}
    text = made.render_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
