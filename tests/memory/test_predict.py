"""The peak before the step runs: against what the tracer counts of a real step, and against a GPU's allocator."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch
from families import FAMILIES, SIZES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from riftco.memory import fitting, predict
from riftco.memory.budget import _most, forecast
from riftco.memory.predict import ERROR, PARTS
from riftco.memory.step import memory_of
from riftco.models.config import DecoderConfig
from riftco.train.config import ConfigError, FinetuneConfig, parse_size

ROOT = pathlib.Path(__file__).parents[2]
TINY = dict(
    model_type="llama", vocab_size=2048, hidden_size=128, intermediate_size=352, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, rms_norm_eps=1e-5,
    tie_word_embeddings=False, hidden_act="silu",
)  # fmt: skip
SMALL = {**TINY, "num_hidden_layers": 9, "hidden_size": 192, "intermediate_size": 512, "tie_word_embeddings": True}
LARGE = {
    **TINY, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


def settings(**given):
    return FinetuneConfig(model="", data="", output="", **given)


def written(tmp_path, shape):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(shape))
    return str(path)


@pytest.mark.parametrize("replay", ["disabled", "block"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("shape", [TINY, SMALL], ids=["tiny", "small"])
def test_a_prediction_is_what_a_traced_step_takes(tmp_path, shape, method, replay):
    """Nine layers are predicted from traces of two and of four."""
    options = {"method": method, "activation_checkpointing": replay, "rank": 8}
    real = memory_of(written(tmp_path, shape), tokens=192, batch=2, device="cpu", **options)
    made = predict(DecoderConfig.from_hf(shape), settings(**options), tokens=192, batch=2, target="cpu")
    assert made.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02), "10 % are promised; more than 2 has a reason"
    assert made.phase.endswith(real.phase)
    kinds = real.kinds
    assert made.parts["optimizer"] == pytest.approx(kinds["optimizer state"], rel=0.02)
    held = kinds["parameter"] + kinds["frozen weight"]
    assert made.parts["weights"] + made.parts["adapters"] == pytest.approx(held, rel=0.02)
    assert (made.parts["adapters"] == 0) == (method == "full")
    # what is kept for the backward as it is read then: the tracer calls a gradient so that is one later
    assert made.parts["activations"] == pytest.approx(kinds.get("saved for backward", 0), rel=0.05, abs=64 << 10)


@pytest.mark.parametrize(
    "options",
    [
        {"attention": "materialized"},
        {"activation_checkpointing": "selective"},
        {"optimizer_state": "paged-8bit", "method": "full"},
        {"dtype": "bf16", "method": "full"},
    ],
    ids=lambda o: ",".join(map(str, o.values())),
)
def test_options_are_in_the_prediction(tmp_path, options):
    options = {"method": "lora", **options}
    real = memory_of(written(tmp_path, TINY), tokens=192, batch=2, device="cpu", **options)
    made = predict(DecoderConfig.from_hf(TINY), settings(**options), tokens=192, batch=2, target="cpu")
    assert made.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "qwen2-window", "smollm3"])
def test_other_families(tmp_path, family):
    kind, changes = FAMILIES[family]
    # a vocabulary large enough that the head sets the peak, as in real models, and not the blocks inside of attention
    shape = {**SIZES, **changes, "model_type": kind, "num_hidden_layers": 5, "hidden_act": "silu", "vocab_size": 4096}
    shape |= {"layer_types": None} if family != "gemma3" else {"hidden_activation": "gelu_pytorch_tanh"}
    if "layer_types" in changes:
        shape["layer_types"] = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    if "no_rope_layers" in changes:
        shape["no_rope_layers"] = [1, 0, 1, 1, 0]
    shape = {k: v for k, v in shape.items() if v is not None}
    options = {"method": "lora", "rank": 4}
    real = memory_of(written(tmp_path, shape), tokens=96, batch=2, device="cpu", **options)
    made = predict(DecoderConfig.from_hf(shape), settings(**options), tokens=96, batch=2, target="cpu")
    assert made.peak_bytes == pytest.approx(real.peak_bytes, rel=ERROR)


class Largest(TorchDispatchMode):
    """The largest tensor that takes memory."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                self.nbytes = max(self.nbytes, t.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("method", ["qlora", "full"])
