"""PEFT folders both ways, on a tiny Llama of transformers: the same logits and gradients, and every refusal."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from riftco.adapters import (
    AdapterError,
    LoraSpec,
    adapted,
    apply_lora,
    base_weights_of,
    load_adapter,
    read_spec,
    save_adapter,
)

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SPECS = {
    "all-linear": LoraSpec(rank=4, alpha=8),
    "endings": LoraSpec(rank=3, alpha=6, target_modules=("q_proj", "layers.1.mlp.down_proj")),
    "regex": LoraSpec(rank=5, alpha=5, target_modules=r".*\.(k|v)_proj", use_rslora=True),
    "patterns": LoraSpec(rank=4, alpha=8, rank_pattern={"q_proj": 2}, alpha_pattern={"layers.0.self_attn.q_proj": 1}),
    "dora": LoraSpec(rank=4, alpha=8, use_dora=True),
    "dora, rslora": LoraSpec(rank=3, alpha=9, target_modules=r".*(v|o|up)_proj", use_dora=True, use_rslora=True),
}
IDS = torch.arange(12).view(2, 6)


def base():
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def shake(model):
    """Give every B a value: a fresh adapter would change nothing."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
            if "lora_magnitude_vector" in name:
                p.mul_(torch.rand_like(p) + 0.5)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_peft_loads_what_riftco_wrote(spec, tmp_path):
    model = base()
    plain = model(IDS).logits
    apply_lora(model, spec, seed=1)
    assert torch.equal(model(IDS).logits, plain)
    shake(model)
    want = model(IDS).logits
    assert (want - plain).abs().max() > 0.01
    save_adapter(model, spec, tmp_path / "adapter", base="tiny")
    other = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(other(IDS).logits, want, rtol=0, atol=1e-5)
    names = {n.removeprefix("base_model.model.") for n, m in other.named_modules() if hasattr(m, "lora_A")}
    assert names == set(adapted(model))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_riftco_loads_what_peft_wrote(spec, tmp_path):
    targets = spec.target_modules if isinstance(spec.target_modules, str) else list(spec.target_modules)
    config = peft.LoraConfig(
        r=spec.rank, lora_alpha=spec.alpha, target_modules=targets, use_rslora=spec.use_rslora, use_dora=spec.use_dora,
        rank_pattern=dict(spec.rank_pattern), alpha_pattern=dict(spec.alpha_pattern), task_type="CAUSAL_LM",
    )  # fmt: skip
    other = peft.get_peft_model(base(), config)
    shake(other)
    other.save_pretrained(tmp_path)
    model = base()
    load_adapter(model, tmp_path)
    torch.testing.assert_close(model(IDS).logits, other(IDS).logits, rtol=0, atol=1e-5)
    for m in (model, other):
        m(IDS, labels=IDS).loss.backward()
    mine = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    theirs = {
        n.removeprefix("base_model.model.").replace("_vector.default.weight", "_vector").replace(".default", ""): p.grad
        for n, p in other.named_parameters()
        if p.grad is not None
    }
    assert mine.keys() == theirs.keys() and mine
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-4, atol=1e-6)


def test_seed_and_freezing():
    first, second, third = base(), base(), base()
    for model, seed in ((first, 5), (second, 5), (third, 6)):
        before = torch.get_rng_state()
        apply_lora(model, LoraSpec(rank=2), seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
    a, b, c = (next(iter(adapted(m).values())).lora_A.weight for m in (first, second, third))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert all("lora_" in n for n, p in first.named_parameters() if p.requires_grad)


def test_how_the_base_was_held_is_kept_beside_the_adapter(tmp_path):
    model, spec = base(), LoraSpec(rank=2)
    apply_lora(model, spec)
    save_adapter(model, spec, tmp_path / "plain")
    save_adapter(model, spec, tmp_path / "quantised", base_weights="nf4")
    assert base_weights_of(tmp_path / "plain") is None and base_weights_of(tmp_path / "quantised") == "nf4"
    peft.PeftModel.from_pretrained(base(), tmp_path / "quantised")
    for damage in ("[]", '{"base_weights": 4}', '{"base_weights": "nf5"}'):
        (tmp_path / "quantised" / "riftco.json").write_text(damage)
        with pytest.raises(AdapterError, match="is damaged"):
            base_weights_of(tmp_path / "quantised")
    save_adapter(model, spec, tmp_path / "quantised")
    assert base_weights_of(tmp_path / "quantised") is None, "a note does not outlive the adapter that it was of"


def test_refusals(tmp_path):
    with pytest.raises(AdapterError, match="rank must be a whole number between 1 and 256; got 0"):
        LoraSpec(rank=0)
    with pytest.raises(AdapterError, match="dropout"):
        LoraSpec(dropout=1.0)
    with pytest.raises(AdapterError, match=r"no linear layer matches .*the model has: .*down_proj"):
        apply_lora(base(), LoraSpec(target_modules=("nothing",)))
    model, spec = base(), LoraSpec(rank=2)
    apply_lora(model, spec)
    with pytest.raises(AdapterError, match="already carries"):
        apply_lora(model, spec)
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read_spec(tmp_path)
    save_adapter(model, spec, tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for key, value in (("use_qalora", True), ("lora_bias", True), ("peft_type", "IA3"), ("bias", "some")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(AdapterError, match=key):
            load_adapter(base(), tmp_path)
    for key, value, says in (
        ("lora_bias", True, "lora_bias=True is not supported; merge the adapter in PEFT"),
        ("init_lora_weights", "pissa", "path_initial_model_for_weight_conversion"),
        ("r", True, "rank must be a whole number"),
        ("r", None, r"adapter_config\.json lacks r"),
        ("lora_alpha", "x", "alpha must be a finite number; got 'x'"),
        ("target_modules", 3, "target_modules must be a text"),
        ("target_modules", "(", r"'\(' is no regular expression"),
        ("rank_pattern", {"(": 1}, r"'\(' is no regular expression"),
        ("alpha_pattern", [1], "alpha_pattern must map layer names to numbers"),
        ("lora_dropout", "x", "dropout must be in"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(AdapterError, match=says):
            load_adapter(base(), tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="must hold a JSON object; got list"):
        load_adapter(base(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = tmp_path / "adapter_model.safetensors"
    state = load_file(weights)
    save_file({**state, "base_model.model.extra.lora_A.weight": torch.zeros(1)}, weights)
    with pytest.raises(AdapterError, match=r"nothing consumes: base_model\.model\.extra"):
        load_adapter(base(), tmp_path)
    key = sorted(state)[0]
    save_file({k: v for k, v in state.items() if k != key}, weights)
    with pytest.raises(AdapterError, match="lacks"):
        load_adapter(base(), tmp_path)
    save_file({**state, key: torch.zeros(1, 1)}, weights)
    with pytest.raises(AdapterError, match=r"has shape \(1, 1\).*; is this its base model\?"):
        load_adapter(base(), tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "some/model"}))
    with pytest.raises(AdapterError, match=r"; it was trained over some/model"):
        load_adapter(base(), tmp_path)
    weights.write_bytes(b"not a safetensors file")
    with pytest.raises(AdapterError, match="cannot be read"):
        load_adapter(base(), tmp_path)
