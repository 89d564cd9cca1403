"""Generation against transformers' own, sampling against the distribution it is meant to draw from, streaming text."""

import pytest
import torch
from families import covers
from tiny_models import byte_level_vocabulary, hf_model

from riftco.models import Decoder, DecoderConfig, ModelError, Tokenizer, generate, generate_tokens
from riftco.models.generation import _as_text, sample
from riftco.models.gguf_tokenizer import convert

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
METADATA = {
    **{k.replace("__", "."): v for k, v in byte_level_vocabulary([], CONTROL).items()},
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}


@pytest.fixture(scope="module")
def reference():
    return hf_model("llama", vocab_size=300)


@pytest.fixture(scope="module")
def model(reference):
    decoder = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    decoder.load_state_dict(reference.state_dict())
    return decoder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(convert(tmp_path_factory.mktemp("t") / "m.gguf", METADATA), [2])


def test_greedy_equals_transformers(model, reference):
    prompt = [5, 9, 200, 14]
    want = reference.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 4:].tolist()
    got = list(generate_tokens(model, prompt, max_new_tokens=40))
    assert got == want and len(set(got)) > 5
    stop = got[10]
    assert list(generate_tokens(model, prompt, max_new_tokens=40, stop_ids={stop})) == got[: got.index(stop)]


@covers("generate")
def test_greedy_generation_of_every_family(family):
    reference = hf_model(family)
    decoder = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    decoder.load_state_dict(reference.state_dict())
    prompt = torch.randint(3, 160, (1, 12))
    options = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = reference.generate(prompt, **options)[0, 12:].tolist()
    assert list(generate_tokens(decoder, prompt[0].tolist(), max_new_tokens=18)) == want


def test_a_seed_repeats_and_the_mode_comes_back(model):
    def run(seed):
        return list(generate_tokens(model, [5, 9], max_new_tokens=12, temperature=1.0, top_p=0.9, seed=seed))

    model.train()
    assert run(1) == run(1) != run(2)
    assert model.training
    tokens = generate_tokens(model, [5, 9], max_new_tokens=12)
    next(tokens)
    assert not model.training
    tokens.close()
    assert model.training
    assert torch.is_grad_enabled()


def test_dropout_is_off_while_generating(reference):
    decoder = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    decoder.load_state_dict(reference.state_dict())
    want = list(generate_tokens(decoder, [5, 9], max_new_tokens=12))
    mlp = decoder.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(torch.nn.Dropout(0.9), mlp.down_proj)
    assert list(generate_tokens(decoder, [5, 9], max_new_tokens=12)) == want


def test_samples_follow_temperature_and_top_p():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)
    for temperature, top_p, kept in ((1.0, 1.0, 4), (2.0, 1.0, 4), (1.0, 0.8, 2), (0.5, 0.5, 1), (1.0, 0.64, 1)):
        probs = (logits[0] / temperature).softmax(-1)
        probs[kept:] = 0
        drawn = sample(logits, temperature, top_p, generator).bincount(minlength=4) / len(logits)
        torch.testing.assert_close(drawn, probs / probs.sum(), atol=0.015, rtol=0)
    assert (sample(logits[:3].roll(1, -1), 0.0, 1.0) == 1).all()


def test_the_coldest_temperature_takes_the_likeliest_token():
    logits = torch.tensor([[-3e38, 7.0, 7.001, 3.0]])
    assert sample(logits, 1e-300, 0.5).item() == sample(logits, 1e-300, 1.0).item() == 2


def test_text_comes_in_whole_characters_and_adds_up(tokenizer):
    text = "naïve 日本 🙂 done"
    ids = tokenizer.encode(text)
    pieces = list(_as_text(tokenizer, iter(ids)))
    assert "".join(pieces) == text and not any("�" in p for p in pieces)
    assert len(pieces) == len(text)  # one token a byte: a piece for every character
    cut = list(_as_text(tokenizer, iter(ids[:-9])))  # ends inside the emoji
    assert "".join(cut) == "naïve 日本 " + "�" or "".join(cut).startswith("naïve 日本 ")


def test_chat_and_plain_prompts(model, tokenizer, monkeypatch):
    seen = []
    real = generate_tokens

    def spy(model, ids, **options):
        seen.append((ids, options["stop_ids"]))
        return real(model, ids, **options)

    monkeypatch.setattr("riftco.models.generation.generate_tokens", spy)
    text = "".join(generate(model, tokenizer, [{"role": "user", "content": "ab"}], max_new_tokens=5))
    assert isinstance(text, str)
    list(generate(model, tokenizer, "ab", max_new_tokens=5))
    plain = tokenizer.encode("ab")
    assert seen == [([1, *plain, 2], {0, 2}), (plain, {0, 2})]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
        ({"temperature": -1.0}, "temperature must not be negative; got -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1; got 0.0"),
        ({"max_new_tokens": 127}, "a context of 129 tokens is longer than this model's 128"),
    ],
)
def test_options_out_of_range_are_refused_at_the_call(model, options, says):
    with pytest.raises(ModelError, match=says):
        generate_tokens(model, [1, 2], **options)
    with pytest.raises(ModelError, match="the prompt is empty"):
        generate_tokens(model, [])


def test_the_last_position_of_the_context_is_used(model):
    assert len(list(generate_tokens(model, [1, 2], max_new_tokens=126))) == 126
