"""Every option of PEFT's LoraConfig that riftco reads, both ways: the same logits, loss and gradients of one step.

riftco's side is its decoder, whose loss goes through the sliced head; PEFT's is transformers' model.
"""

import json
import warnings

import pytest
import tiny_models
import torch
from safetensors.torch import load_file

from riftco.adapters import LoraSpec, adapter_state, apply_lora, load_adapter, read_spec, save_adapter
from riftco.adapters.lora import adapter_parameters
from riftco.models.config import DecoderConfig
from riftco.models.decoder import Decoder

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[5, 3, 5, 99, 7, 5, 2, 8], [11, 7, 7, 0, 1, 42, 5, 9]])
ATTENTION = ("q_proj", "v_proj")
# name -> (config of tiny_models, specification)
OPTIONS = {
    "exclude names": ("llama", dict(exclude_modules=("k_proj", "layers.1.mlp.up_proj"))),
    "exclude regex": ("llama", dict(exclude_modules=r".*\.1\..*proj")),
    "one layer": ("llama", dict(target_modules=ATTENTION, layers_to_transform=(1,))),
    "layers by pattern": (
        "llama", dict(target_modules=ATTENTION, layers_to_transform=(0,), layers_pattern=("layers",))
    ),
    "head and norm saved": ("llama", dict(target_modules=ATTENTION, modules_to_save=("lm_head", "model.norm"))),
    "norms saved, names by their ends": ("llama", dict(modules_to_save=("norm",))),
    "a whole module saved": ("llama-biases", dict(modules_to_save=("layers.0.mlp",))),
    "embedding saved": ("llama", dict(target_modules=ATTENTION, modules_to_save=("embed_tokens",))),
    "tied, embedding saved alone": ("llama-tied", dict(target_modules=ATTENTION, modules_to_save=("embed_tokens",))),
    "tied, head saved alone": ("llama-tied", dict(target_modules=ATTENTION, modules_to_save=("lm_head",))),
    "tied, saved together": (
        "llama-tied", dict(target_modules=ATTENTION, modules_to_save=("embed_tokens",), ensure_weight_tying=True)
    ),
    "rows": ("llama", dict(target_modules=ATTENTION, trainable_token_indices=(5, 99, 0))),
    "rows by name": ("llama", dict(target_modules=ATTENTION, trainable_token_indices={"embed_tokens": (7, 5)})),
    "tied, rows": ("llama-tied", dict(target_modules=ATTENTION, trainable_token_indices=(5, 99, 0))),
    "all biases": ("llama-biases", dict(target_modules=ATTENTION, bias="all")),
    "biases of adapted layers": ("llama-biases", dict(target_modules=("q_proj", "down_proj"), bias="lora_only")),
    "embedding": ("llama", dict(target_modules=("embed_tokens", "q_proj"))),
    "embedding, patterns, rslora": (
        "llama",
        dict(
            target_modules=r".*(embed_tokens|v_proj)", use_rslora=True, rank_pattern={"embed_tokens": 6},
            alpha_pattern={"embed_tokens": 3, "v_proj": 5},
        ),
    ),
    "embedding, dora": ("llama", dict(target_modules=("embed_tokens", "o_proj"), use_dora=True)),
    "embedding and head": ("llama", dict(target_modules=("embed_tokens", "lm_head"))),
    "tied, embedding alone": ("llama-tied", dict(target_modules=("embed_tokens", "q_proj"))),
    "tied, head alone": ("llama-tied", dict(target_modules=("lm_head", "q_proj"))),
    "tied, embedding and head apart": ("llama-tied", dict(target_modules=("embed_tokens", "lm_head"))),
    "tied, embedding and head together": (
        "llama-tied", dict(target_modules=("embed_tokens", "q_proj"), ensure_weight_tying=True, use_rslora=True)
    ),
}  # fmt: skip


def spec_of(name):
    return LoraSpec(**{"rank": 4, "alpha": 6, **OPTIONS[name][1]})


def hf(name):
    return tiny_models.hf_model(OPTIONS[name][0])


def decoder(name):
    reference = hf(name)
    model = Decoder(DecoderConfig.from_hf(reference.config.to_dict()))
    model.load_state_dict(reference.state_dict())
    return model


def shake(parameters):
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for p in parameters:
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)


def peft_config(spec):
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(spec).items()}
    tokens = plain["trainable_token_indices"]
    if isinstance(tokens, dict):
        plain["trainable_token_indices"] = {k: list(v) for k, v in tokens.items()}
    plain["r"], plain["lora_alpha"], plain["lora_dropout"] = (plain.pop(k) for k in ("rank", "alpha", "dropout"))
    return peft.LoraConfig(task_type="CAUSAL_LM", **{k: v for k, v in plain.items() if v not in ([], {}, None)})