def test_a_large_model_is_predicted_without_a_byte_of_it(method):
    with Largest() as real:
        made = predict(DecoderConfig.from_hf(LARGE), settings(method=method, dtype="bf16"), tokens=2048)
    assert real.nbytes < 1 << 20
    assert sum(made.parts.values()) == made.peak_bytes and set(made.parts) == set(PARTS)
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rest = 2 * 128256 * 4096
    if method == "qlora":  # four bits, a byte and a float32 scale for each block of 64
        assert made.parts["weights"] == pytest.approx(matrices * (0.5 + 5 / 64) + 2 * rest, rel=0.01)
        # at least: x twice, q, k, v, out, gate, up a layer, in bfloat16
        kept = 32 * 2048 * (4 * 4096 + 2 * 1024 + 2 * 14336) * 2
        assert kept <= made.parts["activations"] < 1.5 * kept
        assert made.phase == "forward" and made.parts["allocator's slack"] >= 32 << 20
    else:  # two bytes a weight, two a gradient, eight for the moments
        assert made.peak_bytes == pytest.approx(12 * (matrices + rest), rel=0.05)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_adapters_options_are_in_the_prediction(target):
    config = DecoderConfig.from_hf(TINY)
    plain, dora, saved = (
        predict(config, settings(method="qlora", **more), tokens=192, batch=2, target=target)
        for more in ({}, {"dora": True}, {"modules_to_save": "lm_head"})
    )
    assert plain.parts["adapters"] < dora.parts["adapters"] < 1.2 * plain.parts["adapters"]
    assert dora.parts["weights"] == plain.parts["weights"]
    element = 4 if target == "cpu" else 2
    assert saved.parts["adapters"] - plain.parts["adapters"] >= 2048 * 128 * element


def test_gradients_of_earlier_micro_batches_are_there():
    config = DecoderConfig.from_hf(TINY)
    once = predict(config, settings(method="full"), tokens=192, batch=4, target="cpu")
    more = predict(config, settings(method="full", accumulate=2), tokens=192, batch=4, target="cpu")
    assert once.phase == "forward" and once.parts["gradients"] < more.parts["gradients"]
    parameters = once.parts["weights"]
    assert more.peak_bytes >= once.peak_bytes + 0.5 * parameters


def test_what_fits():
    config, asked = DecoderConfig.from_hf(LARGE), settings(method="qlora")
    budget = 24 << 30
    fits = fitting(config, asked, budget, tokens=2048, batch=6)
    assert [f.checkpointing for f in fits] == ["disabled", "selective", "block"]
    assert [f.fits for f in fits] == [False, True, True]
    assert fits[0].batch < fits[1].batch < fits[2].batch
    for fit in fits:  # the next one would not fit, by the prediction itself
        chosen = settings(method="qlora", activation_checkpointing=fit.checkpointing)
        at, above = (predict(config, chosen, tokens=2048, batch=fit.batch + n).peak_bytes for n in (0, 1))
        assert at * (1 + ERROR) <= budget < above * (1 + ERROR)
    (last,) = fitting(config, settings(method="qlora", activation_checkpointing="block"), 8 << 30, tokens=8192)
    assert last.batch == 0 and 0 < last.tokens < 8192 and last.tokens % 64 == 0
    assert last.line(8192).endswith(f"does not fit; not one row of 8192 tokens; one of {last.tokens} fits")
    (none,) = fitting(config, settings(method="lora", activation_checkpointing="block"), 8 << 30, tokens=8192)
    assert (none.batch, none.tokens) == (0, 0) and "nothing fits" in none.line(8192)


@pytest.mark.parametrize("limit", [1, 7, 500])
@pytest.mark.parametrize("cost", [lambda n: 10 + 3 * n, lambda n: 10 + n * n, lambda n: 50.0, lambda n: 10 + (n > 4)])
def test_the_search(cost, limit):
    for budget in (0, 13, 47, 49.5, 10_000):
        asked = []
        got = _most(lambda n, asked=asked: asked.append(n) or cost(n), budget, limit)
        want = max((n for n in range(1, limit + 1) if cost(n) <= budget), default=0)
        assert got == want
        assert len(asked) == len(set(asked)) <= 40


