"""DecoderConfig from config.json and from GGUF metadata, and the frequencies of every rotation."""

import json

import pytest
import torch
from families import FAMILIES, SIZES
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


@pytest.mark.parametrize("family", FAMILIES)
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
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, "rope_type 'ntk' is not supported; accepted: default, linear"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "rope_type 'longrope' needs short_factor, long_factor"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}},
            "rope long_factor must hold 8 numbers",
        ),
        ({"model_type": "gemma3"}, "text_config of gemma3 must be a JSON object; got None"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma2", "final_logit_softcapping": "x"}, "final_softcap must be a number from 0 on; got 'x'"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop 0.1"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be a positive integer; got 0"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "layer_types of mistral"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "names sliding_attention, but there is no sliding_window",
        ),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "an entry for each of 2 layers; got 1"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types ['chunked_attention'] are not"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, says):
    with pytest.raises(ModelError) as refused:
        DecoderConfig.from_hf({**LLAMA, **change})
    assert says in one_line(refused)


def test_which_layers_have_a_window():
    def sliding(**changes):
        config = DecoderConfig.from_hf({**LLAMA, "num_hidden_layers": 6, **changes})
        return [i for i in range(6) if config.window_of(i) is not None]

    assert sliding(model_type="mistral", sliding_window=64) == [*range(6)]
    assert sliding(model_type="mistral", sliding_window=128) == []  # never cuts
    assert sliding(model_type="mistral", max_position_embeddings=8192) == [*range(6)]  # transformers' default, 4096
    assert sliding(model_type="mistral", max_position_embeddings=8192, sliding_window=None) == []
    qwen = {"model_type": "qwen2", "sliding_window": 64}
    assert sliding(**qwen) == sliding(**qwen, use_sliding_window=False, max_window_layers=0) == []
    assert sliding(**qwen, use_sliding_window=True, max_window_layers=4) == [4, 5]
    assert sliding(**qwen, use_sliding_window=True) == []  # from layer 28 on
    assert sliding(model_type="gemma2", sliding_window=64) == [0, 2, 4]
    assert sliding(model_type="gemma3_text", sliding_window=64) == [0, 1, 2, 3, 4]
    assert sliding(model_type="gemma3_text", sliding_window=64, sliding_window_pattern=3) == [0, 1, 3, 4]
    smol = {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64}
    assert sliding(**smol) == [3]
    assert sliding(**smol, layer_types=["sliding_attention"] + ["full_attention"] * 5) == [0]


def test_what_a_file_leaves_out_is_what_transformers_makes_of_it():
    gemma = DecoderConfig.from_hf({**LLAMA, "model_type": "gemma2"})
    assert (gemma.attention_softcap, gemma.final_softcap, gemma.head_dim) == (50.0, 30.0, 256)
    assert gemma.tie_word_embeddings and gemma.attention_scale == 256**-0.5
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    gemma = DecoderConfig.from_hf({**LLAMA, "model_type": "gemma2", **none})
    assert (gemma.attention_softcap, gemma.final_softcap) == (0.0, 0.0)
    gemma = DecoderConfig.from_hf({**LLAMA, "model_type": "gemma3_text"})
    assert gemma.rope.theta == 1e6 and gemma.local_rope == Rope(256, 1e4) and gemma.final_softcap == 0
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    gemma = DecoderConfig.from_hf({**LLAMA, "model_type": "gemma3_text", **old})
    assert gemma.rope == Rope(256, 5e5, "linear", {"factor": 8.0}) and gemma.local_rope == Rope(256, 2e4)
    assert DecoderConfig.from_hf({**LLAMA, "model_type": "phi3"}).rms_norm_eps == 1e-5


def test_gguf_metadata():
    config = DecoderConfig.from_gguf(GGUF, {"output.weight": None})
    assert (config.num_layers, config.head_dim, config.rope.theta, config.vocab_size) == (2, 16, 1e5, 160)
    assert not config.tie_word_embeddings
    assert DecoderConfig.from_gguf(GGUF, {}).tie_word_embeddings


@pytest.mark.parametrize(
    "change, says",
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba' is not supported; accepted: llama"),
        ({"llama.block_count": None}, "lacks llama.block_count"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count 8"),
        ({"llama.rope.scaling.type": "ntk"}, "rope.scaling.type 'ntk'"),
        ({"llama.attention.head_count": [4, 4]}, "number of heads"),
    ],
)
def test_gguf_metadata_that_is_refused(change, says):
    with pytest.raises(ModelError) as refused:
        DecoderConfig.from_gguf({**GGUF, **change}, {})
    assert says in one_line(refused)


@pytest.mark.parametrize("length", [30, 120])  # LongRoPE's switches at 32
@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_equal_transformers(family, length):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf_config(family))
    config = DecoderConfig.from_hf(model.config.to_dict())
    positions = torch.arange(length)
    pairs = [(config.rope, {})]
    if config.local_rope is not None:
        pairs = [
            (config.rope, {"layer_type": "full_attention"}),
            (config.local_rope, {"layer_type": "sliding_attention"}),
        ]
    for rope, which in pairs:
        want = model.model.rotary_emb(torch.zeros(1), positions[None], **which)
        for got, expected in zip(Rotary(rope)(positions)[:2], want):
            torch.testing.assert_close(got, expected[0, :, : rope.dim // 2], rtol=0, atol=3e-5)


def test_longrope_goes_by_the_length_of_each_sequence():
    config = DecoderConfig.from_hf(hf_config("phi3-longrope").to_dict())
    rotary, positions = Rotary(config.rope), torch.arange(8)
    short, long = rotary(positions).cos, rotary(positions, 33).cos
    assert torch.equal(rotary(positions, 32).cos, short) and not torch.equal(long, short)
    mixed = rotary(positions, torch.tensor([33, 33, 33, 33, 8, 8, 8, 8])).cos
    assert torch.equal(mixed, torch.cat([long[:4], short[4:]]))
    rows = rotary(torch.stack([positions, positions + 30])).cos.view(2, 8, -1)
    assert torch.equal(rows[0], short) and not torch.equal(rows[1, 0], rotary(positions + 30, 8).cos[0])
    assert Rotary(DecoderConfig.from_hf(hf_config("llama-3.1").to_dict()).rope).switches_at is None


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
    config = LlamaConfig(**{**SIZES, "rope_parameters": rope.to_hf()})
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
