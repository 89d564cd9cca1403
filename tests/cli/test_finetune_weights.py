"""--weights: how the base is held while an adapter is trained, and afterwards."""

import json

import pytest
from conftest import METADATA, VOCABULARY
from tiny_models import hf_model, write_gguf

from riftco.models import load_model
from riftco.nn import GGUFEmbedding, GGUFLinear

SMALL = ("--batch-tokens", 96, "--steps", 2, "--warmup", 0, "--rank", 2, "--log-json")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "tiny.gguf"
    source = hf_model("llama-tied", vocab_size=VOCABULARY, max_position_embeddings=256)
    write_gguf(path, source, matrix_type="Q8_0", everywhere=True, **METADATA)
    return str(path)


def losses(result):
    return [line["loss"] for line in map(json.loads, result.stdout.splitlines()) if "loss" in line]


def test_an_adapter_over_a_gguf_files_own_blocks(riftco, packed, chat, tmp_path):
    """The same losses as over the dequantised weights; used again, the adapter finds the base as it was trained on."""
    arguments = ("finetune", "--model", packed, "--data", chat, *SMALL)
    done = riftco(*arguments, "--weights", "packed", "--output", tmp_path / "a")
    plain = riftco(*arguments, "--method", "lora", "--weights", "fp32", "--output", tmp_path / "b")
    assert losses(done) == pytest.approx(losses(plain), rel=1e-4) and len(losses(done)) >= 2
    assert json.loads((tmp_path / "a" / "adapter" / "riftco.json").read_text()) == {"base_weights": "packed"}
    adapter = ("--model", packed, "--adapter", tmp_path / "a" / "adapter")
    auto = riftco("evaluate", *adapter, "--data", chat, "--log-json")
    named = riftco("evaluate", *adapter, "--data", chat, "--log-json", "--weights", "packed")
    assert losses(auto) == losses(named)
    riftco("generate", *adapter, "--prompt", "say a", "--max-new-tokens", 3)
    model, _ = load_model(packed, weights="packed", with_tokenizer=False)
    assert type(model.model.embed_tokens) is GGUFEmbedding and type(model.lm_head) is GGUFLinear


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--weights", "int8"), "--weights must be one of auto, nf4, packed, bf16, fp32; got 'int8'"),
        (("--method", "full", "--weights", "packed"), "--weights packed is frozen; --method full trains the weights"),
        (("--weights", "bf16", "--dtype", "fp32"), "--weights bf16 and --dtype fp32 exclude each other"),
    ],
)
def test_weights_that_cannot_be(riftco, packed, chat, tmp_path, flags, says):
    result = riftco("finetune", "--model", packed, "--data", chat, "--output", tmp_path / "r", *flags, code=2)
    assert says in result.stderr