def close(a, b, what=""):
    assert (a - b).abs().max() <= 1e-4 * b.abs().max(), (what, (a - b).abs().max(), b.abs().max())


def their_gradients(model):
    """PEFT's key (of files) -> gradient; of an adapter that a tied head shares, the sum of both halves."""
    grads = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            key = name.replace("modules_to_save.default.", "").replace("_vector.default.weight", "_vector")
            grads[key.replace(".default", "")] = p.grad
    for part, other in (("lora_A.weight", "lora_embedding_B"), ("lora_B.weight", "lora_embedding_A")):
        head, embedding = f"base_model.model.lm_head.{part}", f"base_model.model.model.embed_tokens.{other}"
        if model.peft_config["default"].ensure_weight_tying and head in grads:
            grads[embedding] = grads[embedding] + grads.pop(head).t()
    return grads


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT advises on tied weights and embeddings
        yield


@pytest.mark.parametrize("name", OPTIONS)
def test_peft_loads_what_riftco_wrote(name, tmp_path):
    model, spec = decoder(name), spec_of(name)
    plain = model(IDS)
    apply_lora(model, spec, seed=1)
    close(model(IDS), plain)
    shake(adapter_parameters(model).values())
    with torch.no_grad():
        want = model(IDS)
    assert (want - plain).abs().max() > 0.01
    save_adapter(model, spec, tmp_path)
    theirs = peft.PeftModel.from_pretrained(hf(name), tmp_path)
    close(theirs(IDS).logits, want)
    assert read_spec(tmp_path) == spec


@pytest.mark.parametrize("name", OPTIONS)
def test_riftco_loads_what_peft_wrote(name, tmp_path):
    theirs = peft.get_peft_model(hf(name), peft_config(spec_of(name)))
    shake([p for p in theirs.parameters() if p.requires_grad])
    theirs.save_pretrained(tmp_path)
    model = decoder(name)
    spec = load_adapter(model, tmp_path)
    close(model(IDS), theirs(IDS).logits)

    loss = theirs(IDS, labels=IDS).loss
    loss.backward()
    mine = model.loss(IDS[:, :-1], IDS[:, 1:])
    mine.backward()
    close(mine, loss)
    want, parameters = their_gradients(theirs), adapter_parameters(model)
    assert want.keys() == parameters.keys()
    for key, parameter in parameters.items():
        assert want[key].abs().max() > 0, key
        close(parameter.grad, want[key], key)
    frozen = {id(p) for p in model.parameters()} - {id(p) for p in parameters.values()}
    assert frozen and all(p.requires_grad == (id(p) not in frozen) for p in model.parameters())

    save_adapter(model, spec, tmp_path / "again")
    first, second = (
        load_file(tmp_path / "adapter_model.safetensors"),
        load_file(tmp_path / "again" / "adapter_model.safetensors"),
    )
    assert second.keys() == {k for k in first if not k.endswith("base_layer.weight")}
    assert all(torch.equal(second[k], first[k]) for k in second)


def test_every_field_of_the_specification_is_written_and_read(tmp_path):
    spec = LoraSpec(
        rank=3, alpha=5.5, target_modules=("q_proj", "v_proj"), dropout=0.25, use_rslora=True, use_dora=True,
        rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 7}, exclude_modules=("layers.1.self_attn.q_proj",),
        layers_to_transform=(0, 1), layers_pattern=("layers",), modules_to_save=("lm_head",),
        trainable_token_indices=(1, 2), bias="all", ensure_weight_tying=True,
    )  # fmt: skip
    assert all(getattr(spec, f) != getattr(LoraSpec(), f) for f in vars(spec))
    model = decoder("all biases")
    apply_lora(model, spec)
    save_adapter(model, spec, tmp_path)
    assert read_spec(tmp_path) == spec


def test_a_setting_that_peft_may_add_is_refused_by_name(tmp_path):
    model, spec = decoder("embedding"), spec_of("embedding")
    apply_lora(model, spec)
    save_adapter(model, spec, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    known = json.loads(json.dumps(peft.LoraConfig(r=4, target_modules=["q_proj"]).to_dict(), default=list))
    for key, value in known.items():  # what this version of PEFT writes without being asked is read
        (tmp_path / "adapter_config.json").write_text(json.dumps({key: value, **config}))
        read_spec(tmp_path)
    refused = {
        "use_a_new_idea": True, "lora_bias": True, "layer_replication": [[0, 1]], "target_parameters": ["w"],
        "alora_invocation_tokens": [1], "kasa_config": {"beta": 1}, "init_lora_weights": "pissa", "bias": "some",
        "init_lora_weights ": "loftq", "fan_in_fan_out": True,
    }  # fmt: skip
    for key, value in refused.items():
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, key.strip(): value}))
        says = "(is not supported; (accepted|merge the adapter in PEFT)|changes the base's weights)"
        with pytest.raises(ValueError, match=f"{key.strip()}=.* {says}"):
            read_spec(tmp_path)


