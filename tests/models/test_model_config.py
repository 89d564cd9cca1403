"""DecoderConfig from config.json and from GGUF metadata, and the frequencies of every rotation."""

import json

import pytest
import torch
from families import FAMILIES, SIZES, covered
from tiny_models import hf_config

from riftco.models.config import ARCHITECTURES, DecoderConfig
from riftco.models.errors import ModelError
from riftco.models.rotary import Rope, Rotary

LLAMA = {"model_type": "llama", **SIZES}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 160,
    "llama.rope.freq_base": 1e5,
}


def one_line(refused) -> str:
    text = str(refused.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("family", sorted(covered()["forward"]))
def test_a_config_survives_the_round_trip(family):
    config = DecoderConfig.from_hf(json.loads(hf_config(family).to_json_string(use_diff=False)))
    assert config == DecoderConfig.from_hf(config.to_hf())
    assert config.architecture == FAMILIES[family][0]


def test_transformers_4_spelling_means_the_same():
    new = {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}
    old = {**LLAMA, "rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert DecoderConfig.from_hf(new) == DecoderConfig.from_hf(old)
    assert DecoderConfig.from_hf(new).rope == Rope(16, 5e4, "linear", {"factor": 2.0})


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported; accepted: llama, mistral"),
        ({"model_type": None}, "architecture None"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_hidden_layers": 0}, "num_layers must be a positive integer; got 0"),
        ({"vocab_size": "160"}, "vocab_size must be a positive integer; got '160'"),
        ({"num_attention_heads": 5}, "hidden_size (64) must be a multiple"),
        ({"num_key_value_heads": 3}, "num_heads (4) must be a multiple of num_kv_heads (3)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "rope_type 'su' is not supported; accepted: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}, "equal short"),
        ({"model_type": "mistral", "sliding_window": 64}, "a sliding window (64 of 128 positions)"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "window"),
        ({"layer_types": ["full_attention", "chunked"]}, "layer_types ['chunked']"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, says):
    with pytest.raises(ModelError) as refused:
        DecoderConfig.from_hf({**LLAMA, **change})
    assert says in one_line(refused)


def test_windows_that_never_cut_are_accepted():
    DecoderConfig.from_hf({**LLAMA, "model_type": "mistral", "sliding_window": 128})
    DecoderConfig.from_hf({**LLAMA, "model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False})
    DecoderConfig.from_hf(
        {**LLAMA, "model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}
    )


def test_gguf_metadata():
    config = DecoderConfig.from_gguf(GGUF, {"output.weight": None})
    assert (config.num_layers, config.head_dim, config.rope.theta, config.vocab_size) == (2, 16, 1e5, 160)
    assert not config.tie_word_embeddings
    assert DecoderConfig.from_gguf(GGUF, {}).tie_word_embeddings


@pytest.mark.parametrize(
    "change, says",
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported; accepted: llama"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.attention.sliding_window": 32}, "a sliding window (32"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope'"),
        ({"llama.attention.head_count": [4, 4]}, "number of heads"),
    ],
)
def test_gguf_metadata_that_is_refused(change, says):
    with pytest.raises(ModelError) as refused:
        DecoderConfig.from_gguf({**GGUF, **change}, {})
    assert says in one_line(refused)


@pytest.mark.parametrize("family", sorted(covered()["forward"]))
def test_frequencies_equal_transformers(family):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(family))
    config = DecoderConfig.from_hf(model.config.to_dict())
    positions = torch.arange(120)
    want = model.model.rotary_emb(torch.zeros(1), positions[None])
    for got, expected in zip(Rotary(config.rope)(positions)[:2], want):
        torch.testing.assert_close(got, expected[0, :, : config.head_dim // 2], rtol=0, atol=3e-5)


def test_yarn_options():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for extra in (
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"attention_factor": 1.5},
        {"truncate": False},
    ):
        params = {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            **extra,
        }
        config = LlamaConfig(**{**SIZES, "head_dim": 64, "rope_parameters": params})
        freqs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
        got, got_factor = DecoderConfig.from_hf(config.to_dict()).rope.frequencies()
        torch.testing.assert_close(got, freqs)
        assert got_factor == pytest.approx(factor)


def test_gguf_divisors_become_a_longrope_that_transformers_reads():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = torch.linspace(1, 8, 8)
    rope = DecoderConfig.from_gguf(GGUF, {"rope_freqs.weight": divisors}).rope
    plain = DecoderConfig.from_gguf(GGUF, {}).rope.frequencies()[0]
    torch.testing.assert_close(rope.frequencies()[0], plain / divisors)
    config = LlamaConfig(**{**SIZES, "rope_parameters": rope.to_hf()["rope_parameters"]})
    freqs, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=100)
    torch.testing.assert_close(rope.frequencies()[0], freqs)
    assert factor == 1.0


def test_gguf_scalings():
    linear = {**GGUF, "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert DecoderConfig.from_gguf(linear, {}).rope == Rope(16, 1e5, "linear", {"factor": 4.0})
    yarn = {**linear, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 32}
    assert DecoderConfig.from_gguf(yarn, {}).rope.scaling["original_max_position_embeddings"] == 32
    with pytest.raises(ModelError, match="rope_freqs"):
        DecoderConfig.from_gguf(linear, {"rope_freqs.weight": torch.ones(8)})


def test_positions_in_any_shape_and_no_rounding_when_a_model_is_cast():
    rotary = Rotary(Rope(16, 1e4))
    positions = torch.tensor([[5, 0], [7, 3]])
    cos, sin, rows = rotary(positions)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos[rows[1, 0]], (7 * 1e4 ** (-torch.arange(0, 16, 2) / 16)).cos())
    torch.testing.assert_close(sin[rows[0, 1]], torch.zeros(8))
    assert rotary(positions[0]).rows is None  # in order: no look-up


def test_accepted_architectures_name_transformers_classes():
    import transformers

    assert all(hasattr(transformers, name) for name in ARCHITECTURES.values())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1], r"rope parameters must be a JSON object; got \[1\]"),
        ({"rope_type": "linear", "factor": "x"}, "rope factor must be a positive number; got 'x'"),
        ({"rope_type": "linear", "factor": 0}, "rope factor must be a positive number; got 0"),
    ],
)
def test_rope_parameters_that_cannot_be_meant(given, says):
    with pytest.raises(ModelError, match=says):
        Rope.from_hf({"rope_parameters": given}, 16, 1e4)