def test_sizes():
    for text, want in (
        ("24GiB", 24 << 30),
        ("24 gb", 24 << 30),
        ("24G", 24 << 30),
        ("1.5MiB", 3 << 19),
        ("1000", 1000),
    ):
        assert parse_size("--budget", text) == want
    assert parse_size("--budget", "1000 B") == 1000
    for bad in ("", "-1GiB", "24 apples", "0"):
        with pytest.raises(ConfigError, match="--budget must be a size such as 24GiB"):
            parse_size("--budget", bad)


def test_the_command(tmp_path):
    from typer.testing import CliRunner

    from riftco.cli.app import app

    def run(*flags):
        return CliRunner().invoke(app, ["memory", "--model", written(tmp_path, TINY), *flags])

    shown = run("--predict", "--batch-tokens", "1000", "--max-length", "250", "--device", "cuda", "--budget", "1GiB")
    assert shown.exit_code == 0, shown.output
    for text in (
        "a micro-batch of 4 x 250 tokens on cuda",
        "predicted peak",
        "within 10%",
        "weights",
        "disabled",
        "fits",
    ):
        assert text in shown.stdout
    row = json.loads(run("--budget", "3MiB", "--device", "cpu", "--tokens", "64", "--log-json").stdout)
    assert row["peak_bytes"] == sum(row["prediction"]["parts"].values()) and row["fits"][0]["fits"] is False
    same = forecast(written(tmp_path, TINY), {"method": "qlora"}, tokens=64, device="cpu")
    assert same.prediction.peak_bytes == row["peak_bytes"]
    for flags, text in (
        (("--predict", "--device", "mps"), "a step on mps cannot be predicted; accepted: cpu, cuda"),
        (("--predict", "--tokens", "1"), "--tokens must be a whole number of 2 or more; got 1"),
        (("--predict", "--tokens", "9000"), "longer than this model's context of 4096"),
        (("--budget", "much"), "--budget must be a size such as 24GiB; got 'much'"),
        (("--batch-tokens", "64"), "--batch-tokens belongs to a prediction: add --predict"),
        (("--predict", "--method", "dora"), "--method must be one of qlora, lora, full; got 'dora'"),
    ):
        refused = run(*flags)
        assert refused.exit_code == 2 and text in refused.stderr, refused.stderr


def test_a_prediction_leaves_the_launchers_as_they_are(tmp_path):
    """In a fresh process, where none of them is loaded yet."""
    code = f"""
import torch
from riftco.memory.budget import forecast
from riftco.nn import NF4Linear
forecast({written(tmp_path, TINY | dict(num_hidden_layers=1))!r}, {{"method": "qlora"}}, tokens=64, device="cpu")
x = torch.randn(2, 64)
plain = torch.nn.Linear(64, 64)
y, want = NF4Linear.from_linear(plain)(x), plain(x)
assert (y - want).norm() < 0.2 * want.norm()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "tokens", "batch"),
    [
        ({"method": "full", "dtype": "bf16"}, 1024, 4),
        ({"method": "lora"}, 2048, 4),
        ({"method": "qlora"}, 2048, 4),
        ({"method": "qlora", "activation_checkpointing": "block"}, 2048, 8),
    ],
    ids=lambda value: ",".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_on_a_gpu_it_is_within_ten_percent_of_the_allocators_peak(tmp_path, options, tokens, batch):
    """Of a model of 8B's width with six layers and a vocabulary of 32,000."""
    shape = {**LARGE, "num_hidden_layers": 6, "vocab_size": 32_000}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    real = memory_of(written(tmp_path, shape), tokens=tokens, batch=batch, device="cuda", **options)
    peak = real.allocator_bytes - before
    made = predict(DecoderConfig.from_hf(shape), settings(**options), tokens=tokens, batch=batch, target="cuda")
    print(f"{options}: predicted {made.peak_bytes / 2**30:.2f}, held {peak / 2**30:.2f} GiB")
    assert made.peak_bytes == pytest.approx(peak, rel=ERROR)