def test_dropout_is_pefts(tmp_path):
    """None on embeddings; on linear layers it hides elements of x from the adapter alone, scaled by 1 / (1 - p)."""
    spec = LoraSpec(rank=4, alpha=8, target_modules=("embed_tokens",), dropout=0.5)
    model = decoder("embedding")
    apply_lora(model, spec, seed=0)
    shake(adapter_parameters(model).values())
    assert torch.equal(model.train()(IDS), model.eval()(IDS))
    save_adapter(model, spec, tmp_path)
    theirs = peft.PeftModel.from_pretrained(hf("embedding"), tmp_path, is_trainable=True).train()
    close(theirs(IDS).logits, model(IDS))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("rows", dict(trainable_token_indices=(400,)), "must be distinct and below 160; got"),
        ("rows", dict(trainable_token_indices={"nose": (1,)}), "trainable_token_indices names 'nose'"),
        ("rows", dict(trainable_token_indices={"lm_head": (1,)}), "names lm_head, a Linear; accepted: embeddings"),
        ("rows", dict(target_modules=("embed_tokens",)), "cannot have trained rows as well; choose one"),
        ("tied, rows", dict(target_modules=("lm_head",)), "shares the trained rows of model.embed_tokens"),
        ("embedding", dict(modules_to_save=("nose",)), "modules_to_save names 'nose'"),
        ("embedding", dict(target_modules=("norm",)), "names model.norm, a RMSNorm, which cannot carry a LoRA"),
        ("tied, embedding and head together", dict(use_dora=True), "use_dora and ensure_weight_tying exclude"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_anything_changes(name, change, says):
    model = decoder(name)
    before = {n: id(m) for n, m in model.named_modules()}
    with pytest.raises(ValueError, match=says):
        apply_lora(model, LoraSpec(**{"rank": 4, "alpha": 6, **OPTIONS[name][1], **change}))
    assert {n: id(m) for n, m in model.named_modules()} == before
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (dict(bias="some"), "bias must be one of none, all, lora_only; got 'some'"),
        (dict(layers_to_transform=(0,)), "layers_to_transform goes with target_modules as names"),
        (dict(target_modules=("q",), layers_pattern=("layers",)), "layers_pattern goes with layers_to_transform"),
        (dict(modules_to_save="lm_head"), "modules_to_save must be a tuple of names"),
        (dict(trainable_token_indices=(-1,)), "trainable_token_indices must be token ids"),
        (dict(exclude_modules="("), "is no regular expression"),
    ],
)
def test_a_specification_that_makes_no_sense_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        LoraSpec(**fields)


def test_an_embedding_of_another_base_is_refused(tmp_path):
    theirs = peft.get_peft_model(hf("embedding"), peft_config(spec_of("embedding")))
    theirs.save_pretrained(tmp_path)
    other = decoder("embedding")
    with torch.no_grad():
        other.model.embed_tokens.weight.add_(1)
    with pytest.raises(ValueError, match=r"embed_tokens\.base_layer\.weight is not this model's weight"):
        load_adapter(other, tmp_path)


def test_quantised_layers_cannot_be_saved_whole():
    from riftco.nn import NF4Linear

    model = decoder("embedding")
    attention = model.model.layers[0].self_attn
    attention.o_proj = NF4Linear.from_linear(attention.o_proj)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.o_proj, whose weights are quantised"):
        apply_lora(model, LoraSpec(modules_to_save=("layers.0.self_attn",)))


def test_a_tied_model_has_one_owner():
    """Adapter, rows or weight are counted, optimised and saved once; the head's half of the gradient is in it."""
    for name in ("tied, embedding and head together", "tied, rows", "tied, saved together"):
        model, spec = decoder(name), spec_of(name)
        apply_lora(model, spec, seed=0)
        shake(adapter_parameters(model).values())
        own = {k: p for k, p in adapter_parameters(model).items() if "embed_tokens" in k}
        assert own and not any("lm_head" in n for n, p in model.named_parameters() if p.requires_grad)
        hidden = model.hidden(IDS).detach()
        alone = torch.autograd.grad(model.lm_head(hidden).square().sum(), list(own.values()))
        whole = torch.autograd.grad(model(IDS).square().sum(), list(own.values()))
        for half, both in zip(alone, whole, strict=True):
            assert half.abs().max() > 0 and not torch.allclose(half, both)
        assert set(adapter_state(model)) >= set(own)
